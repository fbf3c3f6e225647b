"""Draws how one request went: its phases as a waterfall, then its rounds with their rewards.

Pure functions from a record to texts; knows no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from specrej.contracts import (
    AnswerSource,
    CandidateTrace,
    Fate,
    RecordedRound,
    RequestRecord,
    RoundTrace,
)

_LEAST_SPAN_MS = 1e-3  # of a time axis
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MINUS = "\N{MINUS SIGN}"
_STRIP_CELLS = 16, 64  # at least and at most

_STYLES = {
    "before": "dim",
    "wait": "blue",
    "extend": "green",
    "score": "yellow",
    "prune": "magenta",
    "going on": "bold cyan",
}
# The last one that is there is the one that shows.
_MARKS = {
    Fate.REJECTED: ("○", "red"),
    Fate.VETOED: ("✗", "magenta"),
    Fate.KEPT: ("●", "green"),
    Fate.FINISHED: ("◆", "cyan"),
}
_ANSWER = ("★", "bold yellow")
_SOURCES = {
    AnswerSource.RUN: "made for this request",
    AnswerSource.CACHE: "from the cache",
    AnswerSource.FLIGHT: "made for an equal request at the same time",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase: where it belongs, its name, milliseconds since arrival, and how it is drawn."""

    group: str
    name: str
    start_ms: float
    length_ms: float
    style: str

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.length_ms


def request_bars(record: RequestRecord) -> list[Bar]:
    """What the request's own time went into, without gaps, in order."""
    if record.source not in (None, AnswerSource.RUN):
        name = "look up" if record.source is AnswerSource.CACHE else "wait for it"
        return [Bar("", name, 0.0, record.elapsed_ms, "wait")]
    bars = [*_waits(record), *rounds_bars(record.rounds)]
    at_ms = bars[-1].end_ms if bars else 0.0
    if record.elapsed_ms > at_ms:
        bars.append(_last(record, at_ms))
    return [bar for bar in bars if bar.length_ms > 0]


def _waits(record: RequestRecord) -> Iterator[Bar]:
    """Up to the first round; a wait that has not ended is not among them."""
    begun = 0.0
    steps = (
        ("look up", record.queued_at_ms, "before"),
        ("queue", record.running_at_ms, "wait"),
        ("open", record.opened_at_ms, "wait"),
    )
    for name, ended, style in steps:
        if ended is None:
            return
        yield Bar("", name, begun, ended - begun, style)
        begun = ended


def rounds_bars(rounds: Sequence[RecordedRound]) -> Iterator[Bar]:
    """What rounds' time went into."""
    for each in rounds:
        group, at_ms = f"round {each.trace.number}", each.start_ms
        for name in ("extend", "score", "prune"):
            length_ms: float = getattr(each.trace, f"{name}_ms")
            yield Bar(group, name, at_ms, length_ms, name)
            at_ms += length_ms


def _last(record: RequestRecord, at_ms: float) -> Bar:
    """What goes on, or was going on when it ended."""
    length_ms = record.elapsed_ms - at_ms
    if record.outcome == "OK":
        return Bar("", "answer", at_ms, length_ms, "before")
    if record.opened_at_ms is not None:
        return Bar(f"round {len(record.rounds) + 1}", "", at_ms, length_ms, "going on")
    waits = (("look up", record.queued_at_ms), ("queue", record.running_at_ms), ("open", None))
    name = next(name for name, ended in waits if ended is None)
    return Bar("", name, at_ms, length_ms, "going on")


def bar_cells(bar: Bar, span_ms: float, width: int) -> str:
    """`width` cells of a time axis that is `span_ms` long; whatever took time shows."""
    scale = width / max(span_ms, _LEAST_SPAN_MS)
    start = min(int(bar.start_ms * scale), width - 1)
    # A bar begins at a whole cell, as there is no block that fills the right of one.
    length = min(bar.end_ms * scale, width) - start
    eighths = max(1, round(length * 8))
    whole, rest = divmod(eighths, 8)
    cells = " " * start + "█" * whole + (_EIGHTHS[rest] if rest else "")
    return cells[:width].ljust(width)


def axis_cells(span_ms: float, width: int) -> str:
    """Marks of the time axis, as many as there is room for."""
    num_marks = max(1, width // 12)
    span_ms = max(span_ms, _LEAST_SPAN_MS)
    step_ms = _nice_step(span_ms / num_marks)
    cells = [" "] * width
    for number in range(num_marks + 1):
        label = _mark(number * step_ms, step_ms)
        start = int(number * step_ms / span_ms * width)
        if start + len(label) <= width:
            cells[start : start + len(label)] = label
    return "".join(cells)


def _nice_step(at_least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 1e-3
    while power * 5 < at_least:
        power *= 10
    return next(power * times for times in (1, 2, 5) if power * times >= at_least)


def _mark(at_ms: float, step_ms: float) -> str:
    if step_ms >= 1000:
        return f"╷{at_ms / 1000:g} s"
    return f"╷{at_ms:g} ms" if step_ms < 100 else f"╷{at_ms / 1000:.1f} s"


@dataclass(frozen=True, slots=True)
class _Bars:
    """Bars on one time axis, as wide as there is room."""

    bars: Sequence[Bar]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, options.max_width - _BESIDE_BARS)
        span_ms = max((bar.end_ms for bar in self.bars), default=0.0)
        table = _bars_table(axis_cells(span_ms, width))
        group = ""
        for bar in self.bars:
            named = "" if bar.group == group else bar.group
            group = bar.group
            table.add_row(
                *((named, Text(bar.name, "dim")) if group else (bar.name, "")),
                Text(bar_cells(bar, span_ms, width), _STYLES[bar.style]),
                Text(f"{bar.start_ms:,.0f}", "dim"),
                f"{bar.length_ms:,.1f}",
            )
        yield table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(40, options.max_width)


_BESIDE_BARS = 42  # cells of the other columns


def _bars_table(axis: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(width=9, no_wrap=True)
    table.add_column(width=7, no_wrap=True)
    table.add_column(Text(axis), width=len(axis), no_wrap=True)
    table.add_column("at ms", justify="right", width=9, no_wrap=True)
    table.add_column("ms", justify="right", width=10, no_wrap=True)
    return table


def strip(
    candidates: Sequence[CandidateTrace],
    ends: tuple[float, float],
    answer_id: int | None,
    width: int,
) -> Text:
    """Rewards as marks between `ends`; of several in a cell the weightiest shows."""
    cells: dict[int, tuple[int, tuple[str, str]]] = {}
    for each in candidates:
        is_answer = each.id == answer_id
        weight = len(_MARKS) if is_answer else list(_MARKS).index(each.fate)
        mark = _ANSWER if is_answer else _MARKS[each.fate]
        cell = reward_cell(each.score, ends, width)
        cells[cell] = max(cells.get(cell, (-1, mark)), (weight, mark))
    text = Text()
    for cell in range(width):
        text.append(*(cells[cell][1] if cell in cells else ("·", "dim")))
    return text


def reward_cell(score: float, ends: tuple[float, float], width: int) -> int:
    """Where a reward is on the strip; in the middle where all are equal."""
    low, high = ends
    if high <= low:
        return width // 2
    return min(width - 1, int((score - low) / (high - low) * width))


@dataclass(frozen=True, slots=True)
class _Rounds:
    """A line per round, with its candidates' rewards on one axis for all rounds."""

    record: RequestRecord

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least, most = _STRIP_CELLS
        rows = [_round_texts(done.trace) for done in self.record.rounds]
        beside = sum(
            max(len(name), *(len(row[column]) for row in rows)) + 2
            for column, name in enumerate(_COLUMNS)
        )
        width = max(least, min(most, options.max_width - beside))
        scores = [each.score for done in self.record.rounds for each in done.trace.candidates]
        ends = min(scores, default=0.0), max(scores, default=0.0)
        answer_id = self.record.answer_id if self.record.source else None
        table = _rounds_table(ends, width)
        for done, texts in zip(self.record.rounds, rows, strict=True):
            table.add_row(*texts, strip(done.trace.candidates, ends, answer_id, width))
        yield table


_COLUMNS = ("round", "token", "alive", "alpha", "slots", "tokens")


def _rounds_table(ends: tuple[float, float], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    low, high = f"{ends[0]:.3f}", f"{ends[1]:.3f}"
    between = "rewards".center(max(0, width - len(low) - len(high)))
    table.add_column(f"{low}{between}{high}", width=width, no_wrap=True)
    return table


def _round_texts(trace: RoundTrace) -> tuple[str, ...]:
    freed = f" {_MINUS}{trace.freed_slots:,}" if trace.freed_slots else ""
    return (
        str(trace.number),
        str(trace.decision_token),
        f"{trace.num_started}→{trace.num_live}",
        f"{trace.alpha:g}",
        f"{trace.session_slots:,}{freed}",
        f"{trace.generated_tokens:,}",
    )


def title(record: RequestRecord) -> str:
    """What was asked, and how it ended."""
    took = f"{record.elapsed_ms / 1000:,.3f} s"
    state = f"{record.outcome} in {took}" if record.outcome else f"running, for {took} so far"
    source = f", {_SOURCES[record.source]}" if record.source else ""
    arrived = datetime.fromtimestamp(record.started_unix_s).astimezone()
    return f"{record.request_id}  {arrived:%Y-%m-%d %H:%M:%S}  {state}{source}"


def asked(record: RequestRecord) -> str:
    """What the caller chose."""
    chosen = record.selection
    rewards = "+".join(
        reward.name if reward.weight == 1 else f"{reward.weight:g}*{reward.name}"
        for reward in chosen.rewards
    )
    n = f"{record.n or chosen.n or 'as many as fit'} candidates"
    prompt = f", prompt of {record.prompt_tokens} tokens" if record.prompt_tokens else ""
    algorithm = f"{chosen.algorithm.value} by {rewards}"
    return f"{n}, at most {record.max_tokens} tokens each{prompt}, {algorithm}"


def time_totals(record: RequestRecord) -> str:
    """What the rounds' time went into."""
    parts = []
    for name in ("extend", "score", "prune"):
        spent = sum(getattr(each.trace, f"{name}_ms") for each in record.rounds)
        parts.append(f"{name} {spent:,.1f} ms")
    return f"{len(record.rounds)} rounds: {', '.join(parts)}"


def cost(record: RequestRecord) -> str:
    """What the answer is worth and what it took; empty where there is none."""
    usage = record.usage
    if usage is None:
        return ""
    made = f"{usage.generated_tokens:,} tokens made"
    compared = f"best-of-{record.n} about {usage.best_of_n_tokens_estimate:,}"
    flags = [degradation.value for degradation in record.degradations]
    flags += ["hurried"] if record.hurried else []
    noted = f"  [{', '.join(flags)}]" if flags else ""
    read = f"{usage.reward_tokens:,} read by rewards"
    return f"reward {record.score:.3f}, {made}, {compared}, {read}{noted}"


def drawing(record: RequestRecord) -> RenderableType:
    """The whole picture."""
    parts: list[RenderableType] = [
        Text(title(record), "bold"),
        Text(asked(record), "dim"),
        Text(),
        _Bars(request_bars(record)),
    ]
    if record.rounds and record.source not in (None, AnswerSource.RUN):
        parts += [
            Text(),
            Text("the run that made it", "dim"),
            _Bars([bar for bar in rounds_bars(record.rounds) if bar.length_ms > 0]),
        ]
    if record.rounds:
        parts += [Text(), _Rounds(record), _legend()]
    ending = f"{time_totals(record)}\n{cost(record)}".rstrip()
    return Group(*parts, Text(), Text(ending, "dim"))


def _legend() -> Text:
    text = Text(style="dim")
    for fate, (mark, style) in _MARKS.items():
        text.append(mark, style).append(f" {fate.value}  ")
    return text.append(*_ANSWER).append(" the answer")
