"""A causal language model of transformers: from rows of tokens to the logits of the next ones.

Independent of sessions, sampling and text.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from specrej_models.attention import Segment
from specrej_models.model import SegmentedModel
from specrej_models.probe import Examined, load_weights


class CausalLM(SegmentedModel):
    """Weights on a device, with the sizes that the engine needs."""

    def __init__(self, model: PreTrainedModel, end_ids: frozenset[int]) -> None:
        """Takes over `model`; one of `end_ids` ends a candidate.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        super().__init__(model)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.eos_ids = end_ids

    @classmethod
    def load(cls, examined: Examined, device: str) -> Self:
        """The model of files that were examined; float32 on a CPU, bfloat16 on a GPU.

        Raises:
            ValueError: as `load_weights`, or the engine cannot compute a model of this type.
        """
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        config = examined.config
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"model_type {config.model_type}: not a causal language model")
        if config.get_text_config() is not config:
            raise ValueError(f"model_type {config.model_type}: not of text alone; use vLLM")
        model = load_weights(AutoModelForCausalLM, examined.directory, dtype=dtype)
        try:
            return cls(model.to(device), examined.end_ids)
        except ValueError as error:
            raise ValueError(f"model_type {config.model_type}: {error}") from error

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        """One pass over the segments' rows; float32 logits [len(last), vocabulary] of rows `last`.

        Writes each row's keys and values into its segment; the caller advances the suffixes.
        """
        keep = torch.tensor(last, device=self.shape.device)
        output = self._run(self._model, token_ids, positions, segments, logits_to_keep=keep)
        logits: Tensor = output.logits[0].float()
        return logits
