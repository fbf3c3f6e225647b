"""Sizes of a model by its config, and how much is computed at once; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

# Attention in torch operations computes so many scores at once, or those of one row if they are
# more, and holds so many bytes for each: the product, its float32 softmax and the weights.
SCORES_AT_ONCE = 1 << 25
SCORE_BYTES = 12

# Scores of a token that a thread of the compiled attention holds at most, `cpu.attention.COLUMNS`.
CPU_COLUMNS = 64

# Logits drawn from at once; few on a CPU, to bound the memory. Float32 tensors of this size that
# sampling holds at once at most: logits without the forbidden tokens, weights, a full sort with its
# indices, running sums in float64 and the nucleus.
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
SAMPLING_TENSORS = 10


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder-only model. Layers with a sliding window count as full ones, because the
    engines store the keys and values of all tokens in every layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Sizes by a config's text part."""
        heads, hidden = config.num_attention_heads, config.hidden_size
        return cls(
            layers=config.num_hidden_layers,
            hidden=hidden,
            intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            vocabulary=config.vocab_size,
            context_tokens=getattr(config, "max_position_embeddings", 0),
        )

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token across all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def sampling_bytes(self, rows: int, device: str) -> int:
        """The most that drawing a token for each of so many rows allocates."""
        drawn = min(rows, rows_at_once(self.vocabulary, device))
        return drawn * self.vocabulary * 4 * SAMPLING_TENSORS


def rows_at_once(vocabulary: int, device: str) -> int:
    """Rows with which tokens are drawn in one block, on a device of type "cpu" or "cuda"."""
    return max(1, LOGITS_AT_ONCE[device] // vocabulary)
