"""What is observed of one request: metrics, its span and its log line."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.cache import tenant_digest
from specrej import contracts as c
from specrej import telemetry
from specrej.contracts import errors
from specrej.telemetry import metrics, names

OK = "OK"

T = TypeVar("T")

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


@dataclass(slots=True)
class ObservedRequest:
    """A request that was planned; times are seconds of `clock`. `labels`: of the conventions'
    metrics."""

    _algorithm: c.Algorithm
    _arrived: float
    _clock: Callable[[], float]
    _labels: Mapping[str, str]
    _has_ended: bool = False

    async def admitted(
        self, stack: AsyncExitStack, permit: AbstractAsyncContextManager[T]
    ) -> tuple[T, float]:
        """Wait for a permit, which the stack holds; returns it and the milliseconds waited."""
        began, result = self._clock(), "left"
        try:
            with telemetry.span(names.SPAN_QUEUE):
                entered = await stack.enter_async_context(permit)
            result = "admitted"
        except errors.Overloaded:
            result = "refused"
            raise
        finally:
            waited_s = self._clock() - began
            metrics.add(names.ADMISSIONS, result=result)
            metrics.record(names.QUEUE_DURATION, waited_s)
        return entered, waited_s * 1e3

    def add(self, event: c.Event) -> None:
        """Observe an event as it happens."""
        match event:
            case c.Admitted(n):
                telemetry.note(n=n)
            case c.RoundCompleted(trace):
                metrics.add(names.ROUNDS, ended_by=trace.ended_by.value)
                telemetry.note(rounds=trace.number)
            case c.Finished(generation, source):
                if source is c.AnswerSource.RUN:
                    _count_run(generation, self._algorithm, self._labels)
                for kind, tokens in (
                    ("input", generation.usage.prompt_tokens),
                    ("output", generation.usage.answer_tokens),
                ):
                    typed = {**self._labels, names.TOKEN_TYPE: kind}
                    metrics.record(names.GEN_AI_USAGE, tokens, **typed)
                _note_answer(generation, source)
                self.end(OK)

    def end(self, outcome: str) -> None:
        """Record OK or the reason of an error; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        failure = {} if outcome == OK else {names.FAILURE: outcome}
        seconds = self._clock() - self._arrived
        metrics.record(names.GEN_AI_DURATION, seconds, **self._labels, **failure)


@contextmanager
def observing(
    request: c.GenerationRequest,
    model: str,
    arrived: float,
    time_left_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
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
    labels = {
        names.OPERATION: _operation(request),
        names.PROVIDER: names.NAMESPACE,
        names.REQUEST_MODEL: model,
    }
    observed = ObservedRequest(request.selection.algorithm, arrived, clock, labels)
    try:
        yield observed
    except BaseException as error:
        left_s = arrived + time_left_s - clock()
        observed.end(_reason(error, late=errors.is_late(left_s, time_left_s)))
        raise
    finally:
        observed.end(errors.InternalError.reason)  # unless it has ended


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
    if isinstance(error, errors.SpecrejError):
        return error.reason
    # A late call is cancelled by the server, just as by a client that disconnects.
    is_cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    if isinstance(error, TimeoutError) or (is_cancelled and late):
        return errors.DeadlineExceeded.reason
    return errors.Cancelled.reason if is_cancelled else errors.InternalError.reason
