"""A request as lines of text: its rounds, its answer, and what a description or record has."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from specrej import contracts as c

BAR_CELLS = 16
MINUS = "\N{MINUS SIGN}"
_MAX_VOTES, _VOTE_CHARACTERS = 8, 40
_STOPS = {
    c.StopReason.SCORE: "ended early: an answer reached stop_at",
    c.StopReason.FIRST: "ended early: enough answers were complete",
    c.StopReason.VOTE: "ended early: the leading answer of the vote was safe",
}


def plain_line(trace: c.RoundTrace, n: int) -> str:
    """A round of a request with `n` candidates in one line."""
    forks = f" ({len(trace.forks)} forks)" if trace.forks else ""
    vetoed = f" ({trace.num_vetoed} vetoed)" if trace.num_vetoed else ""
    freed = f" ({MINUS}{trace.freed_slots:,})" if trace.freed_slots else ""
    wave = f" (wave {trace.wave})" if trace.wave > 1 else ""
    check = " (check)" if trace.is_check else ""
    speed = 1000 * trace.generated_tokens / trace.extend_ms if trace.extend_ms else 0.0
    cells = {
        "round": f"{trace.number}{wave}{check}",
        "candidates": survivors_bar(trace, n),
        "token": str(trace.decision_token),
        "live": f"{trace.num_started}→{trace.num_live}{forks}{vetoed}",
        "finished": str(trace.num_finished or ""),
        "best": f"{trace.best_score:.3f}",
        "slots": f"{trace.session_slots:,}{freed}",
        "tok/s": f"{speed:,.0f}",
    }
    return "  ".join(f"{name} {value}" for name, value in cells.items() if value)


def survivors_bar(trace: c.RoundTrace, n: int) -> str:
    """A bar of `n` candidates: live, finished or lost in this round, gone before.

    At least one cell is live, and one finished, if a candidate is and there is room.
    """
    total = max(n, trace.num_started, 1)
    live = _bar_cells(trace.num_live, total)
    finished = min(BAR_CELLS - live, _bar_cells(trace.num_finished, total))
    lost = max(0, _bar_cells(trace.num_started, total) - live - finished)
    ended = "◆" * finished + "▒" * lost
    return "█" * live + ended + "░" * (BAR_CELLS - live - len(ended))


def _bar_cells(candidates: int, total: int) -> int:
    least = int(candidates > 0)
    return max(least, min(BAR_CELLS, round(BAR_CELLS * candidates / total)))


def summary_line(generation: c.Generation) -> str:
    """What an answer cost, in one line."""
    flags = [
        name for name in ("cached", "degraded", "hurried", "reduced") if getattr(generation, name)
    ]
    usage, seconds = generation.usage, generation.timings.total_ms / 1000
    noted = f" [{', '.join(flags)}]" if flags else ""
    compared = f"best-of-{generation.n} about {usage.best_of_n_tokens_estimate:,}"
    made = f"{usage.generated_tokens:,} tokens made, {compared}{saved_text(usage)}"
    return f"reward {generation.best.score:.3f}{noted}, {made}, {seconds:.1f} s"


def result_lines(generation: c.Generation) -> Iterator[str]:
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


def saved_text(usage: c.Usage) -> str:
    """The share of Best-of-N's tokens that were not made, such as " (-61%)"; may be empty."""
    estimate = usage.best_of_n_tokens_estimate
    if not 0 <= usage.generated_tokens < estimate:
        return ""
    return f" ({MINUS}{1 - usage.generated_tokens / estimate:.0%})"


async def follow(
    events: AsyncGenerator[c.Event, None], write: Callable[[str], object]
) -> c.Generation:
    """Write a line per round and some for the answer; returns the answer.

    Leaving early closes the stream, which cancels the request.
    """
    n = 0
    async with aclosing(events):
        async for event in events:
            match event:
                case c.Admitted():
                    n = event.n
                case c.RoundCompleted():
                    write(plain_line(event.trace, n))
                case c.Finished():
                    answer = event.generation
                    for line in result_lines(answer):
                        write(line)
    return answer


def fact_lines(plain: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What a description or a record has, in a line for each field that is not empty."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from fact_lines(value, f"{path}{name}.")
        elif value not in (None, "", []):
            yield f"{path}{name}: {value if isinstance(value, str) else json.dumps(value)}"
