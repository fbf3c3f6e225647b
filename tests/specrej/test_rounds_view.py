"""The picture of a running request."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specrej import contracts as c
from specrej.rounds_view import (
    BAR_CELLS,
    RoundsView,
    plain_line,
    rounds_table,
    saved_text,
    summary_line,
    survivors_bar,
    watch,
)
from tests.specrej.fakes import EVENTS, GENERATION, trace


def test_a_round_is_one_line() -> None:
    """Guards against numbers in the wrong place."""
    started = trace(2, num_started=16, num_live=8, num_rejected=8)
    assert plain_line(started, 32) == (
        "round 2  ████▒▒▒▒░░░░░░░░  token 32  alive 16→8  best 0.412"
        "  slots 1,544 (\N{MINUS SIGN}512)  361 tok/s"
    )


def test_finished_candidates_are_told() -> None:
    """Guards against candidates that vanish from the picture without being rejected."""
    line = plain_line(trace(3, num_started=8, num_finished=3, num_rejected=1), 32)
    assert "alive 8→4  finished 3  best" in line


def test_a_round_that_freed_nothing_says_nothing_of_it() -> None:
    """Guards against a "(-0)" in the last round, and a division by a round of no time."""
    line = plain_line(trace(1, freed_slots=0, extend_ms=0.0), 8)
    assert line.endswith("slots 1,544  0 tok/s")


@given(st.integers(1, 5000), st.data())
def test_the_bar_is_whole_and_shows_the_living(n: int, data: st.DataObject) -> None:
    """Guards against bars of changing length, and against one survivor of many shown as none."""
    started = data.draw(st.integers(1, n))
    alive = data.draw(st.integers(0, started))
    bar = survivors_bar(trace(1, num_started=started, num_live=alive), n)
    assert len("".join(bar)) == BAR_CELLS
    assert bool(bar[0]) == (alive > 0)


def test_the_bar_survives_an_unknown_n() -> None:
    """Guards against a division by zero where no admission was seen."""
    assert len("".join(survivors_bar(trace(1), 0))) == BAR_CELLS


def test_the_table_has_a_row_per_round() -> None:
    """Guards against rows that are overwritten instead of added."""
    out = io.StringIO()
    Console(file=out, width=100).print(rounds_table(list(GENERATION.rounds), 8))
    header, first, second = out.getvalue().splitlines()
    assert header.split()[:3] == ["round", "candidates", "token"]
    assert "8→4" in first and "4→2" in second


def test_the_summary_compares_with_best_of_n() -> None:
    """Guards against a saving computed the wrong way round."""
    assert summary_line(GENERATION) == (
        "reward 0.500  1,000 tokens in 2.0 s, best-of-8 about 2,500 (\N{MINUS SIGN}60%)"
    )
    assert summary_line(replace(GENERATION, cached=True)).endswith("[cached]")


def test_nothing_saved_is_not_shown() -> None:
    """Guards against "-0%", or a saving that is none, for Best-of-N itself."""
    usage = replace(GENERATION.usage, best_of_n_tokens_estimate=1000)
    assert saved_text(replace(GENERATION, usage=usage)) == ""


async def stream(*events: c.Event) -> AsyncGenerator[c.Event, None]:
    for event in events:
        yield event


async def test_a_pipe_gets_a_line_per_round() -> None:
    """Guards against escape codes and redrawn tables in log files, and against folded lines."""
    out = io.StringIO()
    answer = await watch(stream(*EVENTS), Console(file=out, width=40))
    assert answer == GENERATION
    expected = [plain_line(done, 8) for done in GENERATION.rounds]
    assert out.getvalue().splitlines() == [*expected, summary_line(GENERATION)]


async def test_a_terminal_gets_a_live_table() -> None:
    """Guards against a live view that leaves no picture behind."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    assert await watch(stream(*EVENTS), console) == GENERATION
    last = out.getvalue().rsplit("round", 1)[1]
    assert "8→4" in last and "4→2" in last and summary_line(GENERATION) in last


async def test_a_cached_answer_still_has_its_rounds() -> None:
    """Guards against an empty table where the only event is the answer."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    await watch(stream(c.Finished(replace(GENERATION, cached=True))), console)
    assert "8→4" in out.getvalue() and "[cached]" in out.getvalue()


def test_text_is_not_markup() -> None:
    """Guards against a model's brackets being read as colours, or as an error."""
    view = RoundsView()
    view.add(EVENTS[0])
    view.add(c.RoundCompleted(trace(1), (0,), "[/bold] [red]text"))
    out = io.StringIO()
    Console(file=out, width=120).print(view)
    assert "8 candidates, prompt of 9 tokens" in out.getvalue()
    assert "[/bold] [red]text" in out.getvalue()


async def test_a_failing_stream_is_closed() -> None:
    """Guards against a call left running behind a broken picture."""
    closed = []

    async def broken() -> AsyncGenerator[c.Event, None]:
        try:
            yield EVENTS[0]
            raise LookupError
        finally:
            closed.append(True)

    with pytest.raises(LookupError):
        await watch(broken(), Console(file=io.StringIO()))
    assert closed
