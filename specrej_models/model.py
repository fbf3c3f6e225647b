"""A decoder-only network of transformers behind one forward pass over segments of rows.

The model code is transformers' own; only its attention function and its KV store are ours. It is
independent of sessions, of sampling and of text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from specrej_models import attention
from specrej_models.attention import Decoder, PrefillSegment, Segment
from specrej_models.kv import KVShape, PromptKV
from specrej_models.sizes import ModelSizes

# Of the trial that compares a model's outputs with ours: tokens, and differences in parts of the
# largest output, in float32 and in types of two bytes.
_TRIAL_TOKENS = 5
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2

AttentionInterface.register(attention.NAME, attention.attend)


def bound_positions(config: Any) -> None:
    """Bound a text model's context to the tokens that all layers see, and to the positions before
    `longrope` changes its factors.

    The longest position of a pass chooses the factors of all its rows, but a pass has rows of
    several sessions, and only a chunk of a long prompt.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        config.max_position_embeddings = rope["original_max_position_embeddings"]
    kinds = getattr(config, "layer_types", None)
    is_used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if is_used and (window := getattr(config, "sliding_window", None)):
        config.max_position_embeddings = min(config.max_position_embeddings, window)


class SegmentedModel:
    """Weights on a device, and what must be known of them to store keys and values.

    One forward pass at a time: compiled layers have one set of jobs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes over `model`: its attention becomes ours.

        Raises:
            ValueError: its layers do not all keep plain keys and values, or see what comes later,
                or its attention is not transformers' common one.
        """
        if not all(getattr(module, "is_causal", True) for module in model.modules()):
            raise ValueError("must be decoder-only: its attention is not causal")
        self._model = model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - {
            "full_attention",
            "sliding_attention",
        }
        if kinds:
            raise ValueError(f"layers of kind {', '.join(sorted(kinds))} are not supported")
        bound_positions(config)
        self.sizes = ModelSizes.of(config)
        self.shape = KVShape(
            self.sizes.layers,
            self.sizes.kv_heads,
            self.sizes.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self._decoder: Callable[[Sequence[Segment]], Decoder | None] | None = None
        self._take_over_attention(model)
        self._speed_up()

    @property
    def is_compiled(self) -> bool:
        """Whether attention is compiled, and holds the scores of a few rows only."""
        return self._decoder is not None

    @property
    def weight_bytes(self) -> int:
        """What the weights take, each counted once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*self._model.parameters(), *self._model.buffers())
        }
        return sum(storages.values())

    def _run(
        self,
        network: Callable[..., Any],
        token_ids: list[int],
        positions: list[int],
        segments: list[Segment],
        **options: Any,
    ) -> Any:
        """What `network`, the model or a part of it, makes of the segments' rows as one sequence.

        Writes each row's keys and values into its segment; the caller advances the suffixes.
        """
        device = self.shape.device
        return network(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            segments=segments,
            decoder=self._decoder(segments) if self._decoder else None,
            **options,
        )

    @torch.inference_mode()
    def _take_over_attention(self, model: PreTrainedModel) -> None:
        """Replace the model's attention; what comes out must stay the same. A weight that is not a
        number, other than an embedding, makes all outputs so.

        Raises:
            ValueError: it does not, or the model's attention cannot be replaced, or a weight is not
                finite.
        """
        token_ids = [number % self.sizes.vocabulary for number in range(1, _TRIAL_TOKENS + 1)]
        positions = list(range(_TRIAL_TOKENS))
        plain = torch.tensor([token_ids], device=model.device)
        has_weights = model.device.type != "meta"
        expected = model(input_ids=plain, use_cache=False)[0] if has_weights else None
        weight = model.get_input_embeddings().weight
        if expected is not None and not (expected.sum() + weight.sum()).isfinite():
            raise ValueError("weights that are not finite")
        model.set_attn_implementation(attention.NAME)
        if model.config.get_text_config()._attn_implementation != attention.NAME:
            raise ValueError("its attention is its own, not transformers' common one")
        if expected is None:
            return
        segment = PrefillSegment((PromptKV(self.shape, _TRIAL_TOKENS),), 0, 0, _TRIAL_TOKENS)
        seen: dict[int, float] = {}
        try:
            actual = self._run(model, token_ids, positions, [segment], seen=seen)[0]
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"its attention cannot be replaced: {error}") from error
        largest = expected.abs().max().item()
        tolerance = largest * (_TOLERANCE if model.dtype.itemsize >= 4 else _HALF_TOLERANCE)
        if not torch.allclose(actual, expected, rtol=0, atol=tolerance):
            raise ValueError("its attention does more than scores")
        if len(seen) != self.sizes.layers:
            raise ValueError("its layers do not have one attention each")

    def _speed_up(self) -> None:
        """Replace what is slow with few rows, where there is something faster for the device."""
        if self.shape.device.type == "cpu" and self.shape.dtype == torch.float32:
            # Imported here: other devices do not need the compiler.
            from specrej_models import activation, linear
            from specrej_models.cpu import attention as cpu_attention
            from specrej_models.cpu import jobs as cpu_jobs
            from specrej_models.cpu import layer as cpu_layer

            if not cpu_jobs.ON_ALL_THREADS:
                return
            if cpu_attention.supports(self.shape, self.sizes.heads):
                heads = self.sizes.heads
                self._decoder = partial(cpu_attention.CPUAttention, self.shape, heads)
                cpu_layer.replace(self._model, self.shape, self.sizes.context_tokens)
            linear.pack(self._model)
            activation.replace(self._model)
            # What is left of the weights would keep the file that all of them came from in memory.
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
