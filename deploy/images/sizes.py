"""Sizes of an image, its layers and packages, read from an OCI archive of buildah or docker."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# How many packages of a layer are listed, and their least size in bytes.
_LARGEST, LEAST = 8, 500_000
# Files below these directories count by entry, all others by their first two path components.
_PARTED = ("site-packages", "dist-packages", "models", "app")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with files: the instruction that made it, and the sizes in bytes of its packages."""

    made_by: str
    bytes: int
    packed_bytes: int
    largest: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Image:
    """All layers, the base's first; `packed_bytes` is the size of a download."""

    bytes: int
    packed_bytes: int
    layers: tuple[Layer, ...]


def image_of(archive: Path) -> Image:
    """Read a tar file in the OCI layout."""
    with tarfile.open(archive) as tar:
        manifest = _manifest(tar)
        history = _json(tar, manifest["config"]["digest"])["history"]
        made_by = [step.get("created_by", "") for step in history if not step.get("empty_layer")]
        pairs = zip(made_by, manifest["layers"], strict=True)
        layers = tuple(_layer(tar, short(step), layer) for step, layer in pairs)
    packed = sum(layer.packed_bytes for layer in layers)
    return Image(sum(layer.bytes for layer in layers), packed, layers)


def file_of(archive: Path, path: str) -> bytes:
    """Return the content of a file in the topmost layer that has it; empty if none has."""
    with tarfile.open(archive) as tar:
        for layer in reversed(_manifest(tar)["layers"]):
            blob = tar.extractfile(_blob(layer["digest"]))
            with tarfile.open(fileobj=blob, mode="r|*") as files:
                for file in files:
                    if file.name == path and (content := files.extractfile(file)):
                        return content.read()
    return b""


def short(made_by: str) -> str:
    """Return the instruction without its shell prefix, at most 80 characters."""
    for prefix in ("/bin/sh -c #(nop) ", "/bin/sh -c ", "/bin/sh"):
        made_by = made_by.removeprefix(prefix)
    copied = re.sub(r"^COPY \w+:[0-9a-f]+ in ", "COPY to ", made_by)
    return " ".join(copied.split())[:80] or "base"


def owner(path: PurePosixPath) -> str:
    """Return the package or directory that a file counts for."""
    for place in _PARTED:
        if place in path.parts[:-1]:
            return path.parts[path.parts.index(place) + 1]
    return "/".join(path.parts[:2])


def _layer(tar: tarfile.TarFile, made_by: str, described: Mapping[str, Any]) -> Layer:
    sizes: Counter[str] = Counter()
    blob = tar.extractfile(_blob(described["digest"]))
    with tarfile.open(fileobj=blob, mode="r|*") as files:
        for file in files:
            sizes[owner(PurePosixPath(file.name))] += file.size
    largest = {name: size for name, size in sizes.most_common(_LARGEST) if size >= LEAST}
    return Layer(made_by, sizes.total(), described["size"], largest)


def _manifest(tar: tarfile.TarFile) -> Any:
    return _json(tar, _json(tar, "index.json")["manifests"][0]["digest"])


def _json(tar: tarfile.TarFile, name: str) -> Any:
    """Load a JSON file by its name or by the digest of its content."""
    file = tar.extractfile(_blob(name) if ":" in name else name)
    assert file, name
    return json.load(file)


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
