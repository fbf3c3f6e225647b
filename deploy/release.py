"""`make release`: builds what a release consists of into dist/, and checks it by installing it.

`python -m deploy.release [--base IMAGE] [--skip-demo] [--skip-images]`, after `make manifests`. In
dist/:

    specrej-*.whl, specrej_server-*.whl, specrej-*.tar.gz    packages; the last has both's sources
    npm/specrej-*.tgz       the client for Node, if npm is there
    images/*.tar            in OCI's layout, if buildah or docker is there
    images.json             their names and sizes
    sbom/*.cdx.json         CycloneDX: of the client, of services with models, of each image
    manifests/*.yaml        every overlay, rendered
    specrej-*.tgz           Helm's chart of them
    baseline.binpb          the schema, which the next versions must not break
    CHANGES.md              this version's section of the changelog
    SHA256SUMS              of all of these

Equal commits give equal packages: SOURCE_DATE_EPOCH is the commit's time. The packages are built
twice, the second time from the source archive, and compared.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.images import build as images
from deploy.images.build import ROOT, version

DIST = ROOT / "dist"
SCRATCH = ROOT / "build" / "release"
CLIENT, SERVER = "specrej", "specrej_server"
NODE = ROOT / "clients" / "typescript"
_NODE_CHECK = 'import { Client } from "specrej"; new Client({ address: "127.0.0.1:1" }).close();'
# Of torch's CPU build, if pip has no index of its own.
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Run where the client's wheel and its requirements are alone.
_CLIENT_CHECK = """
import importlib.metadata, importlib.util, json, time
began = time.perf_counter()
from specrej import Client
import_ms = (time.perf_counter() - began) * 1e3
ours = {
    "specrej_models", "orchestrator", "generator_service", "reward_service", "gateway",
    "loadtest", "deploy",
}
found = {name for name in ours if importlib.util.find_spec(name)}
assert not found, found
packages = [p for p in importlib.metadata.distributions() if p.name not in ("pip", "setuptools")]
files = [p.locate_file(file) for p in packages for file in p.files if file.suffix != ".pyc"]
print(json.dumps({
    "packages": sorted(f"{p.name}=={p.version}" for p in packages),
    "bytes": sum(file.stat().st_size for file in files),
    "import_ms": round(import_ms, 1),
}))
"""


def main(arguments: list[str]) -> None:
    """Build and check a release; the last line of the output is one JSON object.

    Raises:
        SystemExit: a part cannot be built, or does not work once installed.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("--base", default="", help="of the images; empty: the Dockerfile's")
    parser.add_argument("--skip-demo", action="store_true", help="do not install the services")
    parser.add_argument("--skip-images", action="store_true")
    options = parser.parse_args(arguments)
    if os.environ.get("GITHUB_REF_TYPE") == "tag":
        check_tag(os.environ["GITHUB_REF_NAME"], version())
    for directory in (DIST, SCRATCH):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    tools = _environment(
        "tools", "--require-hashes", f"--requirement={ROOT}/requirements-build.lock"
    )
    _build_packages(tools)
    write_schema(DIST / "baseline.binpb")
    (DIST / "CHANGES.md").write_text(changes_of((ROOT / "CHANGELOG.md").read_text(), version()))
    shutil.copytree(ROOT / "build" / "manifests", DIST / "manifests")
    pack_chart(ROOT / "build" / "helm" / CLIENT, DIST / f"{CLIENT}-{version()}.tgz")
    result: dict[str, object] = {"version": version()}
    result["client"] = _check_client(tools)
    result["npm"] = _check_node()
    result["images"] = "left out" if options.skip_images else _build_images(options.base)
    result["demo"] = "left out" if options.skip_demo else _check_demo(tools)
    sums = [f"{digest_of(path)}  {path.relative_to(DIST)}" for path in _files(DIST)]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(*sums, sep="\n")
    print(json.dumps(result))


def check_tag(tag: str, number: str) -> None:
    """Exit if the tag of a release is not that of its version."""
    if tag != f"v{number}":
        sys.exit(f"the tag {tag} is not that of version {number}: v{number}")


def changes_of(changelog: str, number: str) -> str:
    """The changelog's section of a version; without one, that of what is not released yet.

    Raises:
        ValueError: it has neither.
    """
    sections = {
        section[1]: section[2].strip()
        for section in re.finditer(r"^## \[(.+?)\].*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    }
    for name in (number, "Unreleased"):
        if text := sections.get(name):
            return f"# {number}\n\n{text}\n"
    raise ValueError(f"the changelog has no section of {number}")


def build_packages(python: Path, target: Path, *, source: Path = ROOT) -> list[Path]:
    """Build both wheels and the source archive with the hatchling of an environment."""
    hatchling = (str(python), "-m", "hatchling", "build", "--directory", str(target))
    _run(*hatchling, "--target", "sdist", "--target", "wheel", cwd=source)
    _run(*hatchling, "--target", "wheel", cwd=source / "server")
    return sorted(path for path in target.iterdir() if path.suffix in (".whl", ".gz"))


def _build_packages(tools: Path) -> None:
    """Build the packages twice, from the checkout and from the source archive, and compare."""
    built = build_packages(tools, DIST)
    again = SCRATCH / "again"
    shutil.unpack_archive(next(DIST.glob("*.tar.gz")), again, filter="data")
    (unpacked,) = again.iterdir()
    for path in build_packages(tools, again / "dist", source=unpacked):
        if digest_of(path) != digest_of(DIST / path.name):
            sys.exit(f"{path.name} differs when it is built from the source archive")
    print(*(f"built {path.name}, {path.stat().st_size:,} bytes" for path in built), sep="\n")


def write_schema(target: Path) -> None:
    """Write the schema in the form of proto/baseline.binpb."""
    buf = str(Path(sys.executable).with_name("buf"))
    _run(buf, "build", "proto", "--exclude-source-info", "--output", str(target))


def pack_chart(chart: Path, target: Path) -> None:
    """Write a chart's archive; equal files give equal bytes."""
    with (
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in _files(chart):
            member = tarfile.TarInfo(str(path.relative_to(chart.parent)))
            member.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(member, content)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _environment(name: str, *packages: str) -> Path:
    """The Python of a new virtual environment with these arguments of pip install."""
    directory = SCRATCH / name
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    _pip(python, *packages)
    return python


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *arguments)


def _wheel(name: str) -> str:
    return str(next(DIST.glob(f"{name}-*.whl")))


def _check_client(tools: Path) -> dict[str, object]:
    """Install the client alone; returns its packages, their size and the time of its import."""
    python = _environment("client", _wheel(CLIENT))
    _run(str(python.with_name("specrej")), "--version", cwd=SCRATCH)
    _list(tools, python, "client")
    outputs = [_run(str(python), "-c", _CLIENT_CHECK, cwd=SCRATCH) for _ in range(5)]
    results: list[dict[str, Any]] = [json.loads(output) for output in outputs]
    # Of the import's times the least: the others are those of a busy machine.
    return min(results, key=lambda result: result["import_ms"])


def _check_node() -> str:
    """Pack the client for Node, and use it where it is installed from there."""
    if not shutil.which("npm"):
        return "left out: no npm here"
    _run("npm", "ci", "--silent", cwd=NODE)
    archive = pack_node(DIST / "npm")
    empty = SCRATCH / "node"
    empty.mkdir()
    (empty / "package.json").write_text("{}")
    _run("npm", "install", "--silent", str(archive), cwd=empty)
    check_node(empty)
    return "works"


def pack_node(target: Path) -> Path:
    """The archive of the client for Node, whose packages are installed."""
    shutil.rmtree(NODE / "dist", ignore_errors=True)
    target.mkdir(exist_ok=True)
    _run("npm", "pack", "--silent", f"--pack-destination={target}", cwd=NODE)
    (archive,) = target.glob("*.tgz")
    return archive


def check_node(directory: Path) -> None:
    """Use the client for Node in a directory where it is installed."""
    _run("node", "--input-type=module", "--eval", _NODE_CHECK, cwd=directory)


def _check_demo(tools: Path) -> str:
    """Install the services with the embedded models into an empty environment; run the demo."""
    has_sources = "TORCH_INDEX_URL" in images.pip_settings()
    index = () if has_sources else (f"--index-url={_TORCH_INDEX}",)
    lock = f"--requirement={ROOT}/requirements-torch.lock"
    python = _environment("embedded", *index, "--no-deps", "--require-hashes", lock)
    torch = re.findall(r"^torch==\S+", (ROOT / "requirements-torch.lock").read_text(), re.MULTILINE)
    _pip(python, f"{_wheel(CLIENT)}[embedded,rich]", _wheel(SERVER), *torch)
    _list(tools, python, "embedded")
    empty = SCRATCH / "empty"
    empty.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(SCRATCH / "cache")}
    output = _run(str(python.with_name("specrej")), "demo", cwd=empty, environment=environment)
    if "everything is stopped" not in output:
        sys.exit(f"the demo did not end:\n{output}")
    return "answered"


def _list(tools: Path, python: Path, name: str) -> None:
    """Write the bill of materials of an environment."""
    (DIST / "sbom").mkdir(exist_ok=True)
    lister = str(tools.with_name("cyclonedx-py"))
    file = DIST / "sbom" / f"{name}.cdx.json"
    project = f"--pyproject={ROOT}/pyproject.toml"
    _run(lister, "environment", "--output-reproducible", project, f"-o={file}", str(python))


def _build_images(base: str) -> object:
    """Build all CPU images, and keep them and their bills of materials."""
    if not images.working_engine():
        return "left out: neither buildah nor docker works here"
    (DIST / "images").mkdir()
    shutil.rmtree(ROOT / "build" / "sbom", ignore_errors=True)  # of images built before
    written = ("--write", str(DIST / "images.json"), "--archives", str(DIST / "images"))
    images.main([f"--base={base}", *written])
    for path in _files(ROOT / "build" / "sbom"):
        shutil.copy(path, DIST / "sbom" / f"image-{path.name}")
    return list(images.TARGETS)


def _run(*command: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Return the stdout of a command; stderr is inherited."""
    committed = images.run("git", "log", "-1", "--format=%ct", cwd=ROOT)  # seconds
    variables = {**(environment or os.environ), "SOURCE_DATE_EPOCH": committed.strip()}
    variables.pop("PYTHONPATH", None)  # of a checkout, which the environments do without
    return images.run(*command, cwd=cwd, env=variables)


if __name__ == "__main__":
    main(sys.argv[1:])
