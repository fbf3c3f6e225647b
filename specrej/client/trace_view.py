"""Draw the record of one request: its phases as a waterfall, its rounds with their rewards.

Pure functions from a record to rich renderables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.bar import Bar as BlockBar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specrej.client.plain_view import MINUS, cost, parameters, time_totals, title
from specrej.contracts import (
    AnswerSource,
    CandidateTrace,
    Fate,
    RecordedRound,
    RequestRecord,
)

_LEAST_SPAN_MS = 1e-3  # of a time axis
_LEAST_SHARE = 0.01  # of a time axis, for a bar
_STRIP_CELLS = 32

_COLORS = {
    "before": "bright_black",
    "wait": "blue",
    "extend": "green",
    "score": "yellow",
    "prune": "magenta",
    "going on": "cyan",
}
# Of several in one cell, the last in this order is shown.
_MARKS = {
    Fate.REJECTED: ("○", "red"),
    Fate.VETOED: ("✗", "magenta"),
    Fate.KEPT: ("●", "green"),
    Fate.FINISHED: ("◆", "cyan"),
}
_ANSWER = ("★", "bold yellow")


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase: its group, name, milliseconds since arrival, length and style."""

    group: str
    name: str
    start_ms: float
    length_ms: float
    style: str

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.length_ms


def request_bars(record: RequestRecord) -> list[Bar]:
    """The phases of the request, in order and without gaps."""
    if record.source not in (None, AnswerSource.RUN):
        name = "look up" if record.source is AnswerSource.CACHE else "wait for it"
        return [Bar("", name, 0.0, record.elapsed_ms, "wait")]
    bars = [*_waits(record), *rounds_bars(record.rounds)]
    at_ms = bars[-1].end_ms if bars else 0.0
    if record.elapsed_ms > at_ms:
        bars.append(_last(record, at_ms))
    return [bar for bar in bars if bar.length_ms > 0]


def _waits(record: RequestRecord) -> Iterator[Bar]:
    """The ended phases before the first round."""
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
    for recorded in rounds:
        group, at_ms = f"round {recorded.trace.number}", recorded.start_ms
        for name in ("extend", "score", "prune"):
            length_ms: float = getattr(recorded.trace, f"{name}_ms")
            yield Bar(group, name, at_ms, length_ms, name)
            at_ms += length_ms


def _last(record: RequestRecord, at_ms: float) -> Bar:
    """The running phase, or the one in which the request ended."""
    length_ms = record.elapsed_ms - at_ms
    if record.outcome == "OK":
        return Bar("", "answer", at_ms, length_ms, "before")
    if record.opened_at_ms is not None:
        return Bar(f"round {len(record.rounds) + 1}", "", at_ms, length_ms, "going on")
    waits = (("look up", record.queued_at_ms), ("queue", record.running_at_ms), ("open", None))
    name = next(name for name, ended in waits if ended is None)
    return Bar("", name, at_ms, length_ms, "going on")


def waterfall(bars: Sequence[Bar]) -> Table:
    """Bars on one time axis, as wide as the console."""
    span_ms = max([bar.end_ms for bar in bars] + [_LEAST_SPAN_MS])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(f"0 to {span_ms:,.1f} ms", ratio=1, min_width=10)
    table.add_column("at ms", style="dim", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    group = ""
    for bar in bars:
        named = "" if bar.group == group else bar.group
        group = bar.group
        table.add_row(
            *((named, bar.name) if group else (bar.name, "")),
            _visible(bar, span_ms),
            f"{bar.start_ms:,.0f}",
            f"{bar.length_ms:,.1f}",
        )
    return table


def _visible(bar: Bar, span_ms: float) -> BlockBar:
    """At least `_LEAST_SHARE` of the axis."""
    least_ms = span_ms * _LEAST_SHARE
    start_ms = min(bar.start_ms, span_ms - least_ms)
    end_ms = max(bar.end_ms, start_ms + least_ms)
    return BlockBar(span_ms, start_ms, end_ms, color=_COLORS[bar.style])


def strip(
    candidates: Sequence[CandidateTrace], ends: tuple[float, float], answer_id: int | None
) -> Text:
    """Rewards as marks between `ends`; of several in a cell the highest in `_MARKS` is shown."""
    cells: dict[int, tuple[int, tuple[str, str]]] = {}
    for candidate in candidates:
        is_answer = candidate.id == answer_id
        weight = len(_MARKS) if is_answer else list(_MARKS).index(candidate.fate)
        mark = _ANSWER if is_answer else _MARKS[candidate.fate]
        cell = reward_cell(candidate.score, ends)
        cells[cell] = max(cells.get(cell, (-1, mark)), (weight, mark))
    text = Text()
    for cell in range(_STRIP_CELLS):
        text.append(*(cells[cell][1] if cell in cells else ("·", "dim")))
    return text


def reward_cell(score: float, ends: tuple[float, float]) -> int:
    """The cell of a reward on the strip; the middle one without a finite span above 0."""
    low, high = ends
    if not 0 < high - low < math.inf:
        return _STRIP_CELLS // 2
    return min(_STRIP_CELLS - 1, int((score - low) / (high - low) * _STRIP_CELLS))


def rounds_table(record: RequestRecord) -> Table:
    """A line per round, with its candidates' rewards on one axis for all rounds."""
    scores = [candidate.score for done in record.rounds for candidate in done.trace.candidates]
    ends = min(scores, default=0.0), max(scores, default=0.0)
    answer_id = record.answer_id if record.source else None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("round", "token", "live", "alpha", "slots", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    low, high = f"{ends[0]:.3f}", f"{ends[1]:.3f}"
    between = "rewards".center(max(0, _STRIP_CELLS - len(low) - len(high)))
    table.add_column(f"{low}{between}{high}", width=_STRIP_CELLS, no_wrap=True)
    for done in record.rounds:
        trace = done.trace
        freed = f" {MINUS}{trace.freed_slots:,}" if trace.freed_slots else ""
        table.add_row(
            str(trace.number),
            str(trace.decision_token),
            f"{trace.num_started}→{trace.num_live}",
            f"{trace.alpha:g}",
            f"{trace.session_slots:,}{freed}",
            f"{trace.generated_tokens:,}",
            strip(trace.candidates, ends, answer_id),
        )
    return table


def drawing(record: RequestRecord) -> RenderableType:
    parts: list[RenderableType] = [
        Text(title(record), "bold"),
        Text(parameters(record), "dim"),
        Text(),
        waterfall(request_bars(record)),
    ]
    if record.rounds and record.source not in (None, AnswerSource.RUN):
        parts += [
            Text(),
            Text("the request that generated it", "dim"),
            waterfall([bar for bar in rounds_bars(record.rounds) if bar.length_ms > 0]),
        ]
    if record.rounds:
        parts += [Text(), rounds_table(record), _legend()]
    ending = f"{time_totals(record)}\n{cost(record)}".rstrip()
    return Group(*parts, Text(), Text(ending, "dim"))


def _legend() -> Text:
    text = Text(style="dim")
    for fate, (mark, style) in _MARKS.items():
        text.append(mark, style).append(f" {fate.value}  ")
    return text.append(*_ANSWER).append(" the answer")
