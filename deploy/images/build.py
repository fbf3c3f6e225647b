"""Builds the images, and says how large they are and with what.

`python -m deploy.images.build [--base IMAGE] [--write FILE] [TARGET ...]`, with buildah or docker,
whichever is there; buildah wants BUILDAH_ISOLATION=chroot where it may not make containers.
The build's pip is told what pip is told here: indexes, links and authorities, local ones too, which
buildah mounts (docker cannot). Where it is told of none, the Dockerfile knows where torch is.
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
from urllib.parse import urlsplit

from benchmarks.machine import describe_machine
from deploy.images.sizes import Image, image_of

ROOT = Path(__file__).parents[2]
TARGETS = ("orchestrator", "generator", "reward", "models")
# Of pip's settings, by its own rule: PIP_FIND_LINKS is find-links.
PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")


def name_of(target: str) -> str:
    """What an image is called, here and in overlays: nobody else's can be pulled by that name."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return f"localhost/specrej/{target}:{version}"


def main(arguments: list[str]) -> None:
    """Build, measure, print."""
    asked = _arguments(arguments)
    pip = pip_settings()
    for target in asked.targets:
        print(f"building {target}", file=sys.stderr)
        _run(*_build(asked.engine, target, asked.base, pip))
    images = {target: _measured(asked.engine, target) for target in asked.targets}
    result = {
        "machine": describe_machine(),
        "built with": _run(asked.engine, "--version").strip(),
        "base": asked.base or "the Dockerfile's own",
        "note": asked.note,
        "images": {target: asdict(image) for target, image in images.items()},
    }
    if asked.write:
        asked.write.write_text(json.dumps(result, indent=2) + "\n")
    print(table(images))
    print(json.dumps(result))


def pip_settings() -> dict[str, str]:
    """What pip is told here about where packages come from, by the names of its variables."""
    found: dict[str, str] = {}
    for line in _run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        variable = f"PIP_{name.rpartition('.')[2]}".upper().replace("-", "_")
        if variable in PIP_VARIABLES:
            found[variable] = value.strip("'\"")
    # Whoever names places is asked for nothing from elsewhere.
    return {"PIP_EXTRA_INDEX_URL": "", **found} if found.keys() - {"PIP_CERT"} else found


def local_paths(settings: Mapping[str, str]) -> Iterator[Path]:
    """What of this machine these name. Of an index the directory above, which has its files."""
    for value in " ".join(settings.values()).split():
        parts = urlsplit(value)
        if parts.scheme == "file":
            yield Path(parts.path).parent
        elif not parts.scheme and Path(value).exists():
            yield Path(value)


def table(images: Mapping[str, Image]) -> str:
    """Megabytes: of each image, of its layers, of the largest things in them."""
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
    parser.add_argument("--engine", default=_engine(), help="buildah or docker")
    parser.add_argument("--write", type=Path, help="file for the result, as JSON")
    parser.add_argument("--note", default="", help="what to say beside it")
    return parser.parse_args(arguments)


def _engine() -> str:
    return next((each for each in ("buildah", "docker") if shutil.which(each)), "buildah")


def _build(engine: str, target: str, base: str, pip: Mapping[str, str]) -> Iterator[str]:
    yield from (engine, "build", "--file", str(ROOT / "deploy" / "images" / "Dockerfile"))
    yield from ("--target", target, "--tag", name_of(target))
    for key, value in {**pip, **({"BASE": base} if base else {})}.items():
        yield from ("--build-arg", f"{key}={value}")
    local = sorted(set(local_paths(pip)))
    if engine == "buildah":
        # Stages are shared by the targets.
        yield "--layers"
        for path in local:
            yield from ("--volume", f"{path}:{path}:ro")
    elif local:
        raise SystemExit(f"docker builds see nothing of {', '.join(map(str, local))}: use buildah")
    yield str(ROOT)


def _measured(engine: str, target: str) -> Image:
    name = name_of(target)
    with tempfile.TemporaryDirectory(prefix="specrej-image-", dir=ROOT / "build") as scratch:
        archive = Path(scratch) / "image.tar"
        if engine == "buildah":
            _run("buildah", "push", "--quiet", name, f"oci-archive:{archive}")
        else:
            _run("docker", "save", "--output", str(archive), name)
        return image_of(archive)


def _run(*command: str) -> str:
    """What it prints; its complaints go where ours go."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(f"{result.stdout[-4000:]}{' '.join(command)}: exit code {result.returncode}")
    return result.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
