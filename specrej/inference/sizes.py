"""Bytes that KV slots and the steps of a model take, from its config alone; standard library only.

The engines reserve memory by these formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

# Returns a field of a config, or the default.
Read = Callable[[str, Any], Any]

# Attention in torch operations computes so many scores at once, or those of one row if they are
# more, and holds so many bytes for each: the product, its float32 softmax and the weights.
SCORES_AT_ONCE = 1 << 25
SCORE_BYTES = 12

# Scores of a token that a thread of the compiled attention holds at most, `cpu_attention.COLUMNS`.
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
        """Of a config: `partial(getattr, config)`, or `get` of a config.json's text part."""
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

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token across all layers."""
        return slot_bytes(self.layers, self.kv_heads, self.head_dim, dtype_bytes)

    def torch_score_bytes(self, rows: int, context_tokens: int) -> int:
        """Most that attention in torch operations holds for the scores of one session's rows."""
        of_row = self.heads * context_tokens
        return SCORE_BYTES * min(rows * of_row, max(SCORES_AT_ONCE, of_row))

    def workspace_bytes(
        self, dtype_bytes: int, max_rows: int, prefill_chunk: int, score_bytes: int, device: str
    ) -> int:
        """Most that one step allocates for a moment: activations, scores, logits, sampling.

        The largest step has `max_rows` candidates and `prefill_chunk` tokens of a prompt. The sum
        is of the tensors that live at once in the widest places of a layer and after the last one.
        device: "cpu" or "cuda".
        """
        rows = max_rows + prefill_chunk
        # Queries, their rotated halves and two orders of them, keys, values, parts of the output.
        attention = 8 * self.heads * self.head_dim
        layer = rows * (4 * self.hidden + max(attention, 4 * self.intermediate)) * dtype_bytes
        logits = (max_rows + 1) * self.vocabulary * (dtype_bytes + 4)
        drawn = min(max_rows, rows_at_once(self.vocabulary, device))
        sampling = drawn * (self.vocabulary + DRAW_BLOCK) * 4 * SAMPLING_TENSORS
        return max(layer + score_bytes, logits + sampling)


def slot_bytes(layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of keys and values of one token across all layers."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def rows_at_once(vocabulary: int, device: str) -> int:
    """Rows with which tokens are drawn in one block."""
    return max(1, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) // vocabulary)


def cpu_score_bytes(threads: int, context_tokens: int) -> int:
    """Most that the compiled attention holds: each thread one share's scores of all tokens."""
    return threads * 4 * CPU_COLUMNS * context_tokens
