"""Records of the last requests: times, rounds and rewards, without texts; bounded in size."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

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
from specrej.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    SpecrejError,
    is_late,
)

OK = "OK"

# Sizes are counted in candidates of a round, about 100 bytes each; a round itself counts as this
# many. The loop bounds the candidates of one request.
_ROUND_SIZE = 8
MAX_SIZE = 131_072  # of all records


class OpenRecord:
    """The record of a request that runs; times are seconds of `clock`."""

    def __init__(self, record: RequestRecord, arrived: float, clock: Callable[[], float]) -> None:
        self.size = 0
        self._outcome = ""  # empty while it runs
        self._elapsed_ms = 0.0
        self._record = record
        self._facts: dict[str, Any] = {}  # fields of the record that are set since
        self._arrived = arrived
        self._clock = clock
        self._rounds: list[RecordedRound] = []

    def queued(self) -> None:
        """The request begins to wait for its turn."""
        self._facts["queued_at_ms"] = self._now_ms()

    def running(self) -> None:
        """The request begins to run."""
        self._facts["running_at_ms"] = self._now_ms()

    def add(self, event: Event) -> None:
        """Record an event as it happens."""
        match event:
            case Admitted(n, prompt_tokens):
                self._facts |= {"n": n, "prompt_tokens": prompt_tokens}
                self._facts["opened_at_ms"] = self._now_ms()
                self._rounds.clear()  # of a generator that was lost
            case RoundCompleted(trace):
                self._add_round(self._now_ms() - _duration_ms(trace), trace)
            case Finished(generation, source):
                self._add_answer(generation, source)

    def end(self, outcome: str) -> None:
        """Record OK or the reason of an error; only the first call counts."""
        if not self._outcome:
            self._outcome, self._elapsed_ms = outcome, self._now_ms()

    def read(self) -> RequestRecord:
        """The record as of now."""
        elapsed_ms = self._elapsed_ms if self._outcome else self._now_ms()
        return replace(
            self._record,
            rounds=tuple(self._rounds),
            outcome=self._outcome,
            elapsed_ms=elapsed_ms,
            **self._facts,
        )

    def _add_answer(self, generation: Generation, source: AnswerSource) -> None:
        if source is not AnswerSource.RUN and generation.rounds:
            # The rounds of the run that made the answer, which followed each other.
            first_ms = generation.timings.first_round_ms - _duration_ms(generation.rounds[0])
            start_ms = max(0.0, first_ms)
            for trace in generation.rounds:
                self._add_round(start_ms, trace)
                start_ms += _duration_ms(trace)
        self._facts |= {
            "n": generation.n,
            "prompt_tokens": generation.usage.prompt_tokens,
            "source": source,
            "answer_id": generation.best.id,
            "score": generation.best.score,
            "usage": generation.usage,
            "degradations": generation.degradations,
            "hurried": generation.hurried,
        }
        self.end(OK)

    def _add_round(self, start_ms: float, trace: RoundTrace) -> None:
        self.size += _ROUND_SIZE + len(trace.candidates)
        self._rounds.append(RecordedRound(max(0.0, start_ms), trace))

    def _now_ms(self) -> float:
        return (self._clock() - self._arrived) * 1e3


class RequestRecords:
    """Records of the last `max_requests` requests, running ones included; 0 keeps none."""

    def __init__(
        self, max_requests: int = 256, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` returns seconds."""
        self._max_requests = max_requests
        self._clock = clock
        # By tenant and id, the oldest first.
        self._running: dict[tuple[str, str], OpenRecord] = {}
        self._ended: dict[tuple[str, str], OpenRecord] = {}
        self._ended_size = 0

    def find(self, request_id: str, tenant: str) -> RequestRecord | None:
        """The record of one of the tenant's requests."""
        key = tenant, request_id
        record = self._running.get(key) or self._ended.get(key)
        return record.read() if record else None

    def latest(self, tenant: str, num_records: int) -> list[RequestRecord]:
        """The tenant's latest records, without their rounds: running ones, then ended ones."""
        kept = chain(reversed(self._running.items()), reversed(self._ended.items()))
        own = (opened for (owner, _), opened in kept if owner == tenant)
        return [replace(opened.read(), rounds=()) for opened in islice(own, num_records)]

    @contextmanager
    def recording(
        self,
        request_id: str,
        tenant: str,
        selection: Selection,
        max_tokens: int,
        *,
        arrived: float,
        time_left_s: float | None = None,
    ) -> Iterator[OpenRecord]:
        """The record of a request that arrived at `arrived` on the clock; leaving ends it.

        `time_left_s` was left to its deadline then.
        """
        record = RequestRecord(request_id, time.time(), selection, max_tokens)
        opened, key = OpenRecord(record, arrived, self._clock), (tenant, request_id)
        self._running[key] = opened
        self._trim()
        try:
            yield opened
        except BaseException as error:
            left_s = math.inf if time_left_s is None else arrived + time_left_s - self._clock()
            opened.end(_reason(error, late=is_late(left_s, time_left_s or 0.0)))
            raise
        finally:
            opened.end(InternalError.reason)  # unless it has ended
            if self._running.pop(key, None):
                self._ended[key] = opened
                self._ended_size += opened.size
            self._trim()

    def _trim(self) -> None:
        """Drop what exceeds the limits: the oldest first, ended requests before running ones."""
        while self._ended:
            num = len(self._running) + len(self._ended)
            size = sum(record.size for record in self._running.values()) + self._ended_size
            if num <= self._max_requests and size <= MAX_SIZE:
                break
            self._ended_size -= self._ended.pop(next(iter(self._ended))).size
        while len(self._running) > self._max_requests:
            del self._running[next(iter(self._running))]


def _reason(error: BaseException, *, late: bool) -> str:
    if isinstance(error, SpecrejError):
        return error.reason
    # A late call is cancelled by the server, just as by a client that disconnects.
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    if isinstance(error, TimeoutError) or (is_cancelled and late):
        return DeadlineExceeded.reason
    return Cancelled.reason if is_cancelled else InternalError.reason


def _duration_ms(trace: RoundTrace) -> float:
    return trace.extend_ms + trace.score_ms + trace.prune_ms
