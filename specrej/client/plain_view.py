"""A request in plain text: a line per round, what an answer cost, and how a recorded request went.

Pure functions; the tables of `rounds_view` and `trace_view`, which need rich, use them, too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from datetime import datetime
from typing import NamedTuple

from specrej.contracts import (
    Admitted,
    Algorithm,
    AnswerSource,
    Event,
    Finished,
    Generation,
    RequestRecord,
    RoundCompleted,
    RoundTrace,
)

BAR_CELLS = 16
MINUS = "\N{MINUS SIGN}"
_SOURCES = {
    AnswerSource.RUN: "generated for this request",
    AnswerSource.CACHE: "from the cache",
    AnswerSource.FLIGHT: "generated for an equal, concurrent request",
}


class RoundTexts(NamedTuple):
    """One round in words, for a table's cells or a line."""

    number: str
    token: str  # the decision token
    live: str  # candidates before and after
    finished: str  # candidates that finished in it
    best: str  # the best reward so far
    slots: str  # slots in use at the decision token, and what the cut freed
    speed: str


def round_texts(trace: RoundTrace) -> RoundTexts:
    """A round's numbers as they are shown."""
    freed = f" ({MINUS}{trace.freed_slots:,})" if trace.freed_slots else ""
    forks = f" ({len(trace.forks)} forks)" if trace.forks else ""
    vetoed = f" ({trace.num_vetoed} vetoed)" if trace.num_vetoed else ""
    return RoundTexts(
        number=str(trace.number),
        token=str(trace.decision_token),
        live=f"{trace.num_started}→{trace.num_live}{forks}{vetoed}",
        finished=str(trace.num_finished or ""),
        best=f"{trace.best_score:.3f}",
        slots=f"{trace.session_slots:,}{freed}",
        speed=f"{tokens_per_s(trace):,.0f} tok/s",
    )


def tokens_per_s(trace: RoundTrace) -> float:
    """Tokens of all candidates per second of the round's extend."""
    return 1000 * trace.generated_tokens / trace.extend_ms if trace.extend_ms else 0.0


def survivors_bar(trace: RoundTrace, n: int) -> tuple[str, str, str]:
    """A bar of `n` candidates in three parts: live, lost or finished in this round, gone before.

    At least one cell is live if a candidate is, however many there were.
    """
    total = max(n, trace.num_started, 1)
    live = _cells(trace.num_live, total)
    started = max(live, _cells(trace.num_started, total))
    return "█" * live, "▒" * (started - live), "░" * (BAR_CELLS - started)


def plain_line(trace: RoundTrace, n: int) -> str:
    texts = round_texts(trace)
    finished = f"  finished {texts.finished}" if texts.finished else ""
    return (
        f"round {texts.number}  {''.join(survivors_bar(trace, n))}  token {texts.token}"
        f"  live {texts.live}{finished}  best {texts.best}  slots {texts.slots}  {texts.speed}"
    )


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
    """The share of Best-of-N's tokens that were not made, such as " (-61%)"; may be empty."""
    usage = generation.usage
    if usage.best_of_n_tokens_estimate <= usage.generated_tokens:
        return ""
    saved = 1 - usage.generated_tokens / usage.best_of_n_tokens_estimate
    return f" ({MINUS}{saved:.0%})"


async def follow(events: AsyncGenerator[Event, None], write: Callable[[str], object]) -> Generation:
    """Write a line per round and one for the answer; returns the answer.

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
                    write(summary_line(answer))
    if answer is None:
        raise RuntimeError("the stream ended without an answer")
    return answer


def title(record: RequestRecord) -> str:
    """The request's id, time, outcome and source."""
    took = f"{record.elapsed_ms / 1000:,.3f} s"
    state = f"{record.outcome} in {took}" if record.outcome else f"running, for {took} so far"
    source = f", {_SOURCES[record.source]}" if record.source else ""
    arrived = datetime.fromtimestamp(record.started_unix_s).astimezone()
    return f"{record.request_id}  {arrived:%Y-%m-%d %H:%M:%S}  {state}{source}"


def parameters(record: RequestRecord) -> str:
    chosen = record.selection
    rewards = "+".join(
        reward.name if reward.weight == 1 else f"{reward.weight:g}*{reward.name}"
        for reward in chosen.rewards
    )
    n = f"{record.n or chosen.n or 'as many as fit'} candidates"
    prompt = f", prompt of {record.prompt_tokens} tokens" if record.prompt_tokens else ""
    is_whole = chosen.algorithm is Algorithm.BEST_OF_N
    algorithm = f"{chosen.algorithm.value}{', no early rejection,' * is_whole} by {rewards}"
    return f"{n}, at most {record.max_tokens} tokens each{prompt}, {algorithm}"


def time_totals(record: RequestRecord) -> str:
    """The total time of each phase of the rounds."""
    parts = []
    for name in ("extend", "score", "prune"):
        spent = sum(getattr(recorded.trace, f"{name}_ms") for recorded in record.rounds)
        parts.append(f"{name} {spent:,.1f} ms")
    return f"{len(record.rounds)} rounds: {', '.join(parts)}"


def cost(record: RequestRecord) -> str:
    """The answer's reward and cost; empty without an answer."""
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


def record_lines(record: RequestRecord) -> Iterator[str]:
    """A record without its candidates: parameters, a line per round, totals."""
    yield title(record)
    yield parameters(record)
    for done in record.rounds:
        yield plain_line(done.trace, record.n)
    yield time_totals(record)
    if answered := cost(record):
        yield answered


def _cells(candidates: int, total: int) -> int:
    return max(round(BAR_CELLS * candidates / total), int(candidates > 0))
