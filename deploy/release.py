"""`make release`: build a release into dist/, and check it by installing it.

`python -m deploy.release [--base IMAGE] [--skip-demo]`, after `make chart`.
dist/ then has the packages for Python and, where npm is, for Node; images/ where buildah or docker
works; sbom/ (CycloneDX) of the client and of the services, as images contain their own; Helm's
chart; baseline.binpb, which the schema's next versions must not break; CHANGES.md, this version's
section of the changelog; SHA256SUMS of all of these.

SOURCE_DATE_EPOCH is the commit's time, so that equal commits give equal packages.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from deploy.images import build as images
from deploy.images.build import ROOT, version

DIST = ROOT / "dist"
SCRATCH = ROOT / "build" / "release"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # if pip has no index of its own


def main(arguments: list[str]) -> None:
    """Build and check a release.

    Raises:
        SystemExit: the demo did not end.
        subprocess.CalledProcessError: a part cannot be built, or does not work once installed.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("--base", default="", help="of the images; empty: the Dockerfile's")
    parser.add_argument("--skip-demo", action="store_true", help="do not install the services")
    options = parser.parse_args(arguments)
    for directory in (DIST, SCRATCH):
        shutil.rmtree(directory, ignore_errors=True)
    (DIST / "sbom").mkdir(parents=True)
    tools = _environment("tools", f"--requirement={ROOT}/requirements-build.lock")
    build = (str(tools), "-m", "build", "--no-isolation", "--outdir", str(DIST))
    _run(*build, "--sdist", "--wheel", str(ROOT))
    _run(*build, "--wheel", str(ROOT / "server"))
    if shutil.which("npm"):
        pack_node(DIST / "npm")
    buf = str(Path(sys.executable).with_name("buf"))
    _run(buf, "build", "proto", "--exclude-source-info", f"--output={DIST}/baseline.binpb")
    (DIST / "CHANGES.md").write_text(changes_of((ROOT / "CHANGELOG.md").read_text(), version()))
    pack_chart(ROOT / "deploy" / "chart", DIST / f"specrej-{version()}.tgz")
    client = _environment("client", _wheel("specrej"), tools=tools)
    _run(str(client.with_name("specrej")), "--version", cwd=SCRATCH)
    if not options.skip_demo:
        _check_demo(tools)
    if images.working_engine():
        (DIST / "images").mkdir()
        images.main([f"--base={options.base}", "--archives", str(DIST / "images")])
    files = [str(path.relative_to(DIST)) for path in sorted(DIST.rglob("*")) if path.is_file()]
    sums = _run("sha256sum", *files, cwd=DIST)
    (DIST / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def changes_of(changelog: str, number: str) -> str:
    """The changelog's section of a version; without one, that of what is not released yet.

    Raises:
        ValueError: it has neither.
    """
    for name in (number, "Unreleased"):
        section = re.search(rf"^## \[{re.escape(name)}\].*\n((?:(?!## ).*\n?)*)", changelog, re.M)
        if section and (text := section[1].strip()):
            return f"# {number}\n\n{text}\n"
    raise ValueError(f"the changelog has no section of {number}")


def pack_chart(chart: Path, target: Path) -> None:
    """Write a chart's archive; equal files give equal bytes."""
    order = ("--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--mode=a+rX,u+w,go-w")
    compressed = ("--use-compress-program=gzip -n", "--file", str(target))
    where = (f"--directory={chart.parent}", f"--transform=s,^{chart.name},specrej,", chart.name)
    _run("tar", "--create", *order, *compressed, *where)


def pack_node(target: Path) -> Path:
    """Generate, compile and pack the client for Node; returns the archive."""
    folder = ROOT / "clients" / "typescript"
    target.mkdir(exist_ok=True)
    if not (folder / "node_modules").exists():
        _run("npm", "ci", "--silent", cwd=folder)
    _run("npm", "pack", "--silent", f"--pack-destination={target}", cwd=folder)
    return next(target.glob("*.tgz"))


def _check_demo(tools: Path) -> None:
    """Install the services with the embedded models into an empty environment; run the demo."""
    index = () if "TORCH_INDEX_URL" in images.pip_settings() else (f"--index-url={_TORCH_INDEX}",)
    lock = ROOT / "requirements-torch.lock"
    python = _environment("services", *index, "--no-deps", f"--requirement={lock}")
    torch = re.findall(r"^torch==\S+", lock.read_text(), re.MULTILINE)
    packages = (_wheel("specrej"), f"{_wheel('specrej_server')}[cpu]", *torch)
    python = _environment("services", *packages, tools=tools)
    os.environ["XDG_CACHE_HOME"] = str(SCRATCH / "cache")
    if "everything is stopped" not in _run(str(python.with_name("specrej")), "demo", cwd=SCRATCH):
        sys.exit("the demo did not end")


def _environment(name: str, *packages: str, tools: Path | None = None) -> Path:
    """Install packages into an environment of this name; with `tools`, list all that it has.

    Returns its Python.
    """
    python = SCRATCH / name / "bin" / "python"
    if not python.exists():
        venv.create(SCRATCH / name, with_pip=True)
    _run(str(python), "-m", "pip", "--quiet", "install", *packages)
    if tools:
        lister = (str(tools.with_name("cyclonedx-py")), "environment", "--output-reproducible")
        file = f"-o={DIST}/sbom/{name}.cdx.json"
        _run(*lister, f"--pyproject={ROOT}/pyproject.toml", file, str(python))
    return python


def _wheel(name: str) -> str:
    return str(next(DIST.glob(f"{name}-*.whl")))


def _run(*command: str, cwd: Path = ROOT) -> str:
    """Return the stdout of a command; stderr is inherited."""
    committed = subprocess.check_output(("git", "log", "-1", "--format=%ct"), cwd=ROOT, text=True)
    variables = {**os.environ, "SOURCE_DATE_EPOCH": committed.strip()}
    variables.pop("PYTHONPATH", None)  # of a checkout, which the environments do without
    return subprocess.run(
        command, cwd=cwd, env=variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
