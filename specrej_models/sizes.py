"""Sizes of a model by its config, and how much is computed at once; standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

# Returns a field of a config, or the default.
Read = Callable[[str, Any], Any]

# Attention in torch operations computes so many scores at once, or those of one row if they are
# more, and holds so many bytes for each: the product, its float32 softmax and the weights.
SCORES_AT_ONCE = 1 << 25
SCORE_BYTES = 12

# Scores of a token that a thread of the compiled attention holds at most, `cpu.attention.COLUMNS`.
CPU_COLUMNS = 64

# Logits drawn from at once; few on a CPU, to bound the memory. Float32 tensors of this size that
# sampling holds at once at most: weights, weights without the forbidden tokens, a full sort with
# its indices, running sums and the nucleus.
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}
SAMPLING_TENSORS = 8
DRAW_BLOCK = 256  # tokens: a draw finds its block by the blocks' sums, then its token in the block


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
    def of(cls, read: Read) -> Self:
        """Of the text part of a config: `partial(getattr, config)`."""
        heads, hidden = read("num_attention_heads", None), read("hidden_size", None)
        return cls(
            layers=read("num_hidden_layers", None),
            hidden=hidden,
            intermediate=read("intermediate_size", None) or 4 * hidden,
            heads=heads,
            kv_heads=read("num_key_value_heads", None) or heads,
            head_dim=read("head_dim", None) or hidden // heads,
            vocabulary=read("vocab_size", None),
            context_tokens=read("max_position_embeddings", None),
        )

    def split(self, devices: int) -> Self:
        """Sizes on one of the devices of tensor parallelism, which each have some of the heads.

        Fewer key heads than devices are copied.

        Raises:
            ValueError: the heads cannot be divided.
        """
        few, many = sorted((self.kv_heads, devices))
        if self.heads % devices or many % few:
            heads = f"{self.heads} heads and {self.kv_heads} key heads"
            raise ValueError(f"{heads} cannot be divided among {devices} devices")
        return replace(
            self,
            heads=self.heads // devices,
            kv_heads=max(1, self.kv_heads // devices),
            intermediate=-(-self.intermediate // devices),
        )

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token across all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def rows_at_once(vocabulary: int, device: str) -> int:
    """Rows with which tokens are drawn in one block."""
    return max(1, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) // vocabulary)
