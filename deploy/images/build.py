"""Builds the images, copies their bills of materials to build/sbom, and prints the sizes of their
layers and largest packages.

`python -m deploy.images.build [--base IMAGE] [--write FILE] [--archives DIRECTORY] [TARGET ...]`.
--archives keeps each image as DIRECTORY/TARGET.tar in OCI's layout. Uses buildah if it works here,
else docker; buildah needs BUILDAH_ISOLATION=chroot where it may not create containers.
The build uses this machine's pip configuration: indexes, links and certificate authorities. Local
directories among them are mounted by buildah; docker cannot do that. Without a configuration the
Dockerfile's defaults apply.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.images.sizes import Image, file_of, image_of
from deploy.local.machine import describe_machine

ROOT = Path(__file__).parents[2]
TARGETS = ("orchestrator", "generator", "reward", "models", "generator-vllm")
# Of an image; written by install.py.
SBOM = "opt/venv/sbom.cdx.json"
# Environment variables of pip settings; PIP_FIND_LINKS stands for find-links.
PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")


def version() -> str:
    """Return the version of both packages and of the images."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def name_of(target: str) -> str:
    """Return the image name that overlays use; `localhost` prevents a pull from a registry."""
    return f"localhost/specrej/{target}:{version()}"


def main(arguments: list[str]) -> None:
    """Build the images, measure them, print a table and one JSON line."""
    options = _arguments(arguments)
    pip = pip_settings()
    for target in options.targets:
        print(f"building {target}", file=sys.stderr)
        run(*_build(options.engine, target, options.base, pip))
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specrej-image-", dir=ROOT / "build") as scratch:
        images = {
            target: _measured(options.engine, target, options.archives or Path(scratch))
            for target in options.targets
        }
    result = {
        "machine": describe_machine(),
        "built with": run(options.engine, "--version").strip(),
        "base": options.base or "the Dockerfile's",
        "note": options.note,
        "images": {target: asdict(image) for target, image in images.items()},
    }
    if options.write:
        options.write.write_text(json.dumps(result, indent=2) + "\n")
    print(table(images))
    print(json.dumps(result))


def pip_settings() -> dict[str, str]:
    """Return pip's configured package sources as build arguments."""
    settings: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        variable = f"PIP_{name.rpartition('.')[2]}".upper().replace("-", "_")
        if variable in PIP_VARIABLES:
            settings[variable] = value.strip("'\"")
    # With sources of its own, the build must not use the Dockerfile's index of torch.
    return {"TORCH_INDEX_URL": "", **settings} if settings.keys() - {"PIP_CERT"} else settings


def local_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """Yield the local directories in pip settings; for an index, its parent with the files."""
    for value in " ".join(settings.values()).split():
        parts = urlsplit(value)
        if parts.scheme == "file":
            yield Path(parts.path).parent
        elif not parts.scheme and Path(value).exists():
            yield Path(value)


def table(images: Mapping[str, Image]) -> str:
    """Return a table of sizes in MB: images, layers, and the largest packages of each layer."""
    lines = [f"{'':<44}{'MB':>8}{'packed':>8}"]
    for target, image in images.items():
        lines.append(_row(target, image.bytes, image.packed_bytes))
        for layer in image.layers:
            lines.append(_row(f"  {layer.made_by[:40]}", layer.bytes, layer.packed_bytes))
            lines += [_row(f"    {name[:38]}", size) for name, size in layer.largest.items()]
    return "\n".join(lines)


def _row(name: str, size: int, packed: int | None = None) -> str:
    last = f"{packed / 1e6:>8.1f}" if packed is not None else ""
    return f"{name:<44}{size / 1e6:>8.1f}{last}"


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.images.build")
    parser.add_argument("targets", nargs="*", default=TARGETS, help=" ".join(TARGETS))
    parser.add_argument("--base", default="", help="image to build on; empty: the Dockerfile's")
    parser.add_argument("--engine", default=working_engine() or "buildah", help="buildah or docker")
    parser.add_argument("--write", type=Path, help="file for the result, as JSON")
    parser.add_argument("--archives", type=Path, help="existing directory that keeps the images")
    parser.add_argument("--note", default="", help="remark to store with the result")
    return parser.parse_args(arguments)


def working_engine() -> str | None:
    """The first of buildah and docker that is installed and may be used here."""
    for name in filter(shutil.which, ("buildah", "docker")):
        if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def _build(engine: str, target: str, base: str, pip: Mapping[str, str]) -> Iterator[str]:
    yield from (engine, "build", "--file", str(ROOT / "deploy" / "images" / "Dockerfile"))
    yield from ("--target", target, "--tag", name_of(target))
    for key, value in {**pip, **({"BASE": base} if base else {})}.items():
        yield from ("--build-arg", f"{key}={value}")
    local = sorted(set(local_paths(pip)))
    if engine == "buildah":
        # Caches layers, because targets share stages.
        yield "--layers"
        for path in local:
            yield from ("--volume", f"{path}:{path}:ro")
    elif local:
        raise SystemExit(f"docker cannot mount {', '.join(map(str, local))}: use buildah")
    yield str(ROOT)


def archive_command(engine: str, target: str, archive: Path) -> tuple[str, ...]:
    """The command that writes an image with its name to a tar file in OCI's layout."""
    name = name_of(target)
    if engine == "buildah":
        return ("buildah", "push", "--quiet", name, f"oci-archive:{archive}:{name}")
    return ("docker", "save", "--output", str(archive), name)  # since docker 25


def _measured(engine: str, target: str, directory: Path) -> Image:
    archive = directory / f"{target}.tar"
    run(*archive_command(engine, target, archive))
    if sbom := file_of(archive, SBOM):
        copy = ROOT / "build" / "sbom" / f"{target}.cdx.json"
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(sbom)
    return image_of(archive)


def run(*command: str, **options: Any) -> str:
    """Return the stdout of a command; stderr is inherited. `options` are those of `subprocess`.

    Raises:
        SystemExit: the command failed; the text has the end of its output.
    """
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, **options
    )
    if result.returncode:
        sys.exit(f"{result.stdout[-4000:]}{' '.join(command)}: exit code {result.returncode}")
    return result.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
