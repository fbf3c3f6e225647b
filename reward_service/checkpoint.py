"""Weights of a reward model from a local directory: the backbone by transformers, heads by name.

Heads are read by us because transformers fills what it does not find, such as a head, with random
numbers, and because it knows some of them only with code that comes with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_backbone(
    directory: Path, device: str, *, with_words: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A decoder without a head, or `with_words` a language model; float32 on the CPU.

    Raises:
        ValueError: the directory lacks some of its weights.
    """
    kind = AutoModelForCausalLM if with_words else AutoModel
    return load_whole(kind, directory, device, trust_remote_code=trust_remote_code)


def load_whole(
    kind: Any, directory: Path, device: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """A model by one of transformers' Auto classes, with all its weights.

    Raises:
        ValueError: the directory lacks some of them.
    """
    with _quiet():
        model, loading = kind.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype=torch.float32 if device == "cpu" else "auto",
            output_loading_info=True,
        )
    missing = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if missing:
        raise ValueError(f"{directory}: lacks {', '.join(missing[:3])}")
    loaded: PreTrainedModel = model.to(device)
    return loaded


def load_head(source: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with `prefix`, by the rest of their names, float32.

    `source` is a checkpoint's directory or one file.

    Raises:
        ValueError: there are none, or the file holds something else.
    """
    found: dict[str, Tensor] = {}
    for path, names in _files(source, prefix).items():
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in [name for name in tensors.keys() if name.startswith(prefix)]:  # noqa: SIM118
                    if not names or name in names:
                        found[name.removeprefix(prefix)] = tensors.get_tensor(name).float()
        except SafetensorError as error:
            raise ValueError(f"{path}: not a file of weights: {error}") from None
    if not found:
        raise ValueError(f"{source}: lacks the weights {prefix}*")
    return found


def _files(source: Path, prefix: str) -> Mapping[Path, list[str]]:
    """Which files to look into, and for which names; any, where nothing is named."""
    if source.is_file():
        return {source: []}
    index = source / _INDEX
    if not index.exists():
        return {source / _WEIGHTS: []}
    files: dict[Path, list[str]] = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        if name.startswith(prefix):
            files.setdefault(source / file, []).append(name)
    return files


@contextmanager
def _quiet() -> Iterator[None]:
    """Heads that transformers does not know are no news."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
