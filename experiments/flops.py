"""Floating point operations of a generator and a reward, from tokens and a model's sizes.

The count is the usual one (Kaplan et al. 2020, arXiv 2001.08361, table 1 and section 2.1; Hoffmann
et al. 2022, arXiv 2203.15556, appendix F): a token takes 2 operations per weight of every matrix it
goes through, and 4 per layer, per width of all heads and per token that its attention sees: a
product and a sum, for the scores and again for the values. Embeddings are looked up; norms,
activations and the softmax are left out. It is arithmetic, not a measurement: how fast operations
go depends on their shapes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.replay import Replayed

# By `model_type`: gate, up and down, or just two in older ones. Others may be built otherwise.
_MLP_MATRICES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "olmo2"), 3),
    **dict.fromkeys(("bert", "roberta", "gpt_neox"), 2),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a transformer; `vocabulary` is 0 for one without a language model's head.

    max_tokens: the most of a text that it reads; 0: all of it.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    num_mlp_matrices: int = 3
    vocabulary: int = 0
    max_tokens: int = 0

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        mlp = self.num_mlp_matrices * self.hidden * self.intermediate
        return self.layers * (attention + mlp)

    @property
    def head_weights(self) -> int:
        """Weights of the language model's head, tied to the embeddings or not."""
        return self.hidden * self.vocabulary

    @property
    def per_attended(self) -> int:
        """Operations per token that a token's attention sees."""
        return 4 * self.layers * self.heads * self.head_size


def generator_flops(sizes: Sizes, prompt_tokens: int, done: Replayed) -> int:
    """Of a request: the prompt read once, whatever N is, then every token that was generated.

    The first token of each candidate comes from the prompt's last; the last one is never read.
    """
    read = prompt_tokens * 2 * sizes.layer_weights
    read += sizes.per_attended * prompt_tokens * (prompt_tokens + 1) // 2
    return read + decode_flops(sizes, prompt_tokens, done.generated_tokens, done.attended_tokens)


def decode_flops(sizes: Sizes, prompt_tokens: int, tokens: int, attended_tokens: int) -> int:
    """Of generated tokens, the prompt's reading not counted.

    attended_tokens: over all of them, the candidate's own tokens before each.
    """
    matrices = 2 * (sizes.layer_weights + sizes.head_weights) * tokens
    return matrices + sizes.per_attended * (prompt_tokens * tokens + attended_tokens)


def encoder_flops(sizes: Sizes, done: Replayed) -> int:
    """Of a reward that reads every prefix from its beginning, each token seeing all of its text.

    Counted in the generator's tokens: a reward's own tokenizer makes about as many.
    """
    read = np.minimum(done.scored_lengths, sizes.max_tokens or max(done.scored_lengths))
    return int(2 * sizes.layer_weights * read.sum() + sizes.per_attended * (read**2).sum())


def read_sizes(directory: Path, *, with_head: bool, max_tokens: int = 0) -> Sizes | None:
    """From a model's config.json; None of a kind that is not known here.

    Raises:
        OSError: it cannot be read.
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    if config.get("model_type") not in _MLP_MATRICES:
        return None
    heads = config["num_attention_heads"]
    return Sizes(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        num_mlp_matrices=_MLP_MATRICES[config["model_type"]],
        vocabulary=config["vocab_size"] if with_head else 0,
        max_tokens=max_tokens,
    )
