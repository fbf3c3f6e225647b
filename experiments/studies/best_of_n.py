"""Best-of-N: reward and cost by N, and the lengths of its answers.

The reward of Best-of-N is the highest among N answers, as in the paper, or that of the answer that
the service chooses, which prefers complete ones. It is averaged exactly over all draws of N of the
answers of a prompt.

An answer that ends before the limit costs Best-of-N no further tokens, so the more of them, the
less there is to save. A reward that prefers short answers rejects long ones first, and saves more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.statistics import (
    Estimate,
    bounded_mean,
    expected_first,
    first_weights,
    mean,
    pearson,
)
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, Trajectories

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Curve:
    """Best-of-N of every prompt: arrays are [prompts, len(ns)]."""

    ns: tuple[int, ...]
    rewards: FloatArray
    tokens: FloatArray


@dataclass(frozen=True, slots=True)
class Point:
    """One N. `gain` is over a single answer; tokens are per prompt.

    preferred, complete: the mean reward, and the share of complete ones, of answers chosen with
    complete ones preferred.
    """

    n: int
    reward: Estimate
    gain: Estimate
    tokens: float
    preferred: Estimate
    complete: Estimate


@dataclass(frozen=True, slots=True)
class BestOfN:
    reward: str
    points: tuple[Point, ...]

    def tables(self) -> tuple[Table, ...]:
        """Reward and tokens by N."""
        columns = {
            "N": "n",
            "mean reward of the best (95 %)": "reward",
            "gain over one answer (95 %)": "gain",
            "tokens": "tokens",
            "mean reward, complete answers preferred (95 %)": "preferred",
            "complete then, share (95 %)": "complete",
        }
        return (Table.of("best_of_n", f"Best-of-N by {self.reward}", self.points, columns),)


def doublings(n: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `n`."""
    return tuple(sorted({*(2**i for i in range(n.bit_length())), n}))


def curve(
    prompts: Sequence[Trajectories],
    reward: str,
    ns: Sequence[int],
    *,
    prefer_complete: bool = False,
) -> Curve:
    """Best-of-N of every prompt, at every N; `rewards` are values as of `Trajectories.values`."""
    values = (prompt.values(reward, prefer_complete=prefer_complete) for prompt in prompts)
    falling = [np.sort(of_prompt)[::-1] for of_prompt in values]
    rewards = [[expected_first(finals, n) for n in ns] for finals in falling]
    lengths = np.array([prompt.num_tokens.mean() for prompt in prompts])
    return Curve(tuple(ns), np.array(rewards), lengths[:, None] * np.array(ns, dtype=np.float64))


def study(prompts: Sequence[Trajectories], reward: str) -> BestOfN:
    """At N = 1, 2, 4, ... and the number of answers per prompt."""
    ns = doublings(min(prompt.n for prompt in prompts))
    known = curve(prompts, reward, ns)
    ordered = [ranked(prompt, reward, prefer_complete=True) for prompt in prompts]
    points = []
    for n, rewards, tokens in zip(ns, known.rewards.T, known.tokens.T, strict=True):
        _, preferred, complete = np.array([expected_answer(answers, n) for answers in ordered]).T
        gain = mean(rewards - known.rewards[:, 0])
        estimates = (mean(rewards), gain, float(tokens.mean()), mean(preferred))
        points.append(Point(n, *estimates, bounded_mean(complete, 1.0)))
    return BestOfN(reward, tuple(points))


def ranked(prompt: Trajectories, reward: str, *, prefer_complete: bool) -> FloatArray:
    """[N, 3] value (`Trajectories.values`), score and completeness of all answers, best first."""
    values, final = prompt.values(reward, prefer_complete=prefer_complete), prompt.final(reward)
    # Not by value: the best truncated answer and the worst complete one may have equal values.
    order = np.lexsort((-final, ~prompt.finished & prefer_complete))
    return np.stack([values, final, prompt.finished], axis=1)[order]


def expected_answer(answers: FloatArray, n: float) -> FloatArray:
    """[3] means of Best-of-N's answer over all draws of `n` answers; columns and order as `ranked`.

    A fraction of `n` is the chance of one more draw. `n` is clipped to 1 .. the number of answers.
    """
    size = len(answers)
    whole, part = divmod(min(max(n, 1.0), size), 1)
    weights = [first_weights(size, min(int(whole) + more, size)) for more in (0, 1)]
    first, more = (row @ answers[: len(row)] for row in weights)
    expected: FloatArray = (1 - part) * first + part * more
    return expected


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """One prompt: tokens of its answers at QUANTILES, and of Best-of-N's answer.

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
    """Lengths by prompt; best_tokens and tendency are means over prompts."""

    reward: str
    max_tokens: int
    prompts: tuple[PromptLengths, ...]
    mean_tokens: float
    best_tokens: Estimate
    tendency: Estimate

    def tables(self) -> tuple[Table, ...]:
        """A row per prompt, ordered by median length."""
        columns = {
            "prompt": "prompt_id",
            "answers that end by themselves": "ended_share",
            "a tenth ends by token": lambda p: p.tokens[0],
            "half end by": lambda p: p.tokens[1],
            "nine tenths end by": lambda p: p.tokens[2],
            "tokens of Best-of-N's answer": "best_tokens",
            "it ends by itself": lambda p: "yes" if p.best_ended else "no",
            "length and reward, Pearson": "tendency",
        }
        ordered = sorted(self.prompts, key=lambda prompt: prompt.tokens[1])
        caption = f"Lengths of answers, at most {self.max_tokens:,} tokens; best by {self.reward}"
        return (Table.of("lengths", caption, ordered, columns),)


def lengths(prompts: Sequence[Trajectories], reward: str) -> Lengths:
    rows = []
    for prompt in prompts:
        best, num_tokens = prompt.best(reward), prompt.num_tokens
        rows.append(
            PromptLengths(
                prompt.prompt_id,
                float(prompt.finished.mean()),
                tuple(np.quantile(num_tokens, QUANTILES).tolist()),
                int(num_tokens[best]),
                bool(prompt.finished[best]),
                pearson(num_tokens.astype(np.float64), prompt.final(reward)),
            )
        )
    return Lengths(
        reward,
        max(prompt.max_tokens for prompt in prompts),
        tuple(rows),
        float(np.mean([prompt.num_tokens.mean() for prompt in prompts])),
        mean(np.array([float(row.best_tokens) for row in rows])),
        mean(np.array([row.tendency for row in rows])),
    )
