"""Synthetic trajectories with known correlations.

Scores are random walks: `walk` of the first t tokens is the sum of t independent normal steps, so
that among answers of T tokens each, partial and final scores correlate by sqrt(t / T), and
Kendall's tau is (2 / pi) asin of that (Kruskal, 1958). Log-probabilities are independent too: the
mean of the first t correlates with the mean of all by the same amount.
"""

from __future__ import annotations

import math

import numpy as np

from experiments.trajectories import FloatArray, IntArray, PrefixScores, Trajectories
from specrej.contracts import Prompt

GRID = (4, 8, 12, 16, 24, 32, 48, 64)
WALK = "walk"


def collection(
    num_prompts: int = 6,
    n: int = 64,
    max_tokens: int = 64,
    positions: tuple[int, ...] = GRID,
    stop_share: float = 0.0,
    seed: int = 0,
) -> list[Trajectories]:
    """Several prompts; a share `stop_share` of all answers ends at a random token."""
    return [
        trajectories(n, max_tokens, positions, stop_share, seed + 1000 * number, f"p{number}")
        for number in range(num_prompts)
    ]


def trajectories(
    n: int = 64,
    max_tokens: int = 64,
    positions: tuple[int, ...] = GRID,
    stop_share: float = 0.0,
    seed: int = 0,
    prompt_id: str = "p0",
) -> Trajectories:
    """One prompt."""
    random = np.random.default_rng(seed)
    stops = random.random(n) < stop_share
    num_tokens = np.where(stops, random.integers(1, max_tokens + 1, n), max_tokens)
    walks = np.cumsum(random.standard_normal((n, max_tokens)), axis=1)
    past_end = np.arange(max_tokens) >= num_tokens[:, None]
    logprobs = np.where(past_end, np.nan, -1.0 + 0.3 * random.standard_normal((n, max_tokens)))
    return from_scores(walks, num_tokens, logprobs, positions, prompt_id, finished=stops, seed=seed)


def from_scores(
    scores: FloatArray,
    num_tokens: IntArray,
    logprobs: FloatArray | None = None,
    positions: tuple[int, ...] = GRID,
    prompt_id: str = "p0",
    finished: np.typing.NDArray[np.bool_] | None = None,
    seed: int = 0,
) -> Trajectories:
    """Answers from `scores` [N, T]: the first t tokens score `scores[:, t - 1]`."""
    n, max_tokens = scores.shape
    grid = np.array(positions, dtype=np.int64)
    if logprobs is None:
        logprobs = np.where(np.arange(max_tokens) >= num_tokens[:, None], np.nan, -1.0)
    partial = np.where(num_tokens[:, None] >= grid, scores[:, grid - 1], np.nan)
    return Trajectories(
        prompt_id=prompt_id,
        prompt=Prompt.from_user(f"Question {prompt_id}"),
        prompt_tokens=10,
        max_tokens=max_tokens,
        seed=seed,
        positions=grid,
        num_tokens=num_tokens,
        finished=num_tokens < max_tokens if finished is None else finished,
        logprobs=logprobs,
        rewards={WALK: PrefixScores(partial, scores[np.arange(n), num_tokens - 1])},
        texts=[f"Answer {i} to {prompt_id}, at <b>length</b>." for i in range(n)],
    )


def noise(num_prompts: int = 12, n: int = 32) -> list[Trajectories]:
    """Prompts whose prefixes predict nothing: every score is drawn anew; all answers are whole."""
    random = np.random.default_rng(7)
    return [
        from_scores(
            random.standard_normal((n, 64)),
            np.full(n, 64),
            prompt_id=f"p{number}",
            finished=np.ones(n, dtype=np.bool_),
        )
        for number in range(num_prompts)
    ]


def expected_pearson(position: int, max_tokens: int = 64) -> float:
    """Correlation of partial and final scores where no answer ends early."""
    return math.sqrt(position / max_tokens)


def expected_kendall(position: int, max_tokens: int = 64) -> float:
    """Kendall's tau of normal scores with that correlation."""
    return 2 / math.pi * math.asin(expected_pearson(position, max_tokens))
