"""A request as text: its rounds while it runs, and its record afterwards, drawn in the same way.

Lines need the standard library alone; `watch` and `drawing` draw the rounds as a table with rich.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING

from specrej.contracts import (
    Admitted,
    Algorithm,
    AnswerSource,
    CandidateTrace,
    Event,
    Fate,
    Finished,
    Generation,
    RequestRecord,
    RoundCompleted,
    RoundTrace,
    StopReason,
    Usage,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

BAR_CELLS = 16
STRIP_CELLS = 32
MINUS = "\N{MINUS SIGN}"
_PREVIEW_CHARACTERS = 160
_MAX_VOTES, _VOTE_CHARACTERS = 8, 40
_STOPS = {
    StopReason.SCORE: "ended early: an answer reached stop_at",
    StopReason.FIRST: "ended early: enough answers were complete",
    StopReason.VOTE: "ended early: the leading answer of the vote was safe",
}
_SOURCES = {
    AnswerSource.RUN: "generated for this request",
    AnswerSource.CACHE: "from the cache",
    AnswerSource.FLIGHT: "generated for an equal, concurrent request",
}
# Of several candidates in one cell of a strip, the last in this order is shown.
_MARKS = {Fate.REJECTED: "○", Fate.VETOED: "✗", Fate.KEPT: "●", Fate.FINISHED: "◆"}
_ANSWER = "★"


def cells(trace: RoundTrace, n: int) -> dict[str, str]:
    """The columns of a round of a request with `n` candidates, by their headings."""
    forks = f" ({len(trace.forks)} forks)" if trace.forks else ""
    vetoed = f" ({trace.num_vetoed} vetoed)" if trace.num_vetoed else ""
    freed = f" ({MINUS}{trace.freed_slots:,})" if trace.freed_slots else ""
    wave = f" (wave {trace.wave})" if trace.wave > 1 else ""
    check = " (check)" if trace.is_check else ""
    speed = 1000 * trace.generated_tokens / trace.extend_ms if trace.extend_ms else 0.0
    return {
        "round": f"{trace.number}{wave}{check}",
        "candidates": survivors_bar(trace, n),
        "token": str(trace.decision_token),
        "live": f"{trace.num_started}→{trace.num_live}{forks}{vetoed}",
        "finished": str(trace.num_finished or ""),
        "best": f"{trace.best_score:.3f}",
        "slots": f"{trace.session_slots:,}{freed}",
        "tok/s": f"{speed:,.0f}",
    }


def survivors_bar(trace: RoundTrace, n: int) -> str:
    """A bar of `n` candidates: live, finished or lost in this round, gone before.

    At least one cell is live, and one finished, if a candidate is and there is room.
    """
    total = max(n, trace.num_started, 1)
    live = _bar_cells(trace.num_live, total)
    finished = min(BAR_CELLS - live, _bar_cells(trace.num_finished, total))
    lost = max(0, _bar_cells(trace.num_started, total) - live - finished)
    ended = _MARKS[Fate.FINISHED] * finished + "▒" * lost
    return "█" * live + ended + "░" * (BAR_CELLS - live - len(ended))


def _bar_cells(candidates: int, total: int) -> int:
    least = int(candidates > 0)
    return max(least, min(BAR_CELLS, round(BAR_CELLS * candidates / total)))


def plain_line(trace: RoundTrace, n: int) -> str:
    """A round in one line."""
    named = (f"{name} {value}" for name, value in cells(trace, n).items() if value)
    return "  ".join(named)


def summary_line(generation: Generation) -> str:
    """What an answer cost, in one line."""
    flags = [
        name for name in ("cached", "degraded", "hurried", "reduced") if getattr(generation, name)
    ]
    seconds = generation.timings.total_ms / 1000
    return f"{_cost(generation.best.score, generation.usage, generation.n, flags)}, {seconds:.1f} s"


def result_lines(generation: Generation) -> Iterator[str]:
    """`summary_line`, why it ended early, and the votes as bars."""
    yield summary_line(generation)
    begun = generation.num_begun
    if generation.stopped_by:
        of = f"; {begun} of {generation.n} candidates began" if begun < generation.n else ""
        yield f"{_STOPS[generation.stopped_by]}{of}"
    shown = generation.votes[:_MAX_VOTES]
    width = max((len(_vote(vote.answer)) for vote in shown), default=0)
    for vote in shown:
        bar = "█" * max(1, round(BAR_CELLS * vote.share))
        yield f"{_vote(vote.answer):<{width}}  {bar:<{BAR_CELLS}} {vote.share:4.0%}  {vote.count}"
    if (more := generation.num_distinct - len(shown)) > 0 and shown:
        yield f"and {more} other answers"


def _vote(answer: str) -> str:
    """An answer of a vote in one line."""
    text = "".join(char if char.isprintable() else " " for char in answer)
    return text if len(text) <= _VOTE_CHARACTERS else f"{text[: _VOTE_CHARACTERS - 1]}…"


def _cost(score: float, usage: Usage, n: int, flags: Sequence[str]) -> str:
    compared = f"best-of-{n} about {usage.best_of_n_tokens_estimate:,}{saved_text(usage)}"
    noted = f" [{', '.join(flags)}]" if flags else ""
    return f"reward {score:.3f}{noted}, {usage.generated_tokens:,} tokens made, {compared}"


def saved_text(usage: Usage) -> str:
    """The share of Best-of-N's tokens that were not made, such as " (-61%)"; may be empty."""
    estimate = usage.best_of_n_tokens_estimate
    if not 0 <= usage.generated_tokens < estimate:
        return ""
    return f" ({MINUS}{1 - usage.generated_tokens / estimate:.0%})"


async def follow(events: AsyncGenerator[Event, None], write: Callable[[str], object]) -> Generation:
    """Write a line per round and some for the answer; returns the answer.

    Leaving early closes the stream, which cancels the request.
    """
    n, answer = 0, None
    async with aclosing(events):
        async for event in events:
            match event:
                case Admitted():
                    n = event.n
                case RoundCompleted():
                    write(plain_line(event.trace, n))
                case Finished():
                    answer = event.generation
                    for line in result_lines(answer):
                        write(line)
    if answer is None:
        raise RuntimeError("the stream ended without an answer")
    return answer


async def watch(events: AsyncGenerator[Event, None], console: Console) -> Generation:
    """`follow`, with a table that grows in place if the console is a terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    if not console.is_terminal:
        return await follow(
            events, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
        )
    n, traces, answer = 0, list[RoundTrace](), None
    async with aclosing(events):
        with Live(Text("waiting for room", "dim"), console=console, refresh_per_second=8) as live:
            async for event in events:
                match event:
                    case Admitted():
                        traces.clear()
                        n, head = event.n, f"{event.n} candidates, request {event.request_id}"
                        live.update(Text(head, "dim"))
                    case RoundCompleted():
                        traces.append(event.trace)
                        preview = " ".join(event.best_text.split())[:_PREVIEW_CHARACTERS]
                        live.update(Group(rounds_table(traces, n), Text(preview, "italic dim")))
                    case Finished():
                        answer = event.generation
                        # A cached answer had no events: show the rounds of the run that made it.
                        table = rounds_table(answer.rounds, answer.n, answer.best.id)
                        lines = "\n".join(result_lines(answer))
                        live.update(Group(table, Text(lines, "dim")))
    if answer is None:
        raise RuntimeError("the stream ended without an answer")
    return answer


def rounds_table(traces: Sequence[RoundTrace], n: int, answer_id: int | None = None) -> Table:
    """A line per round, with its candidates' rewards on one axis for all rounds."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    scores = [candidate.score for trace in traces for candidate in trace.candidates]
    ends = min(scores, default=0.0), max(scores, default=0.0)
    low, high = f"{ends[0]:.3f}", f"{ends[1]:.3f}"
    for name in cells(traces[0], n) if traces else ():
        if name == "candidates":
            table.add_column(name, no_wrap=True, style="green")
        else:
            table.add_column(name, justify="right")
    if scores:
        rewards = "rewards".center(max(0, STRIP_CELLS - len(low) - len(high)))
        table.add_column(f"{low}{rewards}{high}", width=STRIP_CELLS, no_wrap=True)
    for trace in traces:
        strips = [strip(trace.candidates, ends, answer_id)] if scores else []
        table.add_row(*cells(trace, n).values(), *strips)
    return table


def strip(
    candidates: Sequence[CandidateTrace], ends: tuple[float, float], answer_id: int | None
) -> str:
    """Rewards as marks between `ends`; of several in a cell the answer or the last of `_MARKS`."""
    marks = [*_MARKS.values(), _ANSWER]
    shown = [-1] * STRIP_CELLS
    for candidate in candidates:
        mark = _ANSWER if candidate.id == answer_id else _MARKS[candidate.fate]
        cell = reward_cell(candidate.score, ends)
        shown[cell] = max(shown[cell], marks.index(mark))
    return "".join(marks[index] if index >= 0 else "·" for index in shown)


def reward_cell(score: float, ends: tuple[float, float]) -> int:
    """The cell of a reward on a strip; the middle one without a finite span above 0."""
    low, high = ends
    if not 0 < high - low < math.inf:
        return STRIP_CELLS // 2
    return min(STRIP_CELLS - 1, int((score - low) / (high - low) * STRIP_CELLS))


def record_lines(record: RequestRecord) -> Iterator[str]:
    """A record: what was requested, a line per round, its phases and its cost."""
    yield from _head(record)
    for recorded in record.rounds:
        yield plain_line(recorded.trace, record.n)
    yield from _foot(record)


def drawing(record: RequestRecord) -> RenderableType:
    """`record_lines` with the rounds as a table."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [*(Text(line, "dim") for line in _head(record))]
    if record.rounds:
        answer_id = record.answer_id if record.source else None
        parts.append(rounds_table([done.trace for done in record.rounds], record.n, answer_id))
        marks = (f"{mark} {fate.value}" for fate, mark in _MARKS.items())
        parts.append(Text("  ".join((*marks, f"{_ANSWER} the answer")), "dim"))
    return Group(*parts, *(Text(line, "dim") for line in _foot(record)))


def _head(record: RequestRecord) -> Iterator[str]:
    took = f"{record.elapsed_ms / 1000:,.3f} s"
    state = f"{record.outcome} in {took}" if record.outcome else f"running, for {took} so far"
    source = f", {_SOURCES[record.source]}" if record.source else ""
    arrived = datetime.fromtimestamp(record.started_unix_s).astimezone()
    yield f"{record.request_id}  {arrived:%Y-%m-%d %H:%M:%S}  {state}{source}"
    chosen = record.selection
    rewards = "+".join(
        reward.name if reward.weight == 1 else f"{reward.weight:g}*{reward.name}"
        for reward in chosen.rewards
    )
    n = f"{record.n or chosen.n or 'as many as fit'} candidates"
    prompt = f", prompt of {record.prompt_tokens} tokens" if record.prompt_tokens else ""
    is_whole = chosen.algorithm is Algorithm.BEST_OF_N
    algorithm = f"{chosen.algorithm.value}{', no early rejection,' * is_whole} by {rewards}"
    yield f"{n}, at most {record.max_tokens} tokens each{prompt}, {algorithm}"


def _foot(record: RequestRecord) -> Iterator[str]:
    waits: list[str] = []
    begun_ms = 0.0
    for name, ended_ms in (
        ("look up", record.queued_at_ms),
        ("queue", record.running_at_ms),
        ("open", record.opened_at_ms),
    ):
        if ended_ms is None:  # the phase in which the request is, ended, or was answered
            waits.append(f"{name} {record.elapsed_ms - begun_ms:,.1f} ms")
            break
        waits.append(f"{name} {ended_ms - begun_ms:,.1f} ms")
        begun_ms = ended_ms
    yield "; ".join(waits)
    spent = (
        f"{name} {sum(getattr(done.trace, f'{name}_ms') for done in record.rounds):,.1f} ms"
        for name in ("extend", "score", "prune")
    )
    if record.rounds:
        from_other = record.source not in (None, AnswerSource.RUN)
        of_run = " of the request that generated it" if from_other else ""
        yield f"{len(record.rounds)} rounds{of_run}: {', '.join(spent)}"
    if usage := record.usage:
        flags = [degradation.value for degradation in record.degradations]
        flags += ["hurried"] if record.hurried else []
        cost = _cost(record.score, usage, record.n, flags)
        yield f"{cost}, {usage.reward_tokens:,} read by rewards"
    if record.stopped_by:
        yield _STOPS[record.stopped_by]
