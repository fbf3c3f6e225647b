"""The growth of a session's live candidates, to a decision token and while prefixes are scored.

Draws are keyed, so a survivor that has grown ahead has the tokens that it would have drawn later.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TypeVar

from orchestrator.loop.deadline import DeadlineController
from specrej.contracts import Round, RoundEnd, Session
from specrej.contracts.errors import InternalError, SpecrejError

T = TypeVar("T")

# Scores that arrive within so many seconds are awaited without growing.
_SOON_S = 0.005
# A stride ahead takes about this part of the time that the last scores took: the cut waits for it.
_AHEAD_PART = 0.1


class OutOfTime(Exception):
    """The generator's answer did not arrive before the deadline."""


async def in_time(answer: Awaitable[T], patience_s: float | None) -> T:
    """What the generator answers within `patience_s` seconds; None: no limit.

    Raises:
        OutOfTime: it has not answered until then.
    """
    try:
        async with asyncio.timeout(patience_s):
            return await answer
    except TimeoutError:
        raise OutOfTime from None


class Growth:
    """Extends one session; `ahead` is what candidates grew since the last decision token."""

    def __init__(
        self, session: Session, deadline: DeadlineController, clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._deadline = deadline
        self._clock = clock
        self._ahead: Round | None = None
        self._failure: OutOfTime | SpecrejError | None = None  # of the next call
        self._score_s = 0.0  # of the last scores awaited
        self._last_end = -1  # tokens at the end of the last stride
        self.is_broken = False  # whether a failure ended the round before its decision token

    async def extend(
        self,
        position: int,
        until: int,
        rows: int,
        most_tokens: int = sys.maxsize,
        on_stride: Callable[[Round], None] = lambda whole: None,
    ) -> Round:
        """Grow `rows` candidates from `position` to `until` tokens, in strides short enough to
        notice a near deadline, and of `most_tokens`; `on_stride` receives the round so far.

        A stride that fails ends the round, and the next call raises its error.

        Raises:
            OutOfTime: the deadline passed during a round's first stride.
        """
        whole, self._ahead = self._ahead, None
        if self._failure:
            if whole:
                self.is_broken = True
                return whole
            raise self._failure
        if whole:
            position, rows = whole.num_tokens, rows - _num_ended(whole)
            if not rows:  # rejected ones may have grown further
                longest = max(candidate.num_tokens for candidate in whole.candidates)
                whole = replace(whole, ended_by=RoundEnd.ALL_FINISHED, num_tokens=longest)
                on_stride(whole)
                return whole
        while True:
            stride = min(most_tokens, self._deadline.stride_tokens(position, until, rows))
            # No further than `until`: a part whose slots are full lags behind `position`.
            try:
                part = await self._stride(position, min(position + stride, until), rows)
            except (OutOfTime, SpecrejError) as error:
                if not whole:
                    raise
                self._failure, self.is_broken = error, True
                return whole
            whole = _joined(whole, part) if whole else part
            on_stride(whole)
            position, rows = part.num_tokens, rows - _num_ended(part)
            if part.ended_by is not RoundEnd.DECISION_TOKEN or position >= until or not rows:
                return whole
            if self._deadline.is_over or self._deadline.must_cut(position, until, rows):
                self._deadline.hurried = True
                return whole

    async def while_waiting(self, scores: Awaitable[T], position: int, until: int, rows: int) -> T:
        """The scores; meanwhile `rows` candidates grow from `position` on, to below `until`.

        A stride that fails ends the growth, but its error is raised only by the next `extend`, so
        that the scores can still be used.
        """
        began, awaited = self._clock(), asyncio.ensure_future(scores)
        try:
            await asyncio.wait({awaited}, timeout=_SOON_S)
            while not (awaited.done() or self._failure) and position < until - 1 and rows:
                steps = _AHEAD_PART * self._score_s / max(self._deadline.step_s(rows), 1e-9)
                stride = max(1, min(int(steps), until - 1 - position))
                try:
                    part = await self._stride(position, position + stride, rows)
                except (OutOfTime, SpecrejError) as error:
                    self._failure = error
                    break
                self._ahead = _joined(self._ahead, part) if self._ahead else part
                position, rows = part.num_tokens, rows - _num_ended(part)
                if part.ended_by is not RoundEnd.DECISION_TOKEN:
                    break
            result = await awaited
            self._score_s = self._clock() - began
            return result
        finally:
            awaited.cancel()
            await asyncio.gather(awaited, return_exceptions=True)

    @property
    def lost(self) -> frozenset[int]:
        """Candidates that were lost with their generator while they grew ahead."""
        return frozenset(self._ahead.lost if self._ahead else ())

    def fail(self, error: OutOfTime | SpecrejError) -> None:
        """Let the next `extend` raise this error."""
        self._failure = error

    def discard(self, live: Collection[int]) -> int:
        """Drop what candidates that are not `live` any more grew ahead; returns their tokens."""
        if not self._ahead:
            return 0
        ahead, grown = self._ahead, self._ahead.candidates
        dropped = [c for c in grown if c.id not in live]
        num_tokens = sum(len(c.new_token_ids) for c in dropped)
        self._deadline.num_discarded += sum(c.finish is not None for c in dropped)
        if not live:
            self._ahead = None
            return num_tokens + ahead.repeated_tokens  # otherwise the next round counts them
        self._ahead = replace(
            ahead,
            candidates=tuple(c for c in grown if c.id in live),
            lost=tuple(number for number in ahead.lost if number in live),
        )
        return num_tokens

    async def _stride(self, position: int, until: int, rows: int) -> Round:
        began = self._clock()
        part = await in_time(self._session.extend(until), self._deadline.patience_s)
        # Without these, strides that make no token would follow each other for ever.
        most_tokens = self._deadline.max_tokens
        if part.ended_by is RoundEnd.DECISION_TOKEN and part.num_tokens != until:
            raise InternalError(f"a generator ended at token {part.num_tokens} instead of {until}")
        is_over = until >= most_tokens and part.ended_by is RoundEnd.DECISION_TOKEN
        live = [c.num_tokens for c in part.candidates if c.finish is None]
        if live and (is_over or max(live) >= most_tokens):
            raise InternalError("a generator goes on at max_tokens")
        if live and part.ended_by is RoundEnd.ALL_FINISHED:
            raise InternalError("a generator reports ALL_FINISHED with live candidates")
        is_full = part.ended_by is RoundEnd.SLOTS_FULL
        if is_full and rows == 1 and part.num_tokens == self._last_end:
            raise InternalError("a generator has no slot for the last candidate")
        self._last_end = part.num_tokens
        # A part of a split session that lags behind may end below `position`.
        grown, seconds = max(0, part.num_tokens - position), self._clock() - began
        # A move to another generator took part of the time, which is no measure of a step.
        has_moved = part.repeated_tokens > 0
        self._deadline.note_stride(rows, grown, _num_ended(part), seconds, is_typical=not has_moved)
        return part


def _num_ended(part: Round) -> int:
    return sum(candidate.finish is not None for candidate in part.candidates)


def _joined(first: Round, second: Round) -> Round:
    """Two strides as one round, without candidates that were lost in the second."""
    lost = {*second.lost}
    unused = sum(len(c.new_token_ids) for c in first.candidates if c.id in lost)
    candidates = {c.id: c for c in first.candidates if c.id not in lost}
    for later in second.candidates:
        before = candidates.get(later.id)
        if before:
            later = replace(
                later,
                new_token_ids=before.new_token_ids + later.new_token_ids,
                new_logprobs=before.new_logprobs + later.new_logprobs,
                new_top_token_ids=before.new_top_token_ids + later.new_top_token_ids,
                new_top_logprobs=before.new_top_logprobs + later.new_top_logprobs,
            )
        candidates[later.id] = later
    return replace(
        second,
        candidates=tuple(candidates[number] for number in sorted(candidates)),
        repeated_tokens=first.repeated_tokens + second.repeated_tokens + unused,
        lost=first.lost + second.lost,
        made_by=first.made_by | second.made_by,
        token_texts=tuple(dict.fromkeys(first.token_texts + second.token_texts)),
    )
