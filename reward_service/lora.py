"""Low-rank adapters (Hu et al. 2021), by peft: the one file that knows it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import PreTrainedModel


def merged(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """The model with an adapter added to its weights; costs nothing when it runs.

    Raises:
        ValueError: the directory holds no adapter for this model.
    """
    if not (directory / "adapter_config.json").is_file():
        raise ValueError(f"{directory}: holds no adapter")
    try:
        with warnings.catch_warnings():
            # Peft only warns where an adapter's names are not the model's, and adds nothing.
            warnings.filterwarnings("error", message=".*missing adapter keys")
            adapted: Any = PeftModel.from_pretrained(model, str(directory))
    except UserWarning:
        raise ValueError(f"{directory}: an adapter of another kind of model") from None
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole


def wrapped(model: PreTrainedModel, rank: int) -> Any:
    """The model with a fresh adapter on all linear layers: all there is to train."""
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.05,
        target_modules="all-linear",
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    return get_peft_model(model, config)


def save(model: Any, directory: Path) -> None:
    """Writes the adapter alone."""
    model.save_pretrained(str(directory))
