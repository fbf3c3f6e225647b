"""Telemetry of requests: metrics, attributes of spans, and fields of a request's log line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from typing import TypeVar

from orchestrator.cache import tenant_digest
from orchestrator.edge.admission import Admission
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    AnswerSource,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    RoundCompleted,
    RoundTrace,
    Selection,
)
from specrej.contracts.errors import Overloaded
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed
from specrej.telemetry.traces import Attribute

T = TypeVar("T")

# Operation names of OpenTelemetry's conventions for generative AI.
_CHAT, _COMPLETION = "chat", "text_completion"
_MAX_TENANTS = 10  # in a metric
_MAX_NAMED = 1000  # per process: OpenTelemetry keeps all labels, and merges those beyond 2,000
_PHASES = ("queue_ms", "open_ms", "extend_ms", "score_ms", "prune_ms", "first_round_ms")


async def entered(stack: AsyncExitStack, span: str, manager: AbstractAsyncContextManager[T]) -> T:
    """Enter a context on a stack, in a span of its own."""
    with telemetry.span(span):
        return await stack.enter_async_context(manager)


async def admitted(stack: AsyncExitStack, permit: AbstractAsyncContextManager[None]) -> float:
    """Wait for a permit, which the stack holds; returns the milliseconds waited."""
    began, result = time.perf_counter(), "left"
    try:
        await entered(stack, names.SPAN_QUEUE, permit)
        result = "admitted"
        return (time.perf_counter() - began) * 1e3
    except Overloaded:
        result = "refused"
        raise
    finally:
        metrics.add(names.ADMISSIONS, result=result)
        metrics.record(names.QUEUE_DURATION, time.perf_counter() - began)


def observe_admission(admission: Admission) -> None:
    """Register gauges of the requests that run and wait; tenants are their digests."""

    named: set[str] = set()

    def tenants() -> Iterator[Observed]:
        others = 0
        for tenant, tokens in admission.heaviest(_MAX_TENANTS):
            digest = tenant_digest(tenant)
            if len(named) < _MAX_NAMED:
                named.add(digest)
            if digest in named:
                yield tokens, {"tenant": digest}
            else:
                others += tokens
        if others:
            yield others, {"tenant": "other"}

    metrics.observe(names.REQUESTS_RUNNING, lambda: [(admission.running, {})])
    metrics.observe(names.REQUESTS_QUEUED, lambda: [(admission.queued, {})])
    metrics.observe(names.TOKENS_QUEUED, lambda: [(admission.queued_tokens, {})])
    metrics.observe(names.TENANT_TOKENS, tenants)


def observe_backends(backends: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
    """Register a gauge of the backends of each kind, by state."""

    def counts() -> Iterator[Observed]:
        for kind, states in backends.items():
            for state, count in states().items():
                yield count, {"kind": kind, "state": state}

    metrics.observe(names.BACKENDS, counts)


def note_request(
    request: GenerationRequest, request_id: str, tenant: str, *, with_texts: bool
) -> None:
    """Note a request that has arrived and may be invalid."""
    sampling, selection = request.sampling, request.selection
    telemetry.annotate(
        {
            names.REQUEST_ID: request_id,
            names.OPERATION: _CHAT if request.prompt.messages else _COMPLETION,
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
    if with_texts:
        turns = [asdict(turn) for turn in request.prompt.messages]
        telemetry.note(prompt=request.prompt.text or json.dumps(turns, ensure_ascii=False))


def note_plan(model: str, selection: Selection) -> None:
    """Note the model and the rewards that serve a request."""
    telemetry.annotate(
        {
            names.REQUEST_MODEL: model,
            names.ALPHA: selection.alpha,
            names.REWARDS: [reward.name for reward in selection.rewards],
        }
    )


def note_event(event: Event, *, with_texts: bool) -> None:
    """Note an event that the caller receives."""
    match event:
        case Admitted(n):
            telemetry.note(n=n)
        case Finished(generation):
            metrics.add(names.ANSWERS, source=event.source.value)
            telemetry.annotate({names.SOURCE: event.source.value, **_attributes_of(generation)})
            telemetry.note(source=event.source.value, **_fields_of(generation))
            if event.source is AnswerSource.RUN:
                timings = generation.timings
                telemetry.note(**{name: round(getattr(timings, name), 3) for name in _PHASES})
            if with_texts:
                telemetry.note(answer=generation.best.text)
        case RoundCompleted(trace):
            telemetry.note(rounds=trace.number)


def count_round(trace: RoundTrace) -> None:
    metrics.add(names.ROUNDS, ended_by=trace.ended_by.value)


def count_run(generation: Generation, algorithm: Algorithm) -> None:
    """Count the answer of a run; its timings count from the request's arrival."""
    timings, usage = generation.timings, generation.usage
    label = {"algorithm": algorithm.value}
    metrics.record(names.REQUEST_DURATION, timings.total_ms / 1e3, **label)
    metrics.record(names.FIRST_ROUND, timings.first_round_ms / 1e3, **label)
    run_s = (timings.total_ms - timings.queue_ms) / 1e3
    metrics.record(names.TOKEN_DURATION, run_s / max(1, usage.answer_tokens), **label)
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


def _attributes_of(generation: Generation) -> Mapping[str, Attribute]:
    usage, best = generation.usage, generation.best
    return {
        names.CHOICES: generation.n,
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.OUTPUT_TOKENS: usage.generated_tokens,
        names.FINISH_REASONS: [ranked.finish.value for ranked in generation.candidates],
        names.NUM_ROUNDS: len(generation.rounds),
        names.SCORE: best.score,
        names.DEGRADATIONS: [degradation.value for degradation in generation.degradations],
        names.WAS_HURRIED: generation.hurried,
    }


def _fields_of(generation: Generation) -> dict[str, int | float | bool]:
    """An answer's fields in the request's log line."""
    return {
        "n": generation.n,
        "rounds": len(generation.rounds),
        "generated_tokens": generation.usage.generated_tokens,
        "answer_tokens": generation.usage.answer_tokens,
        "score": generation.best.score,
        "cached": generation.cached,
        "degraded": generation.degraded,
        "hurried": generation.hurried,
        "reduced": generation.reduced,
    }
