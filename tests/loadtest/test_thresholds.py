"""Limits that set the exit code, and the percentile of all load tests."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from loadtest.options import add_options
from loadtest.thresholds import Kind, Summary, broken_limits, percentile, summarise

GOOD = Summary(
    p95_ms=900,
    first_round_p95_ms=200,
    goodput=2.0,
    failure_ratio=0.01,
    late_ratio=0.03,
    num_answers=99,
    failures={"UNAVAILABLE": 1},
)


def limits(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("argument", "kept", "broken"),
    [
        ("--max-p95-ms", "900", "899"),
        ("--max-first-round-p95-ms", "200", "199"),
        ("--max-failure-ratio", "0.01", "0.009"),
        ("--max-late-ratio", "0.03", "0.029"),
        ("--min-goodput", "2", "2.1"),
    ],
)
def test_limit_is_broken_only_beyond_its_value(argument: str, kept: str, broken: str) -> None:
    tolerant = ("--max-failure-ratio", "0.5")
    assert broken_limits(GOOD, limits(*tolerant, argument, kept)) == []
    assert len(broken_limits(GOOD, limits(*tolerant, argument, broken))) == 1


def test_run_without_answers_breaks_every_limit() -> None:
    """Guards against a limit that holds because nothing was measured."""
    assert broken_limits(GOOD, limits()) == ["failure ratio 0.01, at most 0"]  # the default
    nothing = replace(GOOD, failure_ratio=1.0, p95_ms=math.nan, goodput=0.0)
    given = limits("--max-p95-ms", "1000", "--max-failure-ratio", "0.5", "--min-goodput", "0.1")
    assert len(broken_limits(nothing, given)) == 3


def test_summary_of_locusts_statistics() -> None:
    """Missed requests were due, too; failures are not among the answers."""
    times = {
        Kind.ANSWER: {100: 2, 900: 1},
        Kind.CACHED: {2: 1},
        Kind.FAILED: {1: 1},
        Kind.FIRST_ROUND: {50: 3},
        Kind.LATE: {60: 1},
        Kind.MISSED: {70: 5},
    }
    stats = SimpleNamespace(
        entries={("name", kind): SimpleNamespace(response_times=of) for kind, of in times.items()},
        errors={},
        start_time=10.0,
        last_request_timestamp=12.0,
    )
    summary = summarise(stats, slo_ms=500)
    assert (summary.num_answers, summary.p95_ms, summary.first_round_p95_ms) == (4, 900, 50)
    assert (summary.failure_ratio, summary.late_ratio, summary.goodput) == (0.2, 0.6, 1.5)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({100: 95, 2000: 5}, 0.95, 100),
        ({100: 94, 2000: 6}, 0.95, 2000),
        ({1.0: 1, math.inf: 1}, 0.5, 1.0),
        ({1.0: 1, math.inf: 1}, 0.9, math.inf),
    ],
)
def test_percentile_is_the_nearest_rank(
    counts: dict[float, int], share: float, expected: float
) -> None:
    assert percentile(counts, share) == expected
    assert math.isnan(percentile({}, share))


def test_times_have_enough_digits_for_limits() -> None:
    """Guards against an answer after 10.499 s that counts as one within 10 s."""
    program = "import loadtest.users; from locust import stats as s; print(*map("
    program += "s.bucket_response_time, (10499.4, 1234.4, 147.4)))"
    printed = subprocess.check_output((sys.executable, "-c", program), text=True)
    assert [*map(float, printed.split())] == [10500, 1234, 147]
