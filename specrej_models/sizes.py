"""Bytes that weights, KV slots and steps of a model take, from its config; standard library only.

The engines reserve memory by these formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the layers of a model type have beside their matrices, and its config's defaults."""

    num_norms: int = 2
    has_head_norms: bool = False  # of queries and keys
    has_qkv_bias: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_TIED = {"tie_word_embeddings": True}
_GEMMA_3 = _TIED | {
    "vocab_size": 262_208,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(has_qkv_bias=True),
    "qwen3": Architecture(has_head_norms=True),
    "gemma": Architecture(defaults=_TIED),
    "gemma2": Architecture(num_norms=4, defaults=_TIED),
    "gemma3_text": Architecture(num_norms=4, has_head_norms=True, defaults=_GEMMA_3),
}


def num_parameters(read: Read, devices: int = 1) -> int:
    """Weights of a model, or of one of the devices of tensor parallelism.

    Raises:
        ValueError: its architecture is not one of `ARCHITECTURES`, or cannot be divided.
    """
    architecture = ARCHITECTURES.get(kind := read("model_type", ""))
    if architecture is None:
        raise ValueError(f"model_type {kind!r} is none of {', '.join(ARCHITECTURES)}")
    sizes = ModelSizes.of(read).split(devices)
    hidden, dim, of_kv = sizes.hidden, sizes.head_dim, 2 * sizes.kv_heads
    layer = hidden * dim * (2 * sizes.heads + of_kv) + 3 * hidden * sizes.intermediate
    layer += architecture.num_norms * hidden + 2 * dim * architecture.has_head_norms
    if architecture.has_qkv_bias or read("attention_bias", False):
        layer += dim * (sizes.heads + of_kv)
    if read("attention_bias", False):
        layer += hidden
    num_tables = 1 if read("tie_word_embeddings", False) else 2
    return sizes.layers * layer + hidden + num_tables * hidden * -(-sizes.vocabulary // devices)
