"""Limits of a load test: sets Locust's exit code from the statistics of the whole run.

Evaluated by the master, or by the only process.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Types of the rows in Locust's statistics."""

    ANSWER = "answer"
    CACHED = "cached answer"  # generated no tokens
    FAILED = "failed"  # separate rows: quick refusals must not lower the latency of answers
    # Not calls: kept out of Locust's totals.
    ADMITTED = "admitted"  # the first event of a stream
    FIRST_ROUND = "first round"
    BETWEEN_ROUNDS = "between rounds"
    LATE = "late start"  # open loop: by how much
    MISSED = "missed"  # open loop: not sent


CALLS = (Kind.ANSWER, Kind.CACHED, Kind.FAILED)


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run; times in milliseconds, NaN if nothing was measured.

    goodput: answers within the SLO per second. failure_ratio: failed calls of all calls, 1 without
    calls. late_ratio: late and missed requests of all that were due.
    """

    p95_ms: float
    first_round_p95_ms: float
    goodput: float
    failure_ratio: float
    late_ratio: float
    num_answers: int
    failures: Mapping[str, int]  # by status name

    def __str__(self) -> str:
        failures = "".join(f", {count} {code}" for code, count in sorted(self.failures.items()))
        return (
            f"{self.num_answers} answers (p95 {self.p95_ms:.0f} ms, first round p95 "
            f"{self.first_round_p95_ms:.0f} ms){failures}; goodput {self.goodput:.2f}/s; "
            f"{self.late_ratio:.1%} of those due were late or missed"
        )


def judge(environment: Any, **_: Any) -> None:
    """Listener of Locust's `quitting`: print the summary and set the exit code."""
    parsed = environment.parsed_options
    if parsed.worker:
        return
    summary = summarise(environment.stats, parsed.slo_ms)
    print(summary, file=sys.stderr)
    broken = broken_limits(summary, parsed)
    if environment.runner.exceptions:
        broken.append("exceptions in the load test itself")
    for limit in broken:
        print(f"limit broken: {limit}", file=sys.stderr)
    environment.process_exit_code = 1 if broken else 0


def broken_limits(summary: Summary, limits: Any) -> list[str]:
    """Each broken limit with the measured value; a NaN breaks its limit."""
    maxima = (
        ("p95 ms", summary.p95_ms, limits.max_p95_ms),
        ("first round p95 ms", summary.first_round_p95_ms, limits.max_first_round_p95_ms),
        ("failure ratio", summary.failure_ratio, limits.max_failure_ratio or 0.0),
        ("late ratio", summary.late_ratio, limits.max_late_ratio),
    )
    broken = [
        f"{name} {value:.4g}, at most {limit:g}"
        for name, value, limit in maxima
        if limit is not None and not value <= limit
    ]
    if limits.min_goodput is not None and not summary.goodput >= limits.min_goodput:
        broken.append(f"goodput {summary.goodput:.4g} per second, at least {limits.min_goodput:g}")
    return broken


def summarise(stats: Any, slo_ms: float) -> Summary:
    """The summary of Locust's `RequestStats`."""
    times = {kind: _times_ms(stats, kind) for kind in Kind}
    answers = times[Kind.ANSWER] + times[Kind.CACHED]
    seconds = (stats.last_request_timestamp or 0) - stats.start_time
    good = sum(count for ms, count in answers.items() if ms <= slo_ms)
    failed, missed = times[Kind.FAILED].total(), times[Kind.MISSED].total()
    called = answers.total() + failed
    failures: Counter[str] = Counter()
    for error in stats.errors.values():
        failures[error.parse_error(error.error)] += error.occurrences
    return Summary(
        p95_ms=percentile(answers, 0.95),
        first_round_p95_ms=percentile(times[Kind.FIRST_ROUND], 0.95),
        goodput=good / seconds if seconds > 0 else 0.0,
        failure_ratio=failed / called if called else 1.0,
        late_ratio=(times[Kind.LATE].total() + missed) / max(1, called + missed),
        num_answers=answers.total(),
        failures=failures,
    )


def rounded_ms(response_time: float) -> int:
    """The key under which Locust counts a time in ms: four digits, so there are not too many."""
    return int(float(f"{response_time:.4g}")) if response_time >= 1000 else round(response_time)


def percentile(counts: Mapping[float, int], share: float) -> float:
    """The least value that `share` of all counted values do not exceed; NaN if there are none."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return math.nan


def _times_ms(stats: Any, kind: Kind) -> Counter[float]:
    """How often each time was measured, over all rows of this kind."""
    times: Counter[float] = Counter()
    for (_, row_kind), entry in stats.entries.items():
        if row_kind == kind:
            times.update(entry.response_times)
    return times
