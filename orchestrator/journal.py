"""What is remembered of the last requests: when what happened, and rewards; no texts.

Bounded in number and in size. Knows no wire and decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from specrej.contracts import (
    Admitted,
    AnswerSource,
    Event,
    Finished,
    Generation,
    RecordedRound,
    RequestRecord,
    RoundCompleted,
    RoundTrace,
    Selection,
)
from specrej.errors import Cancelled, DeadlineExceeded, InternalError, NotFound, SpecrejError

OK = "OK"

# A round counts as so many candidates; one of these takes about 100 bytes.
_ROUND_SIZE = 8
MAX_SIZE = 131_072  # of all records
MAX_RECORD_SIZE = 16_384  # of one: later rounds are remembered without their candidates


class Entry:
    """A request's record while it is being written; times are seconds of `clock`."""

    def __init__(self, record: RequestRecord, arrived: float, clock: Callable[[], float]) -> None:
        self.size = 0
        self._record = record
        self._arrived = arrived
        self._clock = clock
        self._rounds: list[RecordedRound] = []

    def queued(self) -> None:
        """It waits for its turn from now on."""
        self._record = replace(self._record, queued_at_ms=self._now_ms())

    def running(self) -> None:
        """Its turn has come."""
        self._record = replace(self._record, running_at_ms=self._now_ms())

    def saw(self, event: Event) -> None:
        """An event, as it happens."""
        match event:
            case Admitted(n, prompt_tokens):
                self._record = replace(
                    self._record, n=n, prompt_tokens=prompt_tokens, opened_at_ms=self._now_ms()
                )
            case RoundCompleted(trace):
                self._add(self._now_ms() - _laps_ms(trace), trace)
            case Finished(generation, source):
                self._answered(generation, source)

    def ended(self, outcome: str) -> None:
        """OK or the reason of an error; only the first time counts."""
        if not self._record.outcome:
            self._record = replace(self._record, outcome=outcome, elapsed_ms=self._now_ms())

    def record(self) -> RequestRecord:
        """As of now."""
        elapsed_ms = self._record.elapsed_ms if self._record.outcome else self._now_ms()
        return replace(self._record, rounds=tuple(self._rounds), elapsed_ms=elapsed_ms)

    def _answered(self, generation: Generation, source: AnswerSource) -> None:
        if source is not AnswerSource.RUN:
            self._copy_rounds(generation)
        self._record = replace(
            self._record,
            n=generation.n,
            prompt_tokens=generation.usage.prompt_tokens,
            source=source,
            answer_id=generation.best.id,
            score=generation.best.score,
            usage=generation.usage,
            degradations=generation.degradations,
            hurried=generation.hurried,
        )
        self.ended(OK)

    def _copy_rounds(self, generation: Generation) -> None:
        """Those of the run that made an answer; one followed the other."""
        first_laps_ms = _laps_ms(generation.rounds[0]) if generation.rounds else 0.0
        start_ms = max(0.0, generation.timings.first_round_ms - first_laps_ms)
        for trace in generation.rounds:
            self._add(start_ms, trace)
            start_ms += _laps_ms(trace)

    def _add(self, start_ms: float, trace: RoundTrace) -> None:
        if self.size + len(trace.candidates) > MAX_RECORD_SIZE:
            trace = replace(trace, scores=(), candidates=())
        self.size += _ROUND_SIZE + len(trace.candidates)
        self._rounds.append(RecordedRound(max(0.0, start_ms), trace))

    def _now_ms(self) -> float:
        return (self._clock() - self._arrived) * 1e3


class Journal:
    """Records of the last `max_requests` requests, those that run included; 0: of none.

    `clock` tells seconds.
    """

    def __init__(
        self, max_requests: int = 256, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_requests = max_requests
        self._clock = clock
        # By tenant and id, the oldest first.
        self._running: dict[tuple[str, str], Entry] = {}
        self._ended: dict[tuple[str, str], Entry] = {}

    def find(self, request_id: str, tenant: str) -> RequestRecord:
        """Raises NotFound: not remembered, or another tenant's; nobody is told which."""
        key = tenant, request_id
        entry = self._running.get(key) or self._ended.get(key)
        if entry is None:
            raise NotFound("no such request of yours is remembered here")
        return entry.record()

    @contextmanager
    def writing(
        self,
        request_id: str,
        tenant: str,
        selection: Selection,
        max_tokens: int,
        *,
        arrived: float,
        time_left_s: float | None = None,
    ) -> Iterator[Entry]:
        """The entry of a request that arrived at `arrived` on the clock; leaving ends it.

        `time_left_s`: to its deadline, when it arrived.
        """
        record = RequestRecord(request_id, time.time(), selection, max_tokens)
        entry, key = Entry(record, arrived, self._clock), (tenant, request_id)
        self._running[key] = entry
        self._trim()
        try:
            yield entry
        except BaseException as error:
            is_late = time_left_s is not None and self._clock() - arrived >= time_left_s
            entry.ended(_reason(error, is_late=is_late))
            raise
        finally:
            entry.ended(InternalError.reason)  # unless it has ended already
            if self._running.pop(key, None):
                self._ended[key] = entry
            self._trim()

    def _trim(self) -> None:
        """Forget what there is no room for: the oldest, those that have ended first."""
        while self._ended and self._is_too_large():
            del self._ended[next(iter(self._ended))]
        while len(self._running) > self._max_requests:
            del self._running[next(iter(self._running))]

    def _is_too_large(self) -> bool:
        entries = [*self._running.values(), *self._ended.values()]
        return len(entries) > self._max_requests or sum(e.size for e in entries) > MAX_SIZE


def _reason(error: BaseException, *, is_late: bool) -> str:
    if isinstance(error, SpecrejError):
        return error.reason
    if isinstance(error, TimeoutError):
        return DeadlineExceeded.reason
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        # The server ends a late call as a client's hanging up would.
        return DeadlineExceeded.reason if is_late else Cancelled.reason
    return InternalError.reason


def _laps_ms(trace: RoundTrace) -> float:
    return trace.extend_ms + trace.score_ms + trace.prune_ms
