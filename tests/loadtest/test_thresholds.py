"""What sets the exit code."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest

from loadtest.options import add_options
from loadtest.thresholds import Summary, broken_limits, percentile

GOOD = Summary(
    num_answers=99,
    num_failed=1,
    num_late=3,
    num_missed=0,
    p95_ms=900,
    first_round_p95_ms=200,
    goodput=2.0,
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
def test_each_limit(argument: str, kept: str, broken: str) -> None:
    tolerant = ("--max-failure-ratio", "0.5")
    assert broken_limits(GOOD, limits(*tolerant, argument, kept)) == []
    assert len(broken_limits(GOOD, limits(*tolerant, argument, broken))) == 1


def test_failures_are_not_tolerated_unless_told_so() -> None:
    assert broken_limits(GOOD, limits()) == ["failure ratio 0.01, at most 0"]


def test_nothing_seen_keeps_no_limit() -> None:
    """Guards against a limit that holds because nothing was measured."""
    nothing = replace(GOOD, num_answers=0, num_failed=0, p95_ms=math.nan, goodput=0.0)
    asked = limits("--max-p95-ms", "1000", "--max-failure-ratio", "0.5", "--min-goodput", "0.1")
    assert len(broken_limits(nothing, asked)) == 3


def test_percentiles() -> None:
    assert percentile({100: 95, 2000: 5}, 0.95) == 100
    assert percentile({100: 94, 2000: 6}, 0.95) == 2000
    assert math.isnan(percentile({}, 0.95))
