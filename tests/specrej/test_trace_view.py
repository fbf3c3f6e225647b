"""How one request went, drawn: what is shown is what happened, and where."""

from __future__ import annotations

import asyncio
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specrej import contracts as c
from specrej.trace_view import (
    Bar,
    axis_cells,
    bar_cells,
    drawing,
    request_bars,
    reward_cell,
    rounds_bars,
    strip,
)
from tests.specrej.fakes import RECORD, trace
from tests.specrej.test_cli import run
from tests.specrej.test_wire import RECORDS

MS = st.floats(0, 1e7)


def drawn(record: c.RequestRecord, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(drawing(record))
    return out.getvalue()


def names(record: c.RequestRecord) -> list[str]:
    return [f"{bar.group} {bar.name}".strip() for bar in request_bars(record)]


def test_phases_follow_each_other() -> None:
    """Guards against rounds without their offset, and time that no bar shows."""
    bars = request_bars(RECORD)
    assert names(RECORD) == [
        *("look up", "queue", "open"),
        *("round 1 extend", "round 1 score", "round 1 prune"),
        *("round 2 extend", "round 2 score", "round 2 prune", "answer"),
    ]
    assert [(bar.start_ms, bar.length_ms) for bar in bars[:4]] == [
        (0, 10), (10, 20), (30, 10), (50, 1000),
    ]  # fmt: skip
    assert bars[-1].end_ms == RECORD.elapsed_ms


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"queued_at_ms": None, "running_at_ms": None, "opened_at_ms": None}, "look up"),
        ({"running_at_ms": None, "opened_at_ms": None}, "queue"),
        ({"opened_at_ms": None}, "open"),
        ({}, "round 1"),
    ],
)
@pytest.mark.parametrize("outcome", ["", "CANCELLED"])
def test_what_goes_on_is_the_last_bar(changes: dict[str, Any], last: str, outcome: str) -> None:
    """Guards against a running or failed request that seems to do nothing."""
    record = replace(RECORD, outcome=outcome, source=None, usage=None, rounds=(), **changes)
    assert names(record)[-1] == last
    assert request_bars(record)[-1].end_ms == RECORD.elapsed_ms


def test_a_running_request_is_in_its_next_round() -> None:
    assert names(replace(RECORD, outcome=""))[-1] == "round 3"
    assert "running, for 2.100 s so far" in drawn(replace(RECORD, outcome=""))


def test_a_cached_answer_has_two_clocks() -> None:
    """Guards against the seconds of another run on the axis of a request of milliseconds."""
    record = replace(
        RECORD, source=c.AnswerSource.CACHE, elapsed_ms=1.5, queued_at_ms=None,
        running_at_ms=None, opened_at_ms=None,
    )  # fmt: skip
    assert [(bar.name, bar.length_ms) for bar in request_bars(record)] == [("look up", 1.5)]
    text = drawn(record)
    assert "from the cache" in text and "the run that made it" in text
    assert text.index("the run that made it") < text.index("round 1")


@given(MS, MS, MS, st.integers(1, 200))
def test_bars_fit_and_show(start: float, length: float, rest: float, width: int) -> None:
    """Guards against bars beyond the axis, and against a prune too short to be seen."""
    cells = bar_cells(Bar("", "x", start, length, "wait"), start + length + rest, width)
    assert len(cells) == width
    assert cells.strip(" ")


@given(MS, st.integers(1, 200))
def test_the_axis_fits(span_ms: float, width: int) -> None:
    """Guards against labels beyond the axis, and a step of nothing that never ends."""
    assert len(axis_cells(span_ms, width)) == width


def test_bars_are_in_proportion() -> None:
    assert bar_cells(Bar("", "x", 0, 500, "wait"), 1000, 10) == "█████     "
    assert bar_cells(Bar("", "x", 500, 500, "wait"), 1000, 10) == "     █████"


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(0, 1), st.integers(2, 99))
def test_every_reward_has_a_cell(one: float, other: float, share: float, width: int) -> None:
    """Guards against the best reward falling off the strip, and a division by no spread."""
    low, high = ends = min(one, other), max(one, other)
    assert 0 <= reward_cell(min(high, low + (high - low) * share), ends, width) < width
    if high > low:
        assert reward_cell(low, ends, width) == 0
        assert reward_cell(high, ends, width) == width - 1


def test_the_strip_tells_fates_apart() -> None:
    """Guards against a kept candidate hidden behind a rejected one, and an answer nobody sees."""
    fates = [
        c.CandidateTrace(0, 1.0, c.Fate.FINISHED),
        c.CandidateTrace(1, 0.5, c.Fate.REJECTED),
        c.CandidateTrace(2, 0.5, c.Fate.KEPT),
        c.CandidateTrace(3, 0.0, c.Fate.VETOED),
        c.CandidateTrace(4, 0.01, c.Fate.REJECTED),
    ]
    assert strip(fates, (0.0, 1.0), 0, 5).plain == "✗·●·★"
    assert strip(fates, (0.0, 1.0), None, 5).plain == "✗·●·◆"


def test_rounds_and_totals_are_shown() -> None:
    text = drawn(RECORD)
    assert "8→4" in text and "4→2" in text
    assert "2 rounds: extend 2,000.0 ms, score 40.0 ms, prune 2.0 ms" in text
    assert "reward 0.500, 1,000 tokens made, best-of-8 about 2,500" in text
    assert "OK in 2.100 s, made for this request" in text


def test_an_answer_says_what_stood_in() -> None:
    record = replace(RECORD, degradations=(c.Degradation.REWARD,), hurried=True)
    assert "[reward, hurried]" in drawn(record)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_lines_fit_the_terminal(width: int) -> None:
    """Guards against bars that fold or are cut off, which nobody can read."""
    each = tuple(c.CandidateTrace(n, n / 8, c.Fate.KEPT) for n in range(8))
    rounds = tuple(
        replace(done, trace=replace(done.trace, candidates=each)) for done in RECORD.rounds
    )
    lines = drawn(replace(RECORD, rounds=rounds), width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert not any("…" in line for line in lines)
    assert sum(bool(re.search("[█-▏]", line)) for line in lines) == len(request_bars(RECORD))
    assert sum("●·" in line for line in lines) == len(rounds)


def test_a_server_that_tells_no_candidates() -> None:
    """Guards against an empty axis, of a record too large for candidates or of an older server."""
    bare = c.RecordedRound(0.0, trace(1, candidates=()))
    assert "8→4" in drawn(replace(RECORD, rounds=(bare,)))


@given(RECORDS)
def test_whatever_a_server_says_is_drawn(record: c.RequestRecord) -> None:
    """Guards against a picture that fails where it would be needed most."""
    bars = [*request_bars(record), *rounds_bars(record.rounds)]
    sane = all(0 <= bar.start_ms < 1e12 and 0 <= bar.length_ms < 1e12 for bar in bars)
    if sane and 0 <= record.started_unix_s < 1e10:
        assert drawn(record)


async def test_the_command(address: str) -> None:
    shown, plain, unknown = await asyncio.gather(
        run("trace", "r1", "--address", address),
        run("trace", "r1", "--address", address, "--json"),
        run("trace", "r2", "--address", address),
    )
    assert shown.code == 0 and "round 2" in shown.out
    assert json.loads(plain.out)["rounds"][1]["start_ms"] == 1071.0
    assert (unknown.code, unknown.out) == (2, "")
    assert "no such request" in unknown.err
