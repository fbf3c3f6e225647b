"""From requests to figures: percentiles, means, goodput, and how sure they are. Pure.

Intervals are 95 % percentile bootstraps over requests: a figure is computed anew from 1,000 draws,
with replacement, of as many requests as there were, and the middle 95 % of these are its interval.
Fewer than four requests have none: draws from one are all the same, and would look certain.
An unanswered request takes forever: percentiles count it as longer than anything.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.sweep.journal import Request

_DRAWS = 1000
_SHARE = 0.95
_FEWEST = 4

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; infinite where a request that was not answered decides it.

    NaN: there were no requests, or too few of them for an interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One algorithm and one N in one condition, over all repeats; seconds.

    Reward, tokens and rounds are of answered requests. `answers_per_s` and `goodput_per_s` are over
    the time that blocks took; `good_share` is of all that were sent.
    """

    condition: str
    algorithm: str
    n: int
    num_requests: int
    num_repeats: int
    users: int  # at once; 0: as they please
    codes: Mapping[str, int]
    late: int
    p50: Estimate
    p90: float
    p95: Estimate
    p99: float
    mean: float  # of answered requests
    first_round: Estimate  # median
    between_rounds: Estimate  # median
    reward: Estimate  # mean
    complete_share: float
    tokens: Estimate  # mean
    answer_tokens: float
    score_share: float
    answers_per_s: float
    goodput_per_s: float
    good_share: Estimate


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest, on a line; infinite if it reaches one that is."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    if math.isinf(above):
        return above if at > math.floor(at) or math.isinf(below) else below
    return below + (above - below) * (at - math.floor(at))


def at_percentile(share: float) -> Statistic:
    """That percentile, as a function of values."""
    return lambda values: percentile(values, share)


def estimate(values: Sequence[float], statistic: Statistic) -> Estimate:
    """Of these requests; NaN of none."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    if len(values) < _FEWEST:
        return Estimate(statistic(values), math.nan, math.nan)
    drawn = random.Random(0)
    again = [statistic(drawn.choices(values, k=len(values))) for _ in range(_DRAWS)]
    return Estimate(statistic(values), *_middle(again))


def ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Of the medians of firsts and seconds; NaN if there are none.

    Pairs are drawn as they are: what makes one request longer than another, its prompt and its
    seed, is the same for both of a pair, and is no doubt about which of them is the longer.
    """
    if not pairs:
        return Estimate(math.nan, math.nan, math.nan)
    if len(pairs) < _FEWEST:
        return Estimate(_quotient(pairs), math.nan, math.nan)
    drawn = random.Random(0)
    again = [_quotient(drawn.choices(pairs, k=len(pairs))) for _ in range(_DRAWS)]
    return Estimate(_quotient(pairs), *_middle(again))


def _quotient(pairs: Sequence[tuple[float, float]]) -> float:
    top = statistics.median(above for above, _ in pairs)
    bottom = statistics.median(below for _, below in pairs)
    if math.isinf(bottom):
        return math.nan if math.isinf(top) else 0.0
    return top / bottom


def _middle(values: Sequence[float]) -> tuple[float, float]:
    edge = (1 - _SHARE) / 2
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return percentile(known, edge), percentile(known, 1 - edge)


def latencies(requests: Iterable[Request]) -> list[float]:
    """Seconds; infinite without an answer."""
    return [request.seconds if request.answered else math.inf for request in requests]


def cell(
    condition: str,
    algorithm: str,
    n: int,
    requests: Sequence[Request],
    walls_s: Sequence[float],
    users: int,
    slo_s: float,
    late: int,
) -> Cell:
    """All figures of it."""
    seconds = latencies(requests)
    answered = [request for request in requests if request.answered]
    good = [float(each <= slo_s) for each in seconds]
    return Cell(
        condition=condition,
        algorithm=algorithm,
        n=n,
        num_requests=len(requests),
        num_repeats=len(walls_s),
        users=users,
        codes=_counted(request.code for request in requests),
        late=late,
        p50=estimate(seconds, at_percentile(0.5)),
        p90=percentile(seconds, 0.9),
        p95=estimate(seconds, at_percentile(0.95)),
        p99=percentile(seconds, 0.99),
        mean=_mean([request.seconds for request in answered]),
        first_round=_median([request.first_round_s for request in requests if request.rounds]),
        between_rounds=_median([gap for request in answered for gap in _gaps(request)]),
        reward=estimate([request.reward for request in answered], statistics.fmean),
        complete_share=_mean([request.complete for request in answered]),
        tokens=estimate([request.tokens for request in answered], statistics.fmean),
        answer_tokens=_mean([request.answer_tokens for request in answered]),
        score_share=_mean([request.score_s / request.seconds for request in answered]),
        answers_per_s=len(answered) / sum(walls_s),
        goodput_per_s=sum(good) / sum(walls_s),
        good_share=estimate(good, statistics.fmean),
    )


def _median(values: Sequence[float]) -> Estimate:
    return estimate(values, statistics.median)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _gaps(request: Request) -> list[float]:
    times = [each.at_s for each in request.rounds]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _counted(codes: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for code in codes:
        counts[code] = counts.get(code, 0) + 1
    return dict(sorted(counts.items()))
