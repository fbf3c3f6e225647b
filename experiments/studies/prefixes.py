"""Whether the reward of a prefix predicts that of the answer, and where it fails to.

At every decision token: the correlation of partial and final rewards of the answers that continue,
and whether the best answer would survive a cut there. Failures are of two of the paper's kinds.
Early ends: an answer that ends before the first cut cannot be cut, and is compared with incomplete
ones. Misleading prefixes: the best answer begins like a bad one. The third kind, similar scores, is
in the correlations: they are low where answers are cut by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.statistics import (
    Estimate,
    bounded_mean,
    kendall,
    mean,
    pearson,
    share,
)
from experiments.studies.tables import Table
from experiments.trajectories import BoolArray, FloatArray, Trajectories
from orchestrator.loop.rejection import num_kept

ALPHAS = (0.5, 0.75)
_SCATTER_POINTS = 250
_SETTLED_TAU = 0.99
_MAX_EXAMPLES = 5
_EXCERPT = 60  # characters


@dataclass(frozen=True, slots=True)
class DecisionToken:
    """Partial and final rewards at `position`; correlations are means over prompts.

    survival: the share of prompts in which the best answer survives a cut, by ALPHAS.
    partial, final: a sample of continuing answers of all prompts, less the prompt's mean.
    """

    position: int
    live_share: float
    pearson: Estimate
    kendall: Estimate
    survival: tuple[Estimate, ...]
    partial: tuple[float, ...]
    final: tuple[float, ...]

    def survival_by_chance(self, alpha: float) -> float:
        """That of random scores: an answer that has ended, the best one too, is never lost."""
        return 1 - alpha * self.live_share


@dataclass(frozen=True, slots=True)
class Correlation:
    """Partial against final rewards."""

    reward: str
    decision_tokens: tuple[DecisionToken, ...]

    @property
    def settled_from(self) -> int | None:
        """The position from which on tau is at least 0.99; None if there is none."""
        settled = itertools.takewhile(
            lambda point: point.kendall.value >= _SETTLED_TAU, reversed(self.decision_tokens)
        )
        return min((point.position for point in settled), default=None)

    def tables(self) -> tuple[Table, ...]:
        """A row per decision token."""
        columns = {
            "decision token": "position",
            "share still growing": "live_share",
            "Pearson (95 %)": "pearson",
            "Kendall tau (95 %)": "kendall",
            f"best survives alpha {ALPHAS[0]:g} (95 %)": lambda point: point.survival[0],
            f"best survives alpha {ALPHAS[1]:g} (95 %)": lambda point: point.survival[1],
        }
        caption = f"Partial against final {self.reward}"
        return (Table.of("correlation", caption, self.decision_tokens, columns),)


def correlation(prompts: Sequence[Trajectories], reward: str) -> Correlation:
    """At 4, 8, 16, ... as far as prefixes were scored there."""
    at = tuple(_decision_token(prompts, reward, position) for position in decision_tokens(prompts))
    return Correlation(reward, at)


def decision_tokens(prompts: Sequence[Trajectories], first: int = 4) -> tuple[int, ...]:
    """Doublings from `first` below the limit, at which all prompts have scores."""
    scored = set.intersection(*(set(prompt.positions.tolist()) for prompt in prompts))
    limit = min(prompt.max_tokens for prompt in prompts)
    return tuple(2**i for i in range(20) if first <= 2**i < limit and 2**i in scored)


def live(prompt: Trajectories, position: int) -> BoolArray:
    """[N] whether the candidate continues after `position`."""
    return prompt.num_tokens > position


def scores_at(prompt: Trajectories, reward: str, position: int) -> FloatArray:
    """[N] the scores that a cut at `position` ranks by; final ones of answers that ended."""
    partial = prompt.partial(reward, position)
    return np.where(live(prompt, position), partial, prompt.final(reward))


def survives(prompt: Trajectories, reward: str, position: int, alpha: float) -> bool:
    """Whether the best answer survives one cut; a complete answer cannot be lost."""
    best = prompt.best(reward)
    if not live(prompt, position)[best]:
        return True
    ranking = np.argsort(-scores_at(prompt, reward, position), kind="stable")
    return best in ranking[: num_kept(prompt.n, alpha)]


def _decision_token(prompts: Sequence[Trajectories], reward: str, position: int) -> DecisionToken:
    pairs = []
    for prompt in prompts:
        rows = live(prompt, position)
        pairs.append((prompt.partial(reward, position)[rows], prompt.final(reward)[rows]))
    survival = tuple(
        share(survives(prompt, reward, position, alpha) for prompt in prompts) for alpha in ALPHAS
    )
    # Centred per prompt: prompts differ more than their answers do.
    x, y = (np.concatenate([_centred(pair[side]) for pair in pairs]) for side in (0, 1))
    sample = np.random.default_rng(0).permutation(len(x))[:_SCATTER_POINTS]
    return DecisionToken(
        position,
        float(np.mean([live(prompt, position).mean() for prompt in prompts])),
        mean(np.array([pearson(x, y) for x, y in pairs])),
        mean(np.array([kendall(x, y) for x, y in pairs])),
        survival,
        tuple(float(f"{value:.4g}") for value in x[sample]),
        tuple(float(f"{value:.4g}") for value in y[sample]),
    )


def _centred(values: FloatArray) -> FloatArray:
    return values - values.mean() if len(values) else values


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """Shares at a decision token: of answers that ended, and of prompts by their best answer.

    best_share: it has ended. misled_share: it is live, and ranks in the lower half.
    """

    position: int
    ended_share: Estimate
    best_share: Estimate
    misled_share: Estimate


@dataclass(frozen=True, slots=True)
class Misleading:
    """A best answer in the lower half at `position`; `rank_share` is 0 for first, 1 for last."""

    prompt_id: str
    candidate: int
    position: int
    rank_share: float
    partial: float
    final: float
    excerpt: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Both kinds. first: the first decision token. lost: the share of prompts with regret."""

    reward: str
    first: int
    lost: Estimate
    early: tuple[EarlyEnds, ...]
    examples: tuple[Misleading, ...]

    def tables(self) -> tuple[Table, ...]:
        """One per kind."""
        return (
            Table.of(
                "early_ends",
                "Early ends and misleading prefixes",
                self.early,
                {
                    "decision token": "position",
                    "answers over by then (95 %)": "ended_share",
                    "best one over by then (95 %)": "best_share",
                    "best one in the lower half (95 %)": "misled_share",
                },
            ),
            Table.of(
                "misleading",
                "Best answers that began badly",
                self.examples,
                {
                    "prompt": "prompt_id",
                    "candidate": "candidate",
                    "token": "position",
                    "rank (1: last)": "rank_share",
                    "partial": "partial",
                    "final": "final",
                    "begins": "excerpt",
                },
            ),
        )


def failures(
    prompts: Sequence[Trajectories], reward: str, regrets: FloatArray, first: int = 16
) -> Failures:
    """`regrets`: of a run, one per prompt; `first`: its first decision token."""
    positions = decision_tokens(prompts)
    lowest = positions[0] if positions else first
    first = max((position for position in positions if position <= first), default=lowest)
    return Failures(
        reward,
        first,
        share(regrets > 0),
        tuple(_early(prompts, reward, position) for position in positions),
        _examples(prompts, reward, positions),
    )


def rank_of_best(prompt: Trajectories, reward: str, position: int) -> float:
    """The rank at `position` of the answer with the best final score: 0 is first, 1 is last."""
    scores = scores_at(prompt, reward, position)
    best = prompt.best(reward)
    before = int((scores > scores[best]).sum()) + int((scores[:best] == scores[best]).sum())
    return before / max(1, prompt.n - 1)


def _early(prompts: Sequence[Trajectories], reward: str, position: int) -> EarlyEnds:
    ended = [~live(prompt, position) for prompt in prompts]
    best = share(over[prompt.best(reward)] for prompt, over in zip(prompts, ended, strict=True))
    shares = bounded_mean(np.array([over.mean() for over in ended]), 1.0)
    misled = share(_is_misled(prompt, reward, position) for prompt in prompts)
    return EarlyEnds(position, shares, best, misled)


def _is_misled(prompt: Trajectories, reward: str, position: int) -> bool:
    best_is_live = bool(live(prompt, position)[prompt.best(reward)])
    return best_is_live and rank_of_best(prompt, reward, position) > 0.5


def _examples(
    prompts: Sequence[Trajectories], reward: str, positions: Sequence[int]
) -> tuple[Misleading, ...]:
    """The worst, one per prompt: the last position at which its best answer ranked low."""
    examples = []
    for prompt in prompts:
        misled = [position for position in positions if _is_misled(prompt, reward, position)]
        if misled:
            best, position = prompt.best(reward), misled[-1]
            text = " ".join(prompt.texts[best].split())
            examples.append(
                Misleading(
                    prompt.prompt_id,
                    best,
                    position,
                    rank_of_best(prompt, reward, position),
                    float(prompt.partial(reward, position)[best]),
                    float(prompt.final(reward)[best]),
                    text if len(text) <= _EXCERPT else text[:_EXCERPT].rstrip() + " ...",
                )
            )
    examples.sort(key=lambda example: (example.position, example.rank_share), reverse=True)
    return tuple(examples[:_MAX_EXAMPLES])
