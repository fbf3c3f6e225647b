"""How large an image is, and what in it: read from an archive as buildah and docker write it."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# Of each layer, and how large at least.
_LARGEST, LEAST = 8, 500_000
# Below these each entry counts by itself; elsewhere what is two levels deep.
_PARTED = ("site-packages", "dist-packages", "models", "app")


@dataclass(frozen=True, slots=True)
class Layer:
    """One that is not empty: what made it, and the sizes of the files in it."""

    made_by: str
    bytes: int
    packed_bytes: int
    largest: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Image:
    """All layers, the base's first; packed is what a registry sends."""

    bytes: int
    packed_bytes: int
    layers: tuple[Layer, ...]


def image_of(archive: Path) -> Image:
    """Of a tar file in the layout of the OCI."""
    with tarfile.open(archive) as tar:
        manifest = _json(tar, _json(tar, "index.json")["manifests"][0]["digest"])
        history = _json(tar, manifest["config"]["digest"])["history"]
        made_by = [each.get("created_by", "") for each in history if not each.get("empty_layer")]
        pairs = zip(made_by, manifest["layers"], strict=True)
        layers = tuple(_layer(tar, short(how), layer) for how, layer in pairs)
    packed = sum(each.packed_bytes for each in layers)
    return Image(sum(each.bytes for each in layers), packed, layers)


def short(made_by: str) -> str:
    """The instruction, without the shell that ran it."""
    for prefix in ("/bin/sh -c #(nop) ", "/bin/sh -c ", "/bin/sh"):
        made_by = made_by.removeprefix(prefix)
    copied = re.sub(r"^COPY \w+:[0-9a-f]+ in ", "COPY to ", made_by)
    return " ".join(copied.split())[:80] or "base"


def owner(path: PurePosixPath) -> str:
    """The package, or the directory, that a file is counted for."""
    for place in _PARTED:
        if place in path.parts[:-1]:
            return path.parts[path.parts.index(place) + 1]
    return "/".join(path.parts[:2])


def _layer(tar: tarfile.TarFile, made_by: str, described: Mapping[str, Any]) -> Layer:
    sizes: Counter[str] = Counter()
    blob = tar.extractfile(_blob(described["digest"]))
    with tarfile.open(fileobj=blob, mode="r|*") as files:
        for each in files:
            sizes[owner(PurePosixPath(each.name))] += each.size
    largest = {name: size for name, size in sizes.most_common(_LARGEST) if size >= LEAST}
    return Layer(made_by, sizes.total(), described["size"], largest)


def _json(tar: tarfile.TarFile, name: str) -> Any:
    """A file, by its name or by the digest of what is in it."""
    found = tar.extractfile(_blob(name) if ":" in name else name)
    assert found, name
    return json.load(found)


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
