"""Display a running request: a table of its rounds on a terminal, a line per round in a pipe."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from specrej.client.plain_view import follow, round_texts, summary_line, survivors_bar
from specrej.contracts import Admitted, Event, Finished, Generation, RoundCompleted, RoundTrace

_PREVIEW_CHARACTERS = 160


def rounds_table(traces: list[RoundTrace], n: int) -> Table:
    """All rounds so far."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("round", justify="right")
    table.add_column("candidates", no_wrap=True)
    for name in ("token", "live", "finished", "best", "slots", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for trace in traces:
        texts = round_texts(trace)
        live, lost, gone = survivors_bar(trace, n)
        bar = Text.assemble((live, "green"), (lost, "red"), (gone, "dim"))
        table.add_row(
            texts.number,
            bar,
            texts.token,
            texts.live,
            texts.finished,
            f"[bold]{texts.best}",
            texts.slots,
            f"[dim]{texts.speed}",
        )
    return table


@dataclass
class RoundsView:
    """The state of a running request as a rich renderable."""

    n: int = 0
    prompt_tokens: int = 0
    request_id: str = ""
    traces: list[RoundTrace] = field(default_factory=list)
    best_text: str = ""
    answer: Generation | None = None
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def add(self, event: Event) -> None:
        match event:
            case Admitted():
                self.n, self.prompt_tokens = event.n, event.prompt_tokens
                self.request_id = event.request_id
            case RoundCompleted():
                self.traces.append(event.trace)
                self.best_text = event.best_text
            case Finished():
                self.answer = event.generation

    def __rich__(self) -> RenderableType:
        if self.answer:
            # A cached answer had no events: show the rounds of the run that made it.
            table = rounds_table(list(self.answer.rounds), self.answer.n)
            return Group(table, Text(summary_line(self.answer), "dim"))
        if not self.n:
            self.spinner.text = Text("waiting for room", "dim")
            return self.spinner
        self.spinner.text = Text(f"round {len(self.traces) + 1}", "dim")
        counts = f"{self.n} candidates, prompt of {self.prompt_tokens} tokens"
        title = Text(f"{counts}, request {self.request_id}", "dim")
        preview = Text(" ".join(self.best_text.split())[:_PREVIEW_CHARACTERS], "italic dim")
        return Group(title, rounds_table(self.traces, self.n), preview, self.spinner)


async def watch(events: AsyncGenerator[Event, None], console: Console) -> Generation:
    """Show events on `console` as they arrive; returns the answer.

    Leaving early closes the stream, which cancels the request.
    """
    if not console.is_terminal:
        write = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        return await follow(events, write)
    view = RoundsView()
    async with aclosing(events):
        with Live(view, console=console, refresh_per_second=8):
            async for event in events:
                view.add(event)
    if view.answer is None:
        raise RuntimeError("the stream ended without an answer")
    return view.answer
