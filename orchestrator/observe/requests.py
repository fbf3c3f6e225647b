"""What is observed of one request: metrics, its span and log line, and its record.

Records are of the last requests: times, rounds and rewards, without texts; bounded in size.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from orchestrator.cache import tenant_digest
from specrej import contracts as c
from specrej import telemetry
from specrej.contracts.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    NotFound,
    Overloaded,
    SpecrejError,
    is_late,
)
from specrej.telemetry import metrics, names

OK = "OK"

# Sizes are counted in candidates of a round, about 100 bytes each; a round itself counts as this
# many. The loop bounds the candidates of one request.
T = TypeVar("T")

_ROUND_SIZE = 8
MAX_SIZE = 131_072  # of all records
# Operation names of OpenTelemetry's conventions for generative AI.
_CHAT, _COMPLETION = "chat", "text_completion"
_PHASES = ("queue_ms", "open_ms", "extend_ms", "score_ms", "prune_ms", "first_round_ms")


def note_request(request: c.GenerationRequest, request_id: str, tenant: str) -> None:
    """Note a request that has arrived and may be invalid."""
    sampling, selection = request.sampling, request.selection
    telemetry.annotate(
        {
            names.REQUEST_ID: request_id,
            names.OPERATION: _operation(request),
            names.PROVIDER: names.NAMESPACE,
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_K: sampling.top_k,
            names.TOP_P: sampling.top_p,
            names.CHOICES: selection.n,
            names.ALGORITHM: selection.algorithm.value,
            names.SCHEDULE: selection.schedule.kind,
        }
    )
    telemetry.note(
        id=request_id,
        tenant=tenant_digest(tenant),
        n=selection.n,
        algorithm=selection.algorithm.value,
        rounds=0,
    )


def _operation(request: c.GenerationRequest) -> str:
    return _CHAT if request.prompt.messages else _COMPLETION


class ObservedRequest:
    """A request that was planned; times are seconds of `clock`."""

    def __init__(
        self,
        record: c.RequestRecord,
        arrived: float,
        clock: Callable[[], float],
        *,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.size = 0
        self.arrived = arrived
        self.outcome = ""  # empty while it runs
        self._elapsed_ms = 0.0
        self._record = record
        self._facts: dict[str, Any] = {}  # fields of the record that are set since
        self._clock = clock
        self._rounds: list[c.RecordedRound] = []
        self._labels = dict(labels or {})  # of the conventions' metrics

    async def admitted(
        self, stack: AsyncExitStack, permit: AbstractAsyncContextManager[T]
    ) -> tuple[T, float]:
        """Wait for a permit, which the stack holds; returns it and the milliseconds waited."""
        began, result = self._clock(), "left"
        self._facts["queued_at_ms"] = self._now_ms()
        try:
            with telemetry.span(names.SPAN_QUEUE):
                entered = await stack.enter_async_context(permit)
            result = "admitted"
        except Overloaded:
            result = "refused"
            raise
        finally:
            waited_s = self._clock() - began
            metrics.add(names.ADMISSIONS, result=result)
            metrics.record(names.QUEUE_DURATION, waited_s)
        self._facts["running_at_ms"] = self._now_ms()
        return entered, waited_s * 1e3

    def add(self, event: c.Event) -> None:
        """Observe an event as it happens."""
        match event:
            case c.Admitted(n, prompt_tokens):
                self._facts |= {"n": n, "prompt_tokens": prompt_tokens}
                self._facts["opened_at_ms"] = self._now_ms()
                self._rounds.clear()  # of a generator that was lost
                telemetry.note(n=n)
            case c.RoundCompleted(trace):
                self._add_round(self._now_ms() - _duration_ms(trace), trace)
                metrics.add(names.ROUNDS, ended_by=trace.ended_by.value)
                telemetry.note(rounds=trace.number)
            case c.Finished(generation, source):
                if source is c.AnswerSource.RUN:
                    _count_run(generation, self._record.selection.algorithm, self._labels)
                for kind, tokens in (
                    ("input", generation.usage.prompt_tokens),
                    ("output", generation.usage.answer_tokens),
                ):
                    typed = {**self._labels, names.TOKEN_TYPE: kind}
                    metrics.record(names.GEN_AI_USAGE, tokens, **typed)
                _note_answer(generation, source)
                self._add_answer(generation, source)

    def end(self, outcome: str) -> None:
        """Record OK or the reason of an error; only the first call counts."""
        if not self.outcome:
            self.outcome, self._elapsed_ms = outcome, self._now_ms()
            failure = {} if outcome == OK else {names.FAILURE: outcome}
            seconds = self._elapsed_ms / 1e3
            metrics.record(names.GEN_AI_DURATION, seconds, **self._labels, **failure)

    def read(self) -> c.RequestRecord:
        """The record as of now."""
        elapsed_ms = self._elapsed_ms if self.outcome else self._now_ms()
        return replace(
            self._record,
            rounds=tuple(self._rounds),
            outcome=self.outcome,
            elapsed_ms=elapsed_ms,
            **self._facts,
        )

    def _add_answer(self, generation: c.Generation, source: c.AnswerSource) -> None:
        if source is not c.AnswerSource.RUN and generation.rounds:
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

    def _add_round(self, start_ms: float, trace: c.RoundTrace) -> None:
        self.size += _ROUND_SIZE + len(trace.candidates)
        self._rounds.append(c.RecordedRound(max(0.0, start_ms), trace))

    def _now_ms(self) -> float:
        return (self._clock() - self.arrived) * 1e3


class RequestRecords:
    """Records of the last `max_requests` requests, running ones included; 0 keeps none."""

    def __init__(
        self, max_requests: int = 256, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock` returns seconds."""
        self._max_requests = max_requests
        self._clock = clock
        # By tenant and id, in the order of arrival; ended ones move to the back when they end.
        self._kept: dict[tuple[str, str], ObservedRequest] = {}

    def find(self, request_id: str, tenant: str) -> c.RequestRecord:
        """The record of one of the tenant's requests.

        Raises:
            NotFound: there is none, or it is another tenant's; the error does not differ.
        """
        if record := self._kept.get((tenant, request_id)):
            return record.read()
        raise NotFound("this process has no record of such a request of this tenant")

    def latest(self, tenant: str, num_records: int) -> list[c.RequestRecord]:
        """The tenant's latest records, without their rounds; the latest request first."""
        own = (opened for (owner, _), opened in self._kept.items() if owner == tenant)
        latest = sorted(own, key=attrgetter("arrived"), reverse=True)[:num_records]
        return [replace(opened.read(), rounds=()) for opened in latest]

    @contextmanager
    def observing(
        self,
        request_id: str,
        tenant: str,
        request: c.GenerationRequest,
        *,
        arrived: float,
        model: str = "",
        time_left_s: float = math.inf,
    ) -> Iterator[ObservedRequest]:
        """Observe a planned request that arrived at `arrived` on the clock; leaving ends it.

        `time_left_s` was left to its deadline then.
        """
        telemetry.annotate(
            {
                names.REQUEST_MODEL: model,
                names.ALPHA: request.selection.alpha,
                names.REWARDS: [reward.name for reward in request.selection.rewards],
            }
        )
        max_tokens = request.sampling.max_tokens
        rewards = tuple(replace(reward, data="") for reward in request.selection.rewards)
        selection = replace(request.selection, rewards=rewards)
        record = c.RequestRecord(request_id, time.time(), selection, max_tokens)
        labels = {
            names.OPERATION: _operation(request),
            names.PROVIDER: names.NAMESPACE,
            names.REQUEST_MODEL: model,
        }
        observed = ObservedRequest(record, arrived, self._clock, labels=labels)
        key = tenant, request_id
        self._kept[key] = observed
        self._trim()
        try:
            yield observed
        except BaseException as error:
            left_s = arrived + time_left_s - self._clock()
            observed.end(_reason(error, late=is_late(left_s, time_left_s)))
            raise
        finally:
            observed.end(InternalError.reason)  # unless it has ended
            if self._kept.pop(key, None):
                self._kept[key] = observed
            self._trim()

    def _trim(self) -> None:
        """Drop what exceeds the limits: the oldest first, ended requests before running ones."""
        size = sum(record.size for record in self._kept.values())
        for key, record in sorted(self._kept.items(), key=lambda pair: not pair[1].outcome):
            is_large = record.outcome and size > MAX_SIZE
            if not is_large and len(self._kept) <= self._max_requests:
                break
            size -= record.size
            del self._kept[key]


def _note_answer(generation: c.Generation, source: c.AnswerSource) -> None:
    """Note the answer that the caller receives in the request's span and log line."""
    usage, best = generation.usage, generation.best
    metrics.add(names.ANSWERS, source=source.value)
    telemetry.annotate(
        {
            names.SOURCE: source.value,
            names.CHOICES: generation.n,
            names.INPUT_TOKENS: usage.prompt_tokens,
            names.OUTPUT_TOKENS: usage.generated_tokens,
            names.FINISH_REASONS: [ranked.finish.value for ranked in generation.candidates],
            names.NUM_ROUNDS: len(generation.rounds),
            names.SCORE: best.score,
            names.DEGRADATIONS: [degradation.value for degradation in generation.degradations],
            names.WAS_HURRIED: generation.hurried,
        }
    )
    telemetry.note(
        source=source.value,
        n=generation.n,
        rounds=len(generation.rounds),
        generated_tokens=usage.generated_tokens,
        answer_tokens=usage.answer_tokens,
        score=best.score,
        cached=generation.cached,
        degraded=generation.degraded,
        hurried=generation.hurried,
        reduced=generation.reduced,
    )
    if source is c.AnswerSource.RUN:
        timings = generation.timings
        telemetry.note(**{name: round(getattr(timings, name), 3) for name in _PHASES})


def _count_run(generation: c.Generation, algorithm: c.Algorithm, labels: Mapping[str, str]) -> None:
    """Count the answer of a run; its timings count from the request's arrival."""
    timings, usage = generation.timings, generation.usage
    label = {"algorithm": algorithm.value}
    metrics.record(names.REQUEST_DURATION, timings.total_ms / 1e3, **label)
    metrics.record(names.FIRST_ROUND, timings.first_round_ms / 1e3, **label)
    run_s = (timings.total_ms - timings.queue_ms) / 1e3
    metrics.record(names.TOKEN_DURATION, run_s / max(1, usage.answer_tokens), **label)
    metrics.record(names.GEN_AI_FIRST_TOKEN, timings.first_round_ms / 1e3, **labels)
    if (rest := usage.answer_tokens - generation.rounds[0].decision_token) > 0:
        rest_s = (timings.total_ms - timings.first_round_ms) / 1e3
        metrics.record(names.GEN_AI_TOKEN, rest_s / rest, **labels)
    saved = max(0, usage.best_of_n_tokens_estimate - usage.generated_tokens)
    for kind, tokens in (
        ("prompt", usage.prompt_tokens),
        ("generated", usage.generated_tokens),
        ("saved", saved),
        ("scored", usage.reward_tokens),
    ):
        metrics.add(names.TOKENS, tokens, kind=kind)
    for degradation in generation.degradations:
        metrics.add(names.DEGRADED, degradation=degradation.value)
    if generation.hurried:
        metrics.add(names.HURRIED)


def _reason(error: BaseException, *, late: bool) -> str:
    if isinstance(error, SpecrejError):
        return error.reason
    # A late call is cancelled by the server, just as by a client that disconnects.
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    if isinstance(error, TimeoutError) or (is_cancelled and late):
        return DeadlineExceeded.reason
    return Cancelled.reason if is_cancelled else InternalError.reason


def _duration_ms(trace: c.RoundTrace) -> float:
    return trace.extend_ms + trace.score_ms + trace.prune_ms
