"""A request as text: what is shown is what happened, while it runs and afterwards."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from rich.console import Console, RenderableType

from specrej import contracts as c
from specrej.client.view import (
    drawing,
    plain_line,
    record_lines,
    saved_text,
    summary_line,
    watch,
)
from tests.specrej.fakes import EVENTS, GENERATION, RECORD, trace
from tests.specrej.test_wire import RECORDS


def printed(renderable: RenderableType, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_started": 16, "num_live": 8, "num_rejected": 8},
            "round 2  candidates ████▒▒▒▒░░░░░░░░  token 32  live 16→8  best 0.412"
            "  slots 1,544 (\N{MINUS SIGN}512)  tok/s 361",
        ),
        ({"num_finished": 3, "num_rejected": 1}, "live 8→4  finished 3  best"),
        ({"num_finished": 2, "num_rejected": 2}, "candidates ██◆▒░░░░░░░░░░░░"),
        ({"freed_slots": 0, "extend_ms": 0.0}, "slots 1,544  tok/s 0"),
        ({"wave": 2, "is_check": True}, "round 2 (wave 2) (check)  candidates"),
        ({"forks": (c.Fork(8, 1),), "num_vetoed": 2}, "live 8→4 (1 forks) (2 vetoed)"),
    ],
)
def test_a_round_is_one_line(changes: dict[str, Any], text: str) -> None:
    """Guards against numbers in the wrong place, candidates that vanish without being rejected, a
    "(-0)" in the last round, and a division by a round of no time."""
    assert text in plain_line(trace(2, **changes), 32)


def test_the_summary_compares_with_best_of_n() -> None:
    """Guards against a saving computed the wrong way round, and against "-0%"."""
    assert summary_line(GENERATION) == (
        "reward 0.500, 1,000 tokens made, best-of-8 about 2,500 (\N{MINUS SIGN}60%), 2.0 s"
    )
    assert "[cached]" in summary_line(replace(GENERATION, cached=True))
    assert saved_text(replace(GENERATION.usage, best_of_n_tokens_estimate=1000)) == ""


async def stream(*events: c.Event) -> AsyncGenerator[c.Event, None]:
    for event in events:
        yield event


async def test_a_pipe_gets_a_line_per_round() -> None:
    """Guards against escape codes and redrawn tables in log files, and against folded lines."""
    out = io.StringIO()
    assert await watch(stream(*EVENTS), Console(file=out, width=40)) == GENERATION
    expected = [plain_line(done, 8) for done in GENERATION.rounds]
    assert out.getvalue().splitlines() == [*expected, summary_line(GENERATION)]


@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_terminal_gets_a_live_table(is_cached: bool) -> None:
    """Guards against a live view that leaves no picture behind, an empty table where the only
    event is the answer, and a model's brackets read as colours."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    answer = replace(GENERATION, cached=is_cached)
    admitted, *others = EVENTS
    bracketed = c.RoundCompleted(trace(1), (0,), "[/bold] [red]text")
    events = (c.Finished(answer),) if is_cached else (admitted, bracketed, *others)
    assert await watch(stream(*events), console) == answer
    last = out.getvalue().rsplit("round", 1)[1]
    assert "8→4" in last and "4→2" in last and summary_line(answer) in last


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, ["8→4", "4→2", "2 rounds: extend 2,000.0 ms, score 40.0 ms, prune 2.0 ms"]),
        ({}, ["reward 0.500, 1,000 tokens made, best-of-8 about 2,500"]),
        ({}, ["OK in 2.100 s, generated for this request", "look up 10.0 ms; queue 20.0 ms"]),
        ({"outcome": ""}, ["running, for 2.100 s so far"]),
        ({"running_at_ms": None, "opened_at_ms": None}, ["look up 10.0 ms; queue 2,090.0 ms\n"]),
        ({"source": c.AnswerSource.CACHE}, ["from the cache", "of the request that generated it"]),
        ({"stopped_by": c.StopReason.SCORE}, ["ended early: an answer reached stop_at"]),
        ({"degradations": (c.Degradation.REWARD,), "hurried": True}, ["[reward, hurried]"]),
    ],
)
def test_rounds_and_totals_are_shown(changes: dict[str, Any], texts: list[str]) -> None:
    """Guards against a running or failed request that seems to do nothing, and another run's
    seconds shown as this request's."""
    record = replace(RECORD, **changes)
    for text in ("\n".join(record_lines(record)) + "\n", printed(drawing(record), 160)):
        assert [expected for expected in texts if expected not in text] == []


@settings(max_examples=8)
@given(RECORDS)
def test_any_record_is_drawn(record: c.RequestRecord) -> None:
    """Guards against a picture that fails where it would be needed most."""
    assert printed(drawing(record)) and [*record_lines(record)]
