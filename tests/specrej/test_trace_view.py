"""How one request went, drawn: what is shown is what happened, and where."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from specrej import contracts as c
from specrej.client.trace_view import (
    Bar,
    drawing,
    request_bars,
    reward_cell,
    strip,
    waterfall,
)
from specrej.contracts import errors
from tests.specrej.conftest import Command
from tests.specrej.fakes import RECORD, trace
from tests.specrej.test_wire import RECORDS

MS = st.floats(0, 1e7)


def printed(renderable: RenderableType, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def drawn(record: c.RequestRecord, width: int = 100) -> str:
    return printed(drawing(record), width)


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
    ("times", "last"),
    [((), "look up"), ((10.0,), "queue"), ((10.0, 30.0), "open"), ((10.0, 30.0, 40.0), "round 1")],
)
@pytest.mark.parametrize("outcome", ["", "CANCELLED"])
def test_the_current_phase_is_the_last_bar(
    times: tuple[float, ...], last: str, outcome: str
) -> None:
    """Guards against a running or failed request that seems to do nothing."""
    fields = ("queued_at_ms", "running_at_ms", "opened_at_ms")
    changes: dict[str, Any] = {**dict.fromkeys(fields), **dict(zip(fields, times, strict=False))}
    record = replace(RECORD, outcome=outcome, source=None, usage=None, rounds=(), **changes)
    assert names(record)[-1] == last
    assert request_bars(record)[-1].end_ms == RECORD.elapsed_ms


def test_a_cached_answer_has_two_clocks() -> None:
    """Guards against the seconds of another run on the axis of a request of milliseconds."""
    record = replace(
        RECORD, source=c.AnswerSource.CACHE, elapsed_ms=1.5, queued_at_ms=None,
        running_at_ms=None, opened_at_ms=None,
    )  # fmt: skip
    assert [(bar.name, bar.length_ms) for bar in request_bars(record)] == [("look up", 1.5)]
    text = drawn(record)
    assert "from the cache" in text and "the request that generated it" in text
    assert text.index("the request that generated it") < text.index("round 1")


@given(MS, MS, MS, st.integers(80, 200))
def test_short_and_late_bars_are_visible(start: float, ms: float, rest: float, width: int) -> None:
    """Guards against bars beyond the axis, and against a prune too short to be seen."""
    bars = [Bar("", "x", start, ms, "wait"), Bar("", "y", start + ms, rest, "wait")]
    shown = printed(waterfall(bars), width).splitlines()[1:]
    assert [len(line) <= width and bool(re.search("[█-▐▕]", line)) for line in shown] == [True] * 2


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9), st.floats(0, 1))
def test_every_reward_has_a_cell(one: float, other: float, share: float) -> None:
    """Guards against the best reward falling off the strip, and a division by no spread."""
    low, high = ends = min(one, other), max(one, other)
    assert 0 <= reward_cell(min(high, low + (high - low) * share), ends) < 32
    if high > low:
        assert reward_cell(low, ends) == 0
        assert reward_cell(high, ends) == 31


def test_the_strip_has_a_mark_per_fate() -> None:
    """Guards against a kept candidate hidden behind a rejected one, and an invisible answer."""
    fates = [
        c.CandidateTrace(0, 1.0, c.Fate.FINISHED),
        c.CandidateTrace(1, 0.5, c.Fate.REJECTED),
        c.CandidateTrace(2, 0.5, c.Fate.KEPT),
        c.CandidateTrace(3, 0.0, c.Fate.VETOED),
        c.CandidateTrace(4, 0.01, c.Fate.REJECTED),
    ]
    assert re.sub("·+", "·", strip(fates, (0.0, 1.0), 0).plain) == "✗·●·★"
    assert re.sub("·+", "·", strip(fates, (0.0, 1.0), None).plain) == "✗·●·◆"


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, ["8→4", "4→2", "2 rounds: extend 2,000.0 ms, score 40.0 ms, prune 2.0 ms"]),
        ({}, ["reward 0.500, 1,000 tokens made, best-of-8 about 2,500"]),
        ({}, ["OK in 2.100 s, generated for this request"]),
        ({"outcome": ""}, ["round 3", "running, for 2.100 s so far"]),
        ({"degradations": (c.Degradation.REWARD,), "hurried": True}, ["[reward, hurried]"]),
        # Of a record that is too large for candidates, or of an older server.
        ({"rounds": (c.RecordedRound(0.0, trace(1, candidates=())),)}, ["8→4"]),
    ],
)
def test_rounds_and_totals_are_shown(changes: dict[str, Any], texts: list[str]) -> None:
    text = drawn(replace(RECORD, **changes))
    assert all(expected in text for expected in texts)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_lines_fit_the_terminal(width: int) -> None:
    """Guards against bars that fold or are cut off."""
    candidates = tuple(c.CandidateTrace(n, n / 8, c.Fate.KEPT) for n in range(8))
    rounds = tuple(
        replace(done, trace=replace(done.trace, candidates=candidates)) for done in RECORD.rounds
    )
    lines = drawn(replace(RECORD, rounds=rounds), width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert not any("…" in line for line in lines)
    assert sum(bool(re.search("[█-▐▕]", line)) for line in lines) == len(request_bars(RECORD))
    assert sum("●·" in line for line in lines) == len(rounds)


@pytest.mark.parametrize("ends", [(-1.5e308, 1.5e308), (0.0, math.inf), (1.0, 1.0)])
def test_rewards_without_a_finite_span_are_in_the_middle(ends: tuple[float, float]) -> None:
    """Guards against a trace that fails where the span of the rewards overflows."""
    assert {reward_cell(end, ends) for end in ends} == {reward_cell(0.0, (0.0, 0.0))}


@given(RECORDS)
def test_any_record_is_drawn(record: c.RequestRecord) -> None:
    """Guards against a picture that fails where it would be needed most."""
    assert drawn(record)


async def test_the_command(address: str, command: Command) -> None:
    shown, _ = await command("trace", "r1", "--address", address)
    assert "round 2" in shown
    plain, _ = await command("trace", "r1", "--address", address, "--json")
    assert json.loads(plain)["rounds"][1]["start_ms"] == 1071.0
    with pytest.raises(errors.NotFound, match="no record of such a request"):
        await command("trace", "r2", "--address", address)
