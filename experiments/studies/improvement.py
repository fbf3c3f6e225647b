"""Improvement score against relative compute: both algorithms on one engine.

Everything is relative to Best-of-N of a base N, which is at (1, 100). Compute is counted in tokens
and in FLOPs from the replays; seconds come from live runs, where somebody has made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.best_of_n import curve, doublings
from experiments.studies.improvement_score import Base, base_of, improvement_score
from experiments.studies.live import LiveRun
from experiments.studies.statistics import Estimate, FloatArray
from experiments.studies.sweep import Measured
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories

FAST, FULL = "Speculative Rejection", "Best-of-N"


@dataclass(frozen=True, slots=True)
class Point:
    """A setting; `tokens` and `flops` in parts of the base's."""

    method: str
    n: int
    alpha: float
    schedule: str
    score: Estimate
    tokens: float
    flops: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The same, of live runs of the prompts they had; `seconds` in parts of the base's.

    score: against the live answer of Best-of-N to the same prompt, which chose by the same rule.
    """

    method: str
    n: int
    alpha: float
    schedule: str
    score: Estimate
    seconds: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Improvement:
    """The study's result. num_unlike: of live runs, left out as they were not as replayed."""

    reward: str
    base_n: int
    model: str
    points: tuple[Point, ...]
    timed: tuple[Timed, ...]
    num_unlike: int

    @property
    def left_out(self) -> str:
        """How many live runs, for a caption; nothing if none."""
        return f"{self.num_unlike} not as replayed left out" if self.num_unlike else ""

    def tables(self) -> tuple[Table, ...]:
        """Replays, and live runs if there are any."""
        of = f"{self.reward}, against Best-of-{self.base_n}"
        head = ("method", "N", "alpha", "schedule", "improvement score (95 %)")
        rows = tuple(
            (p.method, p.n, p.alpha, p.schedule, p.score, p.tokens, p.flops) for p in self.points
        )
        replayed = Table(
            "improvement",
            f"Improvement score and relative compute: {of}",
            (*head, "relative tokens", "relative FLOPs"),
            rows,
        )
        if not self.timed:
            return (replayed,)
        live = tuple(
            (t.method, t.n, t.alpha, t.schedule, t.score, t.seconds, t.num_runs) for t in self.timed
        )
        headings = (*head, "relative seconds", "runs")
        caption = ", ".join(filter(None, (f"The same, of live runs: {of}", self.left_out)))
        return (replayed, Table("live", caption, headings, live))


def study(
    prompts: Sequence[Trajectories],
    reward: str,
    measured: Sequence[Measured],
    base_n: int,
    full_flops: FloatArray,
    model: str,
    live: Sequence[LiveRun] = (),
) -> Improvement:
    """Best-of-N from a quarter of the base up, and all that was measured.

    full_flops: [prompts, 2], of reading each prompt, and of each answer; `model` is whose they are.
    """
    base = base_of(prompts, reward, base_n)
    ns = tuple(n for n in doublings(min(each.n for each in prompts)) if n * 4 >= base_n)
    reading, writing = full_flops.mean(axis=0)
    base_flops = float(reading + base_n * writing)
    known = curve(prompts, reward, (*ns, base_n))
    tokens = known.tokens.mean(axis=0) / known.tokens[:, -1].mean()
    points = [
        Point(
            FULL,
            n,
            0.0,
            "no cuts",
            improvement_score(known.rewards[:, i], base),
            float(tokens[i]),
            float(reading + n * writing) / base_flops,
        )
        for i, n in enumerate(ns)
    ]
    base_tokens = float(known.tokens[:, -1].mean())
    points += [_point(each, base, base_tokens, base_flops) for each in measured]
    places = {each.prompt_id: i for i, each in enumerate(prompts)}
    runs = [each for each in live if each.prompt_id in places]
    alike = [each for each in runs if each.as_replayed]
    timed = _timed(alike, places, base)
    return Improvement(reward, base_n, model, tuple(points), timed, len(runs) - len(alike))


def _point(measured: Measured, base: Base, base_tokens: float, base_flops: float) -> Point:
    plan = measured.plan
    return Point(
        FAST,
        plan.n,
        plan.alpha,
        plan.name,
        improvement_score(measured.rewards, base),
        float(measured.tokens.mean()) / base_tokens,
        float(measured.flops.mean()) / base_flops,
    )


def _timed(live: Sequence[LiveRun], places: dict[str, int], base: Base) -> tuple[Timed, ...]:
    """Settings of live runs, on the prompts that each has in common with the base's runs."""
    of_base = [each for each in live if each.is_best_of_n and each.n == base.n]
    found = []
    for key in dict.fromkeys(each.key for each in live):
        runs = [each for each in live if each.key == key]
        timed = _timed_setting(runs, of_base, places, base)
        if timed:
            found.append(timed)
    return tuple(found)


def _timed_setting(
    runs: Sequence[LiveRun], of_base: Sequence[LiveRun], places: dict[str, int], base: Base
) -> Timed | None:
    shared = sorted({each.prompt_id for each in runs} & {each.prompt_id for each in of_base})
    if not shared:
        return None
    rewards, best = (
        np.array([_mean(each, prompt_id, "score") for prompt_id in shared])
        for each in (runs, of_base)
    )
    seconds = sum(_mean(runs, prompt_id, "seconds") for prompt_id in shared)
    base_seconds = sum(_mean(of_base, prompt_id, "seconds") for prompt_id in shared)
    rows = [places[prompt_id] for prompt_id in shared]
    scale = (base.best - base.worst)[rows]
    first = runs[0]
    return Timed(
        FULL if first.is_best_of_n else FAST,
        first.n,
        first.alpha,
        first.schedule,
        improvement_score(rewards, Base(base.n, best, best - scale)),
        seconds / base_seconds,
        len(runs),
    )


def _mean(runs: Sequence[LiveRun], prompt_id: str, field: str) -> float:
    return float(np.mean([getattr(each, field) for each in runs if each.prompt_id == prompt_id]))
