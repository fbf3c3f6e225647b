"""What telemetry is told of requests: counts, durations, attributes of spans, facts for the log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeVar

from orchestrator.admission import Admission
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    AnswerSource,
    Candidate,
    Event,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    Prompt,
    RoundTrace,
    Selection,
    Timings,
)
from specrej.errors import Overloaded
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed
from specrej.telemetry.traces import Attribute

T = TypeVar("T")

# What the conventions of generative AI call the ways of asking.
_CHAT, _COMPLETION = "chat", "text_completion"


async def entered(stack: AsyncExitStack, span: str, manager: AbstractAsyncContextManager[T]) -> T:
    """Enter a context on a stack, and show how long that took."""
    with telemetry.span(span):
        return await stack.enter_async_context(manager)


async def admitted(stack: AsyncExitStack, turn: AbstractAsyncContextManager[None]) -> None:
    """Wait for a turn, and count how that ended."""
    began, result = time.perf_counter(), "left"
    try:
        await entered(stack, names.SPAN_QUEUE, turn)
        result = "admitted"
    except Overloaded:
        result = "refused"
        raise
    finally:
        metrics.add(names.ADMISSIONS, result=result)
        metrics.record(names.QUEUE_DURATION, time.perf_counter() - began)


def observe(admission: Admission) -> None:
    """From now on gauges show what runs and waits."""

    def of(value: int) -> Iterator[Observed]:
        yield value, {}

    metrics.observe(names.REQUESTS_RUNNING, lambda: of(admission.running))
    metrics.observe(names.REQUESTS_QUEUED, lambda: of(admission.queued))
    metrics.observe(names.TOKENS_QUEUED, lambda: of(admission.queued_tokens))


def observe_backends(backends: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
    """From now on a gauge shows how many of each kind there are, by state."""

    def counts() -> Iterator[Observed]:
        for kind, states in backends.items():
            for state, count in states().items():
                yield count, {"kind": kind, "state": state}

    metrics.observe(names.BACKENDS, counts)


def asked(request: GenerationRequest, request_id: str, *, with_texts: bool) -> None:
    """A request has come in; it may not be a valid one."""
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
    telemetry.note(id=request_id, n=selection.n, algorithm=selection.algorithm.value, rounds=0)
    if with_texts:
        telemetry.note(prompt=_text(request.prompt))


def planned(model: str, selection: Selection) -> None:
    """A request can be served: by whom, and who judges."""
    telemetry.annotate(
        {
            names.REQUEST_MODEL: model,
            names.ALPHA: selection.alpha,
            names.REWARDS: [reward.name for reward in selection.rewards],
        }
    )


def saw(event: Event, *, with_texts: bool) -> None:
    """What a request's caller is told."""
    match event:
        case Admitted(n):
            telemetry.note(n=n)
        case Finished(generation):
            metrics.add(names.ANSWERS, source=event.source.value)
            telemetry.annotate({names.SOURCE: event.source.value, **_of_answer(generation)})
            telemetry.note(source=event.source.value, **_facts_of(generation))
            if event.source is AnswerSource.RUN:
                telemetry.note(**_phases(generation.timings))
            if with_texts:
                telemetry.note(answer=generation.best.text)
        case _:
            telemetry.note(rounds=event.trace.number)


def count_wait(waits: bool) -> None:
    """A request joins a flight of this process: it waits, or leads."""
    if waits:
        metrics.add(names.FLIGHT_WAITS, where="here")


def count_round(trace: RoundTrace) -> None:
    """A round of a run has ended."""
    metrics.add(names.ROUNDS, ended_by=trace.ended_by.value)


def count_run(generation: Generation, algorithm: Algorithm) -> None:
    """A run has made an answer; its times count from the request's arrival."""
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


def count_fates(n: int, latest: Mapping[int, Candidate], live: Collection[int]) -> None:
    """A run of n candidates is over: `latest` is what is known of each, `live` those that grew."""
    fates = dict.fromkeys(("finished", "truncated", "rejected", "abandoned"), 0)
    for number in range(n):
        candidate = latest.get(number)
        fates[_fate(candidate, is_live=candidate is None or number in live)] += 1
    for fate, count in fates.items():
        if count:
            metrics.add(names.CANDIDATES, count, fate=fate)


def of_round(trace: RoundTrace) -> Mapping[str, Attribute]:
    """Attributes of a round's span."""
    return {
        names.NUM_STARTED: trace.num_started,
        names.NUM_FINISHED: trace.num_finished,
        names.NUM_REJECTED: trace.num_rejected,
        names.NUM_LIVE: trace.num_live,
        names.DECISION_TOKEN: trace.decision_token,
        names.ENDED_BY: trace.ended_by.value,
        names.ROUND_TOKENS: trace.generated_tokens,
        names.SESSION_SLOTS: trace.session_slots,
        names.FREED_SLOTS: trace.freed_slots,
        names.BEST_SCORE: trace.best_score,
        names.SCORES: trace.scores[: names.MAX_SCORES],
        names.ALPHA: trace.alpha,
    }


def _fate(candidate: Candidate | None, *, is_live: bool) -> str:
    if candidate and candidate.finish:
        return "truncated" if candidate.finish is FinishReason.LENGTH else "finished"
    return "abandoned" if is_live else "rejected"


def _of_answer(generation: Generation) -> Mapping[str, Attribute]:
    usage, best = generation.usage, generation.best
    return {
        names.CHOICES: generation.n,
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.OUTPUT_TOKENS: usage.generated_tokens,
        names.FINISH_REASONS: [each.finish.value for each in generation.candidates],
        names.NUM_ROUNDS: len(generation.rounds),
        names.SCORE: best.score,
        names.DEGRADATIONS: [each.value for each in generation.degradations],
        names.WAS_HURRIED: generation.hurried,
    }


def _facts_of(generation: Generation) -> dict[str, int | float | bool]:
    """What a request's line says of its answer."""
    return {
        "n": generation.n,
        "rounds": len(generation.rounds),
        "generated_tokens": generation.usage.generated_tokens,
        "answer_tokens": generation.usage.answer_tokens,
        "score": generation.best.score,
        "cached": generation.cached,
        "degraded": generation.degraded,
        "hurried": generation.hurried,
    }


def _phases(timings: Timings) -> dict[str, float]:
    """Milliseconds."""
    phases = ("queue_ms", "open_ms", "extend_ms", "score_ms", "prune_ms", "first_round_ms")
    return {name: round(getattr(timings, name), 3) for name in phases}


def _text(prompt: Prompt) -> str:
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return prompt.text or json.dumps(turns, ensure_ascii=False)
