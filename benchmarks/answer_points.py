"""Points of the curves of `make bench-answer`, its table, and its picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from experiments.studies.statistics import mean

HEADINGS = (
    *("system", "N", "prompts", "seconds", "tokens"),
    *("reward", "95 %", "judge 2", "words", "remark"),
)
# A system, and its N.
Case = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a system; `tokens` are all that were generated for it.

    reward: of the judge that chooses answers; second_judge: of one that no system optimises.
    """

    system: str
    n: int
    prompt_id: str
    seconds: float
    tokens: int
    reward: float
    second_judge: float
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A system at one N: means over prompts, named as in the JSON line.

    prompts: how many. reward_low, reward_high: 95 % interval; None for fewer than four prompts.
    """

    system: str
    n: int
    prompts: int
    seconds: float
    tokens: float
    reward: float
    reward_low: float | None
    reward_high: float | None
    second_judge: float
    words: float


def points(answers: Sequence[Answer], unavailable: Iterable[Case] = ()) -> list[Point]:
    """One per system and N in order of their first answers, without those that failed later."""
    cases = dict.fromkeys((answer.system, answer.n) for answer in answers)
    kept = [case for case in cases if case not in set(unavailable)]
    return [_point(*case, [a for a in answers if (a.system, a.n) == case]) for case in kept]


def _point(system: str, n: int, answers: Sequence[Answer]) -> Point:
    reward = mean(np.array([answer.reward for answer in answers]))
    low, high = (None if math.isnan(edge) else round(edge, 5) for edge in (reward.low, reward.high))
    return Point(
        system,
        n,
        len(answers),
        round(_mean(answer.seconds for answer in answers), 3),
        round(_mean(answer.tokens for answer in answers), 1),
        round(reward.value, 5),
        low,
        high,
        round(_mean(answer.second_judge for answer in answers), 5),
        round(_mean(len(answer.text.split()) for answer in answers), 1),
    )


def table_rows(
    measured: Sequence[Point], remarks: Mapping[str, str], unavailable: Mapping[Case, str]
) -> Iterator[Sequence[object]]:
    """A row per point, then one per system and N that is not available."""
    for p in measured:
        has_interval = p.reward_low is not None
        interval = f"{p.reward_low:.3f} .. {p.reward_high:.3f}" if has_interval else "-"
        quality = (f"{p.reward:.3f}", interval, f"{p.second_judge:.3f}", f"{p.words:.0f}")
        cost = (f"{p.seconds:.2f}", f"{p.tokens:.0f}")
        yield (p.system, p.n, p.prompts, *cost, *quality, remarks.get(p.system, ""))
    for (system, n), reason in unavailable.items():
        yield (system, n, *["-"] * (len(HEADINGS) - 3), f"not available: {reason}")


def write_picture(path: Path, points: Sequence[Point], title: str) -> None:
    """Write an SVG file: means with 95 % intervals over prompts; every point has its N. Means over
    some of the prompts are not comparable, and left out."""
    most = max((point.prompts for point in points), default=0)
    points = [point for point in points if point.prompts == most]
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"})
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    by_seconds, by_tokens = figure.subplots(1, 2, sharey=True)
    systems = dict.fromkeys(point.system for point in points)
    for axes, cost in ((by_seconds, "seconds"), (by_tokens, "tokens")):
        for number, system in enumerate(systems):
            curve = sorted((p for p in points if p.system == system), key=lambda point: point.n)
            costs, rewards = [getattr(p, cost) for p in curve], [p.reward for p in curve]
            lows = [p.reward if p.reward_low is None else p.reward_low for p in curve]
            highs = [p.reward if p.reward_high is None else p.reward_high for p in curve]
            axes.plot(costs, rewards, f"C{number}o-", markersize=4, label=system)
            axes.vlines(costs, lows, highs, f"C{number}", linewidth=1, alpha=0.6)
            for p in curve:
                axes.annotate(f" {p.n}", (getattr(p, cost), p.reward), color=f"C{number}", va="top")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(f"{cost} per answer")
        axes.grid(alpha=0.3)
    by_seconds.set_ylabel("reward of the answer")
    if systems:
        by_tokens.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))
