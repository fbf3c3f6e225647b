"""Floating point operations of a generator and a reward, from token counts and model sizes.

The usual count (Kaplan et al. 2020, arXiv 2001.08361, table 1 and section 2.1; Hoffmann et al.
2022, arXiv 2203.15556, appendix F): a token takes 2 operations per weight of every matrix that it
passes, and, per layer, 4 per width of all heads and per attended token: a product and a sum for the
scores, and again for the values. Embedding lookups, norms, activations and the softmax are left
out. This is arithmetic, not a measurement: the time that an operation takes depends on shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.json_lines import Line
from experiments.replay import Replayed, Replayer, Setting
from experiments.trajectories import FloatArray
from orchestrator.loop.composition import LIKELIHOOD
from specrej.contracts import Algorithm

# By `model_type`: 3 for gate, up and down; 2 without a gate. Other types may have another layout.
_MLP_MATRICES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "olmo2"), 3),
    **dict.fromkeys(("bert", "roberta", "gpt_neox"), 2),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a transformer.

    vocabulary: 0 for a model without a language model head. max_tokens: the longest input that the
    model reads; 0: no limit.
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
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        mlp = self.num_mlp_matrices * self.hidden * self.intermediate
        return self.layers * (attention + mlp)

    @property
    def per_attended(self) -> int:
        """Operations per token and per token that it attends to."""
        return 4 * self.layers * self.heads * self.head_size


def generator_flops(sizes: Sizes, prompt_tokens: int, run: Replayed) -> int:
    """FLOPs of a request: the prompt once, for any N, then a pass per further token.

    The first token of each candidate is drawn from the prompt's last; a candidate's last token is
    never read.
    """
    prompt = 2 * (prompt_tokens * sizes.layer_weights + sizes.hidden * sizes.vocabulary)
    prompt += sizes.per_attended * prompt_tokens * (prompt_tokens + 1) // 2
    return prompt + decode_flops(sizes, prompt_tokens, run)


def decode_flops(sizes: Sizes, prompt_tokens: int, run: Replayed) -> int:
    """FLOPs of the generated tokens, without those of the prompt and of the first tokens."""
    passes = run.generated_tokens - run.rounds[0].num_started
    matrices = 2 * (sizes.layer_weights + sizes.hidden * sizes.vocabulary) * passes
    return matrices + sizes.per_attended * (prompt_tokens * passes + run.attended_tokens)


def encoder_flops(sizes: Sizes, run: Replayed) -> int:
    """FLOPs of a reward that reads every prefix anew, with attention in both directions.

    Counted in the generator's tokens; the reward's own tokenizer yields about as many.
    """
    lengths = np.minimum(run.scored_lengths, sizes.max_tokens or max(run.scored_lengths))
    return int(2 * sizes.layer_weights * lengths.sum() + sizes.per_attended * (lengths**2).sum())


def read_sizes(directory: Path, *, with_head: bool, max_tokens: int = 0) -> Sizes | None:
    """Sizes from a model's config.json; None for a `model_type` that is not supported.

    Raises:
        OSError: the file cannot be read.
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


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """A generator and a reward for which FLOPs are counted.

    name: the models, for the report. generator: None if its sizes are unknown; all FLOPs are NaN
    then. encoder: None for a reward without a model of its own, such as the likelihood.
    """

    name: str = ""
    generator: Sizes | None = None
    encoder: Sizes | None = None

    def flops(self, prompt_tokens: int, run: Replayed) -> float:
        if self.generator is None:
            return math.nan
        scoring = encoder_flops(self.encoder, run) if self.encoder else 0
        return float(generator_flops(self.generator, prompt_tokens, run) + scoring)

    def best_of_n(self, replayers: Sequence[Replayer]) -> FloatArray:
        """[prompts, 2]: FLOPs of reading each prompt, and of each of its answers on average.

        Best-of-N scores each answer once, so that its cost is linear in N.
        """
        return np.array([self._best_of_n(replayer) for replayer in replayers])

    def _best_of_n(self, replayer: Replayer) -> tuple[float, float]:
        if self.generator is None:
            return math.nan, math.nan
        prompt_tokens = replayer.trajectories.prompt_tokens
        run = replayer.run(Setting(reward=replayer.reward, algorithm=Algorithm.BEST_OF_N))
        decode = decode_flops(self.generator, prompt_tokens, run)
        prompt = generator_flops(self.generator, prompt_tokens, run) - decode
        total = self.flops(prompt_tokens, run)
        return float(prompt), (total - prompt) / replayer.trajectories.n


UNKNOWN = ComputeModel()


def recorded(head: Line, reward: str) -> ComputeModel:
    """The models of a collection, from its first line; UNKNOWN unless all sizes are there."""
    sizes = {name: Sizes(**fields) for name, fields in head.get("sizes", {}).items()}
    encoder = f"reward {reward}"
    if "generator" not in sizes or (reward != LIKELIHOOD and encoder not in sizes):
        return UNKNOWN
    name = str(head["identity"]["model"])
    if reward != LIKELIHOOD:
        name += f", scored by {reward}"
    return ComputeModel(name, sizes["generator"], sizes.get(encoder))
