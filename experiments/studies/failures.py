"""Where the assumption fails: at the start, prefixes do not tell good answers from bad ones.

Three kinds, the paper's own. Similar scores: answers whose first tokens score alike are cut by
chance. Early ends: an answer that is over before the first cut cannot be cut, and costs little, but
what is compared with it is unfinished. Misleading prefixes: the best answer begins like a bad one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import highest_answer
from experiments.studies.correlation import decision_tokens, live, scores_at
from experiments.studies.statistics import (
    FEWEST,
    Estimate,
    FloatArray,
    IntArray,
    bootstrap,
    mean,
    pearson,
)
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories

_EXAMPLES = 5
_EXCERPT = 60  # characters


@dataclass(frozen=True, slots=True)
class Similar:
    """A prompt: how much its answers differ at the first cut, and what the whole run lost.

    spread: standard deviation of partial rewards over that of final ones. regret: over the latter.
    Later cuts have their part in it.
    """

    prompt_id: str
    spread: float
    regret: float


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """What was over by a decision token: of all answers, and of the prompts' best ones."""

    position: int
    ended_share: Estimate
    best_share: float


@dataclass(frozen=True, slots=True)
class Misleading:
    """A best answer that ranked in the lower half at `position`; `rank_share` 1 is the last."""

    prompt_id: str
    candidate: int
    position: int
    rank_share: float
    partial: float
    final: float
    excerpt: str


@dataclass(frozen=True, slots=True)
class Failures:
    """The study's result. `misled_share` is of prompts, by decision token.

    similar_pearson: of spread and regret; NaN where too few prompts lost anything to tell.
    """

    reward: str
    first: int
    similar: tuple[Similar, ...]
    similar_pearson: Estimate
    early: tuple[EarlyEnds, ...]
    misled_share: tuple[tuple[int, Estimate], ...]
    examples: tuple[Misleading, ...]

    @property
    def num_lost(self) -> int:
        """Prompts whose run lost anything."""
        return sum(each.regret > 0 for each in self.similar)

    def tables(self) -> tuple[Table, ...]:
        """One per kind."""
        return (self._similar(), self._early(), self._misleading())

    def _similar(self) -> Table:
        headings = ("prompt", f"spread at token {self.first}", "regret of the whole run")
        caption = (
            "Similar scores: spread at the first cut, and regret, in parts of the final spread"
        )
        rows = tuple((each.prompt_id, each.spread, each.regret) for each in self.similar)
        return Table("similar_scores", caption, headings, rows)

    def _early(self) -> Table:
        shares = dict(self.misled_share)
        rows = tuple(
            (each.position, each.ended_share, each.best_share, shares[each.position])
            for each in self.early
        )
        headings = (
            *("decision token", "answers over by then (95 %)", "best one over by then"),
            "best one in the lower half (95 %)",
        )
        return Table("early_ends", "Early ends and misleading prefixes", headings, rows)

    def _misleading(self) -> Table:
        rows = tuple(
            (e.prompt_id, e.candidate, e.position, e.rank_share, e.partial, e.final, e.excerpt)
            for e in self.examples
        )
        headings = ("prompt", "candidate", "token", "rank (1: last)", "partial", "final", "begins")
        return Table("misleading", "Best answers that began badly", headings, rows)


def study(
    prompts: Sequence[Trajectories], reward: str, regrets: FloatArray, first: int = 16
) -> Failures:
    """`regrets`, one per prompt, are to be explained; `first` is the first decision token."""
    positions = decision_tokens(prompts)
    first = max((p for p in positions if p <= first), default=positions[0])
    similar = tuple(
        _similar(each, reward, first, regret) for each, regret in zip(prompts, regrets, strict=True)
    )
    return Failures(
        reward,
        first,
        similar,
        _together(similar),
        tuple(_early(prompts, reward, position) for position in positions),
        tuple((position, _misled(prompts, reward, position)) for position in positions),
        _examples(prompts, reward, positions),
    )


def rank_of_best(prompt: Trajectories, reward: str, position: int) -> float:
    """Of the answer that is best in the end, among all at `position`: 0 is first, 1 is last."""
    scores = scores_at(prompt, reward, position)
    best = highest_answer(prompt, reward)
    before = int((scores > scores[best]).sum()) + int((scores[:best] == scores[best]).sum())
    return before / max(1, prompt.n - 1)


def _similar(prompt: Trajectories, reward: str, position: int, regret: float) -> Similar:
    final = float(prompt.scores(reward).final.std())
    partial = prompt.partial_at(reward, position)[live(prompt, position)]
    spread = float(partial.std()) if len(partial) else np.nan
    scale = final if final > 0 else np.nan
    return Similar(prompt.prompt_id, spread / scale, regret / scale)


def _together(similar: Sequence[Similar]) -> Estimate:
    """Pearson's r of spread and regret; NaN where fewer prompts lost anything than it takes."""
    pairs = np.array([(each.spread, each.regret) for each in similar])
    known = pairs[~np.isnan(pairs).any(axis=1)]
    if (known[:, 1] > 0).sum() < FEWEST:
        return Estimate(np.nan)

    def correlated(prompts: IntArray) -> FloatArray:
        return np.apply_along_axis(lambda draw: pearson(*known[draw].T), -1, prompts)

    return bootstrap(len(known), correlated)


def _early(prompts: Sequence[Trajectories], reward: str, position: int) -> EarlyEnds:
    ended = [~live(each, position) for each in prompts]
    best = [over[highest_answer(each, reward)] for each, over in zip(prompts, ended, strict=True)]
    shares = np.array([over.mean() for over in ended])
    return EarlyEnds(position, mean(shares), float(np.mean(best)))


def _is_misled(prompt: Trajectories, reward: str, position: int) -> bool:
    best = highest_answer(prompt, reward)
    return bool(live(prompt, position)[best]) and rank_of_best(prompt, reward, position) > 0.5


def _misled(prompts: Sequence[Trajectories], reward: str, position: int) -> Estimate:
    return mean(np.array([float(_is_misled(each, reward, position)) for each in prompts]))


def _examples(
    prompts: Sequence[Trajectories], reward: str, positions: Sequence[int]
) -> tuple[Misleading, ...]:
    """The worst, a prompt once: where its best answer looked bad for longest."""
    found = []
    for each in prompts:
        misled = [position for position in positions if _is_misled(each, reward, position)]
        if misled:
            found.append(_example(each, reward, misled[-1]))
    found.sort(key=lambda each: (each.position, each.rank_share), reverse=True)
    return tuple(found[:_EXAMPLES])


def _example(prompt: Trajectories, reward: str, position: int) -> Misleading:
    best = highest_answer(prompt, reward)
    begins = " ".join(prompt.texts[best].split())
    excerpt = begins if len(begins) <= _EXCERPT else begins[:_EXCERPT].rstrip() + " ..."
    return Misleading(
        prompt.prompt_id,
        best,
        position,
        rank_of_best(prompt, reward, position),
        float(prompt.partial_at(reward, position)[best]),
        float(prompt.scores(reward).final[best]),
        excerpt,
    )
