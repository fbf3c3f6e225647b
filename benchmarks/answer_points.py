"""Points of the curves of `make bench-answer`, and its table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))
