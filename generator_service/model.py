"""A causal language model of transformers behind one forward pass over segments of rows.

The model code is transformers' own; only its attention function and its KV store are ours. Knows
nothing of sessions, sampling or text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from generator_service import attention, linear
from generator_service.attention import DecodeSegment, Decoder, Segment
from generator_service.cpu_attention import CPUDecoder, Rows
from generator_service.kv import KVShape

AttentionInterface.register(attention.NAME, attention.attend)


class CausalLM:
    """Weights on a device, and what the engine must know of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over `model`: its attention becomes ours.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        model.set_attn_implementation(attention.NAME)
        self._model = model.eval().requires_grad_(False)
        linear.pack(self._model)
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - {
            "full_attention",
            "sliding_attention",
        }
        if kinds:
            raise ValueError(f"layers of kind {', '.join(sorted(kinds))} are not supported")
        heads = config.num_attention_heads
        self._heads = heads
        self.shape = KVShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )
        self.vocabulary: int = config.vocab_size
        self.context_tokens: int = config.max_position_embeddings
        self.eos_ids = _eos_ids(model)

    @classmethod
    def load(cls, directory: Path, device: str) -> CausalLM:
        """The model in a local directory; float32 on a CPU, bfloat16 on a GPU."""
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return cls(model.to(device))

    @torch.inference_mode()
    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        """One pass over the segments' rows; float32 logits [len(last), vocabulary] of rows `last`.

        Writes each row's keys and values into its segment; the caller advances the suffixes.
        """
        device = self.shape.device
        output: Any = self._model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=device),
            segments=segments,
            decoder=self._decoder(segments),
        )
        logits: Tensor = output.logits[0].float()
        return logits


    def _decoder(self, segments: list[Segment]) -> Decoder | None:
        """Compiled attention for this pass's decode rows, where there is one for the device."""
        if self.shape.device.type != "cpu" or self.shape.dtype != torch.float32:
            return None
        batch, start = [], 0
        for segment in segments:
            if isinstance(segment, DecodeSegment):
                batch.append(Rows(start, segment.pieces, segment.suffix))
            start += segment.num_rows
        return CPUDecoder(self.shape, self._heads, batch) if batch else None


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
