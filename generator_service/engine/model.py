"""A causal language model of transformers: from rows of tokens to the logits of the next ones.

Independent of sessions, sampling and text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from generator_service.engine.text import eos_ids
from specrej_models.attention import Segment
from specrej_models.model import SegmentedModel


class CausalLM(SegmentedModel):
    """Weights on a device, with the sizes that the engine needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over `model`.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        super().__init__(model)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        generation = getattr(model, "generation_config", None)
        self.eos_ids = eos_ids(generation, model.config)

    @classmethod
    def load(cls, directory: Path, device: str, gguf_file: str = "") -> Self:
        """The model in a local directory, or in a GGUF file in it; float32 on a CPU, bfloat16 on a
        GPU.

        Raises:
            ValueError: weights are missing, or the engine cannot compute a model of this type.
        """
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        options: dict[str, Any] = {}
        if gguf_file:
            check_gguf(directory / gguf_file)
            options = {"gguf_file": gguf_file}
        config = AutoConfig.from_pretrained(directory, local_files_only=True, **options)
        if config.model_type == "gemma3":  # with images: its text model alone
            config = config.get_text_config()
            options |= {"config": config, "key_mapping": {r"^language_model\.": ""}}
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"model_type {config.model_type}: not a causal language model")
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
        if missing := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
            raise ValueError(f"{directory}: lacks {', '.join(missing[:3])}")
        try:
            return cls(model.to(device))
        except ValueError as error:
            raise ValueError(f"model_type {config.model_type}: {error}") from error

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        """One pass over the segments' rows; float32 logits [len(last), vocabulary] of rows `last`.

        Writes each row's keys and values into its segment; the caller advances the suffixes. The
        next pass may overwrite the logits.
        """
        keep = torch.tensor(last, device=self.shape.device)
        output = self._run(self._model, token_ids, positions, segments, logits_to_keep=keep)
        logits: Tensor = output.logits[0].float()
        return logits


def check_gguf(gguf: Path) -> None:
    """Check that a GGUF file can be read, and that its positions are not scaled, which
    transformers would ignore.

    Raises:
        ValueError: it is damaged, or its positions are scaled.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except Exception as error:  # of many kinds, depending on where the file is damaged
        raise ValueError(f"{gguf}: not a readable GGUF file: {error}") from error
    kinds = [f.contents() for key, f in reader.fields.items() if key.endswith(".rope.scaling.type")]
    if any(tensor.name.startswith("rope_") for tensor in reader.tensors):
        kinds.append("llama3")  # or longrope: factors of each frequency
    for kind in kinds:
        if kind != "none":
            raise ValueError(
                f'unsupported rope scaling "{kind}" in {gguf.name}; use the safetensors checkpoint'
            )
