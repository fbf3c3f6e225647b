"""A causal language model of transformers: from rows of tokens to the logits of the next ones.

Knows nothing of sessions, sampling or text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from generator_service.memory import Sizes
from inference.attention import Segment
from inference.model import SegmentedModel


class CausalLM(SegmentedModel):
    """Weights on a device, and what the engine must know of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over `model`.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        super().__init__(model)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.eos_ids = _eos_ids(model)

    @classmethod
    def load(cls, directory: Path, device: str, **options: Any) -> Self:
        """The model in a local directory; float32 on a CPU, bfloat16 on a GPU.

        `options` are the constructor's.
        """
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return cls(model.to(device), **options)

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        """One pass over the segments' rows; float32 logits [len(last), vocabulary] of rows `last`.

        Writes each row's keys and values into its segment; the caller advances the suffixes. The
        logits may be gone after the next pass.
        """
        keep = torch.tensor(last, device=self.shape.device)
        output = self._run(self._model, token_ids, positions, segments, logits_to_keep=keep)
        logits: Tensor = output.logits[0].float()
        return logits

    @property
    def sizes(self) -> Sizes:
        """What the workspace of a step depends on."""
        config = self._model.config.get_text_config()
        return Sizes(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=self.num_heads,
            head_dim=self.shape.head_dim,
            vocabulary=self.vocabulary,
            context_tokens=self.context_tokens,
            dtype_bytes=self.shape.dtype.itemsize,
        )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
