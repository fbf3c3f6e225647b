"""What a run costs in floating-point operations: a generator's, and the reward's that judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.flops import Sizes, decode_flops, encoder_flops, generator_flops
from experiments.replay import Replayed, Replayer, Setting
from experiments.trajectories import FloatArray
from specrej.contracts import Algorithm


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """A generator, and an encoder that reads every text it judges anew; None: free of charge."""

    name: str
    generator: Sizes
    encoder: Sizes | None = None

    def flops(self, prompt_tokens: int, done: Replayed) -> float:
        """Of one request."""
        judging = encoder_flops(self.encoder, done) if self.encoder else 0
        return float(generator_flops(self.generator, prompt_tokens, done) + judging)

    def best_of_n(self, replayer: Replayer) -> tuple[float, float]:
        """Of reading the prompt, and of every answer after that, on average over those there are.

        Best-of-N judges each answer once, so that its cost is linear in N.
        """
        prompt_tokens = replayer.trajectories.prompt_tokens
        done = replayer.run(Setting(reward=replayer.reward, algorithm=Algorithm.BEST_OF_N))
        writing = decode_flops(
            self.generator, prompt_tokens, done.generated_tokens, done.attended_tokens
        )
        reading = generator_flops(self.generator, prompt_tokens, done) - writing
        whole = self.flops(prompt_tokens, done)
        return float(reading), (whole - reading) / replayer.trajectories.n


def best_of_n_flops(replayers: Sequence[Replayer], compute: ComputeModel) -> FloatArray:
    """[prompts, 2]: of reading each prompt, and of each of its answers."""
    return np.array([compute.best_of_n(each) for each in replayers])


def embedded(reward: str) -> ComputeModel:
    """The models that the project ships: SmolLM2-135M, and all-MiniLM-L6-v2 for `relevance`."""
    generator = Sizes(
        30, 576, heads=9, kv_heads=3, head_size=64, intermediate=1536, vocabulary=49152
    )
    encoder = Sizes(
        6, 384, heads=12, kv_heads=12, head_size=32, intermediate=1536, num_mlp_matrices=2
    )
    return ComputeModel(
        "SmolLM2-135M, all-MiniLM-L6-v2" if reward == "relevance" else "SmolLM2-135M",
        generator,
        encoder if reward == "relevance" else None,
    )
