"""A causal language model of transformers: from rows of tokens to the logits of the next ones.

Independent of sessions, sampling and text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from generator_service.sampling import WORKSPACE_TENSORS, rows_at_once
from generator_service.text import eos_ids
from specrej.inference.attention import Segment
from specrej.inference.model import SegmentedModel


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
    def load(cls, directory: Path, device: str) -> Self:
        """The model in a local directory; float32 on a CPU, bfloat16 on a GPU."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return cls(model.to(device))

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

    def workspace_bytes(self, max_rows: int, prefill_chunk: int) -> int:
        """Most that one step allocates for a moment: activations, scores, logits, sampling.

        The largest step has `max_rows` candidates and `prefill_chunk` tokens of a prompt. The sum
        is of the tensors that live at once in the widest places of a layer and after the last one.
        """
        rows, dtype_bytes = max_rows + prefill_chunk, self.shape.dtype.itemsize
        intermediate: int = self._model.config.get_text_config().intermediate_size
        attention = 3 * self.num_heads * self.shape.head_dim
        layer = rows * (4 * self.hidden_size + max(attention, 4 * intermediate)) * dtype_bytes
        # Scores: of a chunk with all tokens before it, twice; of all rows with a shared prompt.
        scored = 3 * prefill_chunk + 2 * max_rows
        scores = self.num_heads * self.context_tokens * scored * 4
        logits = (max_rows + 1) * self.vocabulary * (dtype_bytes + 4)
        block = min(max_rows, rows_at_once(self.vocabulary, self.shape.device))
        sampling = block * self.vocabulary * 4 * WORKSPACE_TENSORS
        return max(layer + scores, logits + sampling)
