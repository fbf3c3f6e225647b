"""Digests of weights and settings: equal digests, equal models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


def of_directory(directory: Path, settings: Mapping[str, object] | None = None) -> str:
    """A digest of a model directory's files, with the settings it is used with.

    Small files count whole; of larger ones (weights of many GB) name, size and `sample`.
    """
    digest = hashlib.sha256(json.dumps(dict(settings or {}), sort_keys=True).encode())
    for path in sorted(p for p in directory.iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        digest.update(sample(path))
    return digest.hexdigest()[:16]


def sample(path: Path) -> bytes:
    """All of a file of up to 4 MiB; of a larger one 64 parts at equal distances.

    So weights of many GB take milliseconds, and two trainings of a model differ, also if the
    second one changes some of its matrices only.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            return file.read()
        parts = []
        for number in range(_NUM_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)


def of_file(path: Path) -> str:
    """A digest of all of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def of_values(**values: object) -> str:
    """A digest of plain values and dataclasses."""
    text = json.dumps(values, sort_keys=True, default=fields_of)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name. Unlike `dataclasses.asdict` it copies no values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
