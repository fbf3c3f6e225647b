"""The picture of a running request."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.local.demo import show_answer
from specrej import contracts as c
from specrej.client.plain_view import BAR_CELLS, plain_line, saved_text, summary_line, survivors_bar
from specrej.client.rounds_view import RoundsView, watch
from tests.specrej.fakes import EVENTS, GENERATION, trace


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_started": 16, "num_live": 8, "num_rejected": 8},
            "round 2  ████▒▒▒▒░░░░░░░░  token 32  live 16→8  best 0.412"
            "  slots 1,544 (\N{MINUS SIGN}512)  361 tok/s",
        ),
        ({"num_finished": 3, "num_rejected": 1}, "live 8→4  finished 3  best"),
        ({"freed_slots": 0, "extend_ms": 0.0}, "slots 1,544  0 tok/s"),
    ],
)
def test_a_round_is_one_line(changes: dict[str, Any], text: str) -> None:
    """Guards against numbers in the wrong place, candidates that vanish without being rejected, a
    "(-0)" in the last round, and a division by a round of no time."""
    assert text in plain_line(trace(2, **changes), 32)


@given(st.integers(1, 5000), st.data())
def test_the_bar_is_whole_and_shows_survivors(n: int, data: st.DataObject) -> None:
    """Guards against bars of changing length, and against one survivor of many shown as none."""
    started = data.draw(st.integers(1, n))
    live = data.draw(st.integers(0, started))
    bar = survivors_bar(trace(1, num_started=started, num_live=live), n)
    assert len("".join(bar)) == BAR_CELLS
    assert bool(bar[0]) == (live > 0)


def test_the_bar_has_all_cells_without_an_admission() -> None:
    """Guards against a division by zero where no admission was seen."""
    assert len("".join(survivors_bar(trace(1), 0))) == BAR_CELLS


def test_the_summary_compares_with_best_of_n() -> None:
    """Guards against a saving computed the wrong way round, and against "-0%"."""
    assert summary_line(GENERATION) == (
        "reward 0.500  1,000 tokens in 2.0 s, best-of-8 about 2,500 (\N{MINUS SIGN}60%)"
    )
    assert summary_line(replace(GENERATION, cached=True)).endswith("[cached]")
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


@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_terminal_gets_a_live_table(is_cached: bool) -> None:
    """Guards against a live view that leaves no picture behind, and against an empty table where
    the only event is the answer."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    answer = replace(GENERATION, cached=is_cached)
    events = (c.Finished(answer),) if is_cached else EVENTS
    assert await watch(stream(*events), console) == answer
    last = out.getvalue().rsplit("round", 1)[1]
    assert "8→4" in last and "4→2" in last and summary_line(answer) in last


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


def test_the_answer_is_shown_with_its_cost() -> None:
    """Guards against a comparison with the wrong number, or a phase that is left out."""
    out = io.StringIO()
    show_answer(GENERATION, Console(file=out, width=60))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]
    assert lines == [
        "the best",
        "reward 0.500, the best of 8 candidates",
        "tokens 1,000 made",
        "best-of-8 about 2,500 (\N{MINUS SIGN}60%)",
        "time 2.00 s: waiting 0.00 s, making tokens 1.90 s, scoring 0.05 s, pruning 0.00 s",
    ]
