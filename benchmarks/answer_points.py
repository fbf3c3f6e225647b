"""Points of the curves of `make bench-answer`, its table, and its picture."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from experiments.studies.statistics import mean
from experiments.trajectories import FloatArray

HEADINGS = (
    *("system", "N", "prompts", "seconds", "tokens"),
    *("reward", "95 %", "judge 2", "words", "remark"),
)
PAIRED_HEADINGS = (
    *("system", "N", "prompts", "reward, 95 %", "judge 2, 95 %"),
    *("seconds, share", "tokens, share"),
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A point against `base`, over the `prompts` that both answered.

    Differences of means with 95 % intervals as of `Point`, and quotients of sums.
    """

    system: str
    n: int
    base: str
    prompts: int
    reward: float
    reward_low: float | None
    reward_high: float | None
    second_judge: float
    second_judge_low: float | None
    second_judge_high: float | None
    seconds_ratio: float
    tokens_ratio: float


def complete(
    answers: Iterable[Answer], unavailable: Iterable[Case] = (), sparse: Collection[str] = ()
) -> list[Answer]:
    """The answers to prompts that every system answered at every N.

    Cases that failed later are left out. Systems in `sparse` answer some of the prompts only.
    """
    failed = set(unavailable)
    kept = [answer for answer in answers if (answer.system, answer.n) not in failed]
    prompts: dict[Case, set[str]] = {}
    for answer in kept:
        prompts.setdefault((answer.system, answer.n), set()).add(answer.prompt_id)
    full = [ids for (system, _), ids in prompts.items() if system not in sparse]
    common = set.intersection(*(full or prompts.values())) if prompts else set()
    return [answer for answer in kept if answer.prompt_id in common]


def points(answers: Sequence[Answer]) -> list[Point]:
    """One per system and N in order of their first answers."""
    cases = dict.fromkeys((answer.system, answer.n) for answer in answers)
    return [_point(*case, [a for a in answers if (a.system, a.n) == case]) for case in cases]


def _point(system: str, n: int, answers: Sequence[Answer]) -> Point:
    return Point(
        system,
        n,
        len(answers),
        round(_mean(answer.seconds for answer in answers), 3),
        round(_mean(answer.tokens for answer in answers), 1),
        *_with_interval(np.array([answer.reward for answer in answers])),
        round(_mean(answer.second_judge for answer in answers), 5),
        round(_mean(len(answer.text.split()) for answer in answers), 1),
    )


def _with_interval(values: FloatArray) -> tuple[float, float | None, float | None]:
    """The mean and its interval."""
    of = mean(values)
    low, high = (None if math.isnan(edge) else round(edge, 5) for edge in (of.low, of.high))
    return round(of.value, 5), low, high


def differences(answers: Iterable[Answer], base: str = "vllm") -> list[Difference]:
    """Of all other points from that of the largest N of a system; none without its answers."""
    cases: dict[Case, dict[str, Answer]] = {}
    for answer in answers:
        cases.setdefault((answer.system, answer.n), {})[answer.prompt_id] = answer
    largest = max((n for system, n in cases if system == base), default=0)
    theirs = cases.pop((base, largest), {})
    pairs = {
        case: [(ours[prompt], theirs[prompt]) for prompt in theirs if prompt in ours]
        for case, ours in cases.items()
    }
    name = f"{base} n={largest}"
    return [_difference(case, name, paired) for case, paired in pairs.items() if paired]


def _difference(case: Case, base: str, paired: Sequence[tuple[Answer, Answer]]) -> Difference:
    def columns(figure: str) -> FloatArray:
        return np.array([[getattr(answer, figure) for answer in pair] for pair in paired], float).T

    (reward, of_base), (judge, its_judge) = map(columns, ("reward", "second_judge"))
    seconds, tokens = (columns(figure).sum(axis=1) for figure in ("seconds", "tokens"))
    quality = (*_with_interval(reward - of_base), *_with_interval(judge - its_judge))
    return Difference(
        case[0],
        case[1],
        base,
        len(paired),
        *quality,
        round(float(seconds[0] / seconds[1]), 4),
        round(float(tokens[0] / tokens[1]), 4),
    )


def table_rows(
    measured: Sequence[Point], remarks: Mapping[str, str], unavailable: Mapping[Case, str]
) -> Iterator[Sequence[object]]:
    """A row per point, then one per system and N that is not available."""
    for p in measured:
        interval = _interval(p.reward_low, p.reward_high) or "-"
        quality = (f"{p.reward:.3f}", interval, f"{p.second_judge:.3f}", f"{p.words:.0f}")
        cost = (f"{p.seconds:.2f}", f"{p.tokens:.0f}")
        yield (p.system, p.n, p.prompts, *cost, *quality, remarks.get(p.system, ""))
    for (system, n), reason in unavailable.items():
        yield (system, n, *["-"] * (len(HEADINGS) - 3), f"not available: {reason}")


def paired_rows(paired: Iterable[Difference]) -> Iterator[Sequence[object]]:
    """A row per difference."""
    for d in paired:
        reward = f"{d.reward:+.3f} {_interval(d.reward_low, d.reward_high)}"
        judge = f"{d.second_judge:+.3f} {_interval(d.second_judge_low, d.second_judge_high)}"
        yield (d.system, d.n, d.prompts, reward, judge, d.seconds_ratio, d.tokens_ratio)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f} .. {high:.3f}"


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
