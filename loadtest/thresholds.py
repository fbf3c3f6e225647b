"""What a load test must not exceed, or fall short of: sets Locust's exit code.

Judged once, where all figures come together: by the master, or by the only process.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loadtest import kinds


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run: counts, milliseconds, answers within the limit of good ones per second.

    Locust keeps times rounded to two digits, above 100 ms, and so are these. NaN: nothing was seen.
    """

    num_answers: int
    num_failed: int
    num_late: int
    num_missed: int
    p95_ms: float
    first_round_p95_ms: float
    goodput: float
    failures: dict[str, int]  # by status name

    @property
    def failure_ratio(self) -> float:
        """Of the calls that were made; all of them, if there was none."""
        called = self.num_answers + self.num_failed
        return self.num_failed / called if called else 1.0

    @property
    def late_ratio(self) -> float:
        """Sent late, or not at all, of what was due."""
        due = self.num_answers + self.num_failed + self.num_missed
        return (self.num_late + self.num_missed) / due if due else 0.0

    def __str__(self) -> str:
        failures = "".join(f", {count} {code}" for code, count in sorted(self.failures.items()))
        return (
            f"{self.num_answers} answers (p95 {_ms(self.p95_ms)}, "
            f"first round p95 {_ms(self.first_round_p95_ms)}){failures}; "
            f"goodput {self.goodput:.2f}/s; late {self.num_late}, missed {self.num_missed} "
            f"({self.late_ratio:.1%} of those due)"
        )


def judge(environment: Any, **_: Any) -> None:
    """Listens to Locust's `quitting`: says how it went, and sets the exit code."""
    parsed = environment.parsed_options
    if parsed.worker:
        return
    summary = summarise(environment.stats, parsed.slo_ms)
    print(summary, file=sys.stderr)
    broken = broken_limits(summary, parsed)
    if environment.runner.exceptions:
        broken.append("no errors of the load test's own")
    for limit in broken:
        print(f"limit not kept: {limit}", file=sys.stderr)
    environment.process_exit_code = 1 if broken else 0


def broken_limits(summary: Summary, limits: Any) -> list[str]:
    """Each limit that was not kept, with what was measured; a NaN keeps none."""
    highest = (
        ("p95 ms", summary.p95_ms, limits.max_p95_ms),
        ("first round p95 ms", summary.first_round_p95_ms, limits.max_first_round_p95_ms),
        ("failure ratio", summary.failure_ratio, limits.max_failure_ratio or 0.0),
        ("late ratio", summary.late_ratio, limits.max_late_ratio),
    )
    broken = [
        f"{name} {value:.4g}, at most {limit:g}"
        for name, value, limit in highest
        if limit is not None and not value <= limit
    ]
    if limits.min_goodput is not None and not summary.goodput >= limits.min_goodput:
        broken.append(f"goodput {summary.goodput:.4g} per second, at least {limits.min_goodput:g}")
    return broken


def summarise(stats: Any, slo_ms: float) -> Summary:
    """Of Locust's `RequestStats`."""
    answers = _times(stats, (kinds.ANSWER, kinds.CACHED))
    good = sum(count for ms, count in answers.items() if ms <= slo_ms)
    seconds = (stats.last_request_timestamp or 0) - stats.start_time
    return Summary(
        num_answers=sum(answers.values()),
        num_failed=_count(stats, kinds.FAILED),
        num_late=_count(stats, kinds.LATE),
        num_missed=_count(stats, kinds.MISSED),
        p95_ms=percentile(answers, 0.95),
        first_round_p95_ms=percentile(_times(stats, (kinds.FIRST_ROUND,)), 0.95),
        goodput=good / seconds if seconds > 0 else 0.0,
        failures=_failures(stats),
    )


def percentile(counts: dict[float, int], share: float) -> float:
    """The least time that `share` of all do not exceed; NaN of none."""
    left = share * sum(counts.values())
    for ms in sorted(counts):
        left -= counts[ms]
        if left <= 0:
            return ms
    return float("nan")


def _ms(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.0f} ms"


def _entries(stats: Any, names: Iterable[str]) -> Iterable[Any]:
    return [entry for (_, kind), entry in stats.entries.items() if kind in names]


def _times(stats: Any, names: Iterable[str]) -> dict[float, int]:
    together: dict[float, int] = {}
    for entry in _entries(stats, names):
        for ms, count in entry.response_times.items():
            together[ms] = together.get(ms, 0) + count
    return together


def _count(stats: Any, kind: str) -> int:
    return sum(int(entry.num_requests) for entry in _entries(stats, (kind,)))


def _failures(stats: Any) -> dict[str, int]:
    together: dict[str, int] = {}
    for error in stats.errors.values():
        name = error.parse_error(error.error)
        together[name] = together.get(name, 0) + error.occurrences
    return together
