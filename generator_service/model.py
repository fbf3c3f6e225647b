"""A causal language model of transformers behind one forward pass over segments of rows.

The model code is transformers' own; only its attention function and its KV store are ours. Knows
nothing of sessions, sampling or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from generator_service.memory import Sizes
from inference import attention
from inference.attention import Decoder, Segment
from inference.kv import KVShape

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
        self._decoder: Callable[[Sequence[Segment]], Decoder | None] | None = None
        self._speed_up()
        self.vocabulary: int = config.vocab_size
        self.context_tokens: int = config.max_position_embeddings
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

        Writes each row's keys and values into its segment; the caller advances the suffixes.
        """
        device = self.shape.device
        output: Any = self._model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=device),
            segments=segments,
            decoder=self._decoder(segments) if self._decoder else None,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @property
    def sizes(self) -> Sizes:
        """What the workspace of a step depends on."""
        config = self._model.config.get_text_config()
        return Sizes(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=self._heads,
            head_dim=self.shape.head_dim,
            vocabulary=self.vocabulary,
            context_tokens=self.context_tokens,
            dtype_bytes=self.shape.dtype.itemsize,
        )

    @property
    def products(self) -> list[nn.Module]:
        """The modules of one step's matrix products, with their `in_features`, `out_features`."""
        return [module for module in self._model.modules() if hasattr(module, "in_features")]

    @property
    def weight_bytes(self) -> int:
        """What the weights take, each counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*self._model.parameters(), *self._model.buffers())
        }
        return sum(storages.values())

    def _speed_up(self) -> None:
        """Replace what is slow with few rows, where there is something faster for the device."""
        if self.shape.device.type == "cpu" and self.shape.dtype == torch.float32:
            # Here, as other devices do without the compiler behind it.
            from inference import cpu_attention, cpu_jobs, cpu_layer, linear, norm

            if not cpu_jobs.ON_ALL_THREADS:
                return
            cpu_layer.replace(self._model, self.shape)
            linear.pack(self._model)
            norm.replace(self._model)
            # What is left of the weights would keep the file that all of them came from in memory.
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
            self._decoder = partial(cpu_attention.decoder, self.shape, self._heads)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
