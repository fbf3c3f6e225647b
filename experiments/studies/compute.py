"""What a run costs in floating-point operations: a generator's, and the reward's that judges it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.flops import Sizes, decode_flops, encoder_flops, generator_flops
from experiments.replay import Replayed, Replayer, Setting
from experiments.trajectories import FloatArray, Line
from orchestrator.composition import LIKELIHOOD
from specrej.contracts import Algorithm


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """A generator, and an encoder that reads every text it judges anew; None: free of charge.

    name: whose operations they are, for readers. Without a generator they are NaN: not known.
    """

    name: str = ""
    generator: Sizes | None = None
    encoder: Sizes | None = None

    def flops(self, prompt_tokens: int, done: Replayed) -> float:
        """Of one request."""
        if self.generator is None:
            return math.nan
        judging = encoder_flops(self.encoder, done) if self.encoder else 0
        return float(generator_flops(self.generator, prompt_tokens, done) + judging)

    def best_of_n(self, replayer: Replayer) -> tuple[float, float]:
        """Of reading the prompt, and of every answer after that, on average over those there are.

        Best-of-N judges each answer once, so that its cost is linear in N.
        """
        if self.generator is None:
            return math.nan, math.nan
        prompt_tokens = replayer.trajectories.prompt_tokens
        done = replayer.run(Setting(reward=replayer.reward, algorithm=Algorithm.BEST_OF_N))
        writing = decode_flops(
            self.generator, prompt_tokens, done.generated_tokens, done.attended_tokens
        )
        reading = generator_flops(self.generator, prompt_tokens, done) - writing
        whole = self.flops(prompt_tokens, done)
        return float(reading), (whole - reading) / replayer.trajectories.n


UNKNOWN = ComputeModel()


def best_of_n_flops(replayers: Sequence[Replayer], compute: ComputeModel) -> FloatArray:
    """[prompts, 2]: of reading each prompt, and of each of its answers."""
    return np.array([compute.best_of_n(each) for each in replayers])


def recorded(head: Line, reward: str) -> ComputeModel:
    """Of the models that made a collection, from its first line, if it has all of their sizes."""
    sizes = {name: Sizes(**each) for name, each in head.get("sizes", {}).items()}
    judge = f"reward {reward}"
    if "generator" not in sizes or (reward != LIKELIHOOD and judge not in sizes):
        return UNKNOWN
    name = str(head["identity"]["model"])
    if reward != LIKELIHOOD:
        name += f", judged by {reward}"
    return ComputeModel(name, sizes["generator"], sizes.get(judge))
