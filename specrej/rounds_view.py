"""Display a running request: a table of its rounds on a terminal, a line per round in a pipe.

Pure functions turn traces into text; `watch` feeds them with events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from specrej.contracts import Admitted, Event, Finished, Generation, RoundCompleted, RoundTrace

BAR_CELLS = 16
_PREVIEW_CHARACTERS = 160
_MINUS = "\N{MINUS SIGN}"


class RoundTexts(NamedTuple):
    """One round in words, for a table's cells or a line."""

    number: str
    token: str  # the decision token
    alive: str  # live candidates before and after
    finished: str  # candidates that finished in it
    best: str  # the best reward so far
    slots: str  # slots in use at the decision token, and what the cut freed
    speed: str


def round_texts(trace: RoundTrace) -> RoundTexts:
    """A round's numbers as they are shown."""
    freed = f" ({_MINUS}{trace.freed_slots:,})" if trace.freed_slots else ""
    forks = f" ({len(trace.forks)} forks)" if trace.forks else ""
    vetoed = f" ({trace.num_vetoed} vetoed)" if trace.num_vetoed else ""
    return RoundTexts(
        number=str(trace.number),
        token=str(trace.decision_token),
        alive=f"{trace.num_started}→{trace.num_live}{forks}{vetoed}",
        finished=str(trace.num_finished or ""),
        best=f"{trace.best_score:.3f}",
        slots=f"{trace.session_slots:,}{freed}",
        speed=f"{tokens_per_s(trace):,.0f} tok/s",
    )


def tokens_per_s(trace: RoundTrace) -> float:
    """Tokens of all candidates per second of the round's extend."""
    return 1000 * trace.generated_tokens / trace.extend_ms if trace.extend_ms else 0.0


def survivors_bar(trace: RoundTrace, n: int) -> tuple[str, str, str]:
    """A bar of `n` candidates in three parts: alive, lost or finished in this round, gone before.

    At least one cell is alive if a candidate is, however many there were.
    """
    total = max(n, trace.num_started, 1)
    alive = _cells(trace.num_live, total)
    started = max(alive, _cells(trace.num_started, total))
    return "█" * alive, "▒" * (started - alive), "░" * (BAR_CELLS - started)


def plain_line(trace: RoundTrace, n: int) -> str:
    """A round as one line of plain text."""
    texts = round_texts(trace)
    finished = f"  finished {texts.finished}" if texts.finished else ""
    return (
        f"round {texts.number}  {''.join(survivors_bar(trace, n))}  token {texts.token}"
        f"  alive {texts.alive}{finished}  best {texts.best}  slots {texts.slots}  {texts.speed}"
    )


def rounds_table(traces: list[RoundTrace], n: int) -> Table:
    """All rounds so far."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("round", justify="right")
    table.add_column("candidates", no_wrap=True)
    for name in ("token", "alive", "finished", "best", "slots", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for trace in traces:
        texts = round_texts(trace)
        alive, lost, gone = survivors_bar(trace, n)
        bar = Text.assemble((alive, "green"), (lost, "red"), (gone, "dim"))
        table.add_row(
            texts.number,
            bar,
            texts.token,
            texts.alive,
            texts.finished,
            f"[bold]{texts.best}",
            texts.slots,
            f"[dim]{texts.speed}",
        )
    return table


def summary_line(generation: Generation) -> str:
    """What an answer cost, in one line."""
    usage, seconds = generation.usage, generation.timings.total_ms / 1000
    made = f"{usage.generated_tokens:,} tokens in {seconds:.1f} s"
    compared = f"best-of-{generation.n} about {usage.best_of_n_tokens_estimate:,}"
    flags = [
        name for name in ("cached", "degraded", "hurried", "reduced") if getattr(generation, name)
    ]
    noted = f"  [{', '.join(flags)}]" if flags else ""
    return f"reward {generation.best.score:.3f}  {made}, {compared}{saved_text(generation)}{noted}"


def saved_text(generation: Generation) -> str:
    """The share of Best-of-N's tokens that were not made, such as " (-61 %)"; may be empty."""
    usage = generation.usage
    if usage.best_of_n_tokens_estimate <= usage.generated_tokens:
        return ""
    saved = 1 - usage.generated_tokens / usage.best_of_n_tokens_estimate
    return f" ({_MINUS}{saved:.0%})"


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
    view = RoundsView()
    live = Live(view, console=console, refresh_per_second=8) if console.is_terminal else None
    async with aclosing(events):
        with live or nullcontext():
            async for event in events:
                view.add(event)
                if not live:
                    _print_line(event, view.n, console)
    if view.answer is None:
        raise RuntimeError("the stream ended without an answer")
    return view.answer


def _print_line(event: Event, n: int, console: Console) -> None:
    line = ""
    if isinstance(event, RoundCompleted):
        line = plain_line(event.trace, n)
    elif isinstance(event, Finished):
        line = summary_line(event.generation)
    if line:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(candidates: int, total: int) -> int:
    return max(round(BAR_CELLS * candidates / total), int(candidates > 0))
