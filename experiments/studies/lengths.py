"""Which answers end early: lengths by prompt, and of the answers that are chosen.

An answer that ends by itself costs Best-of-N nothing more, so the more of them, the less there is
to save; but a reward that prefers short ones rejects the long ones first, and saves more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import highest_answer
from experiments.studies.statistics import Estimate, mean, pearson
from experiments.studies.tables import Cell, Table
from experiments.trajectories import Trajectories

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: tokens of its answers at QUANTILES, and of Best-of-N's.

    ended_share: of answers that ended before the limit. tendency: Pearson's r of length and reward.
    """

    prompt_id: str
    ended_share: float
    tokens: tuple[float, ...]
    best_tokens: int
    best_ended: bool
    tendency: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """The study's result. best_tokens: of Best-of-N's answers; tendency: see Prompt; means."""

    reward: str
    max_tokens: int
    prompts: tuple[Prompt, ...]
    mean_tokens: float
    best_tokens: Estimate
    tendency: Estimate

    def tables(self) -> tuple[Table, ...]:
        """A row per prompt, the one whose answers end earliest first."""
        headings = (
            *("prompt", "answers that end by themselves", "a tenth ends by token"),
            *("half end by", "nine tenths end by", "tokens of Best-of-N's answer"),
            *("it ends by itself", "length and reward, Pearson"),
        )
        ordered = sorted(self.prompts, key=lambda each: each.tokens[1])
        rows = tuple(_row(each) for each in ordered)
        caption = f"Lengths of answers, at most {self.max_tokens:,} tokens; best by {self.reward}"
        return (Table("lengths", caption, headings, rows),)


def _row(p: Prompt) -> tuple[Cell, ...]:
    ends = "yes" if p.best_ended else "no"
    return (p.prompt_id, p.ended_share, *p.tokens, p.best_tokens, ends, p.tendency)


def study(prompts: Sequence[Trajectories], reward: str) -> Lengths:
    """Of all answers."""
    found = tuple(_prompt(each, reward) for each in prompts)
    return Lengths(
        reward,
        max(each.max_tokens for each in prompts),
        found,
        float(np.mean([each.num_tokens.mean() for each in prompts])),
        mean(np.array([float(each.best_tokens) for each in found])),
        mean(np.array([each.tendency for each in found])),
    )


def _prompt(prompt: Trajectories, reward: str) -> Prompt:
    best, lengths = highest_answer(prompt, reward), prompt.num_tokens
    return Prompt(
        prompt.prompt_id,
        float(prompt.finished.mean()),
        tuple(float(each) for each in np.quantile(lengths, QUANTILES)),
        int(lengths[best]),
        bool(prompt.finished[best]),
        pearson(lengths.astype(np.float64), prompt.scores(reward).final),
    )
