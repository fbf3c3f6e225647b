"""Messages to contract values and back: the only place that knows both. Decides nothing.

Absent fields get the contract's defaults; an unknown enum number is reported as a violation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from specrej import contracts as c
from specrej.errors import Violation
from specrej.v1 import common_pb2, generator_pb2, orchestrator_pb2, reward_pb2

_FINISH: Mapping[c.FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    c.FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    c.FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_ENDED = {finish: number for finish, number in _FINISH.items() if finish}
_ROUND_END: Mapping[c.RoundEnd, generator_pb2.RoundEnd.ValueType] = {
    c.RoundEnd.DECISION_TOKEN: generator_pb2.ROUND_END_DECISION_TOKEN,
    c.RoundEnd.SLOTS_FULL: generator_pb2.ROUND_END_SLOTS_FULL,
    c.RoundEnd.ALL_FINISHED: generator_pb2.ROUND_END_ALL_FINISHED,
}
_ALGORITHM: Mapping[c.Algorithm, orchestrator_pb2.Algorithm.ValueType] = {
    c.Algorithm.SPECULATIVE_REJECTION: orchestrator_pb2.ALGORITHM_SPECULATIVE_REJECTION,
    c.Algorithm.BEST_OF_N: orchestrator_pb2.ALGORITHM_BEST_OF_N,
}
_CACHE: Mapping[c.CacheControl, orchestrator_pb2.CacheControl.ValueType] = {
    c.CacheControl.USE: orchestrator_pb2.CACHE_CONTROL_USE,
    c.CacheControl.BYPASS: orchestrator_pb2.CACHE_CONTROL_BYPASS,
    c.CacheControl.REFRESH: orchestrator_pb2.CACHE_CONTROL_REFRESH,
    c.CacheControl.USE_BETTER: orchestrator_pb2.CACHE_CONTROL_USE_BETTER,
}
_DEGRADATION: Mapping[c.Degradation, orchestrator_pb2.Degradation.ValueType] = {
    c.Degradation.REWARD: orchestrator_pb2.DEGRADATION_REWARD,
    c.Degradation.GENERATOR: orchestrator_pb2.DEGRADATION_GENERATOR,
    c.Degradation.DEADLINE: orchestrator_pb2.DEGRADATION_DEADLINE,
    c.Degradation.CANDIDATES: orchestrator_pb2.DEGRADATION_CANDIDATES,
}
_FATE: Mapping[c.Fate, orchestrator_pb2.CandidateFate.ValueType] = {
    c.Fate.KEPT: orchestrator_pb2.CANDIDATE_FATE_KEPT,
    c.Fate.REJECTED: orchestrator_pb2.CANDIDATE_FATE_REJECTED,
    c.Fate.VETOED: orchestrator_pb2.CANDIDATE_FATE_VETOED,
    c.Fate.FINISHED: orchestrator_pb2.CANDIDATE_FATE_FINISHED,
}
_SOURCE: Mapping[c.AnswerSource | None, orchestrator_pb2.AnswerSource.ValueType] = {
    None: orchestrator_pb2.ANSWER_SOURCE_UNSPECIFIED,
    c.AnswerSource.RUN: orchestrator_pb2.ANSWER_SOURCE_RUN,
    c.AnswerSource.CACHE: orchestrator_pb2.ANSWER_SOURCE_CACHE,
    c.AnswerSource.FLIGHT: orchestrator_pb2.ANSWER_SOURCE_FLIGHT,
}

V = TypeVar("V")
E = TypeVar("E")


def _back(table: Mapping[V, E], number: E) -> V:
    for value, known in table.items():
        if known == number:
            return value
    # Not StopIteration, which a coroutine could not raise.
    raise ValueError(f"unknown enum number {number}")


def _enum(
    table: Mapping[V, E], number: int, default: V, path: str, violations: list[Violation]
) -> V:
    if number == 0:
        return default
    for value, known in table.items():
        if known == number:
            return value
    violations.append(Violation(path, f"unknown value {number}"))
    return default


# Prompts and sampling


def prompt_to_wire(prompt: c.Prompt) -> common_pb2.Prompt:
    messages = [common_pb2.Message(role=m.role, content=m.content) for m in prompt.messages]
    return common_pb2.Prompt(messages=messages, text=prompt.text)


def prompt_from_wire(message: common_pb2.Prompt) -> c.Prompt:
    turns = tuple(c.Message(turn.role, turn.content) for turn in message.messages)
    return c.Prompt(messages=turns, text=message.text)


def sampling_to_wire(sampling: c.Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop=sampling.stop,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
    )


def sampling_from_wire(message: common_pb2.Sampling) -> c.Sampling:
    default = c.Sampling()
    has = message.HasField
    return c.Sampling(
        max_tokens=message.max_tokens if has("max_tokens") else default.max_tokens,
        temperature=message.temperature if has("temperature") else default.temperature,
        top_k=message.top_k,
        top_p=message.top_p if has("top_p") else default.top_p,
        stop=tuple(message.stop),
        seed=message.seed,
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        logprobs=message.logprobs,
    )


# The generator


def gauge_to_wire(gauge: c.SlotGauge) -> common_pb2.SlotGauge:
    return common_pb2.SlotGauge(
        capacity=gauge.capacity, owned=gauge.owned, session=gauge.session, cached=gauge.cached
    )


def gauge_from_wire(message: common_pb2.SlotGauge) -> c.SlotGauge:
    return c.SlotGauge(message.capacity, message.owned, message.session, message.cached)


def round_to_wire(ended: c.Round) -> generator_pb2.PrefixBatch:
    prefixes = [
        generator_pb2.Prefix(
            candidate_id=candidate.id,
            new_token_ids=candidate.new_token_ids,
            text=candidate.text,
            num_tokens=candidate.num_tokens,
            cumulative_logprob=candidate.logprob,
            mean_logprob=candidate.mean_logprob,
            finish_reason=_FINISH[candidate.finish],
            new_logprobs=candidate.new_logprobs,
        )
        for candidate in ended.candidates
    ]
    return generator_pb2.PrefixBatch(
        prefixes=prefixes,
        ended_by=_ROUND_END[ended.ended_by],
        num_tokens=ended.num_tokens,
        slots=gauge_to_wire(ended.slots),
    )


def round_from_wire(message: generator_pb2.PrefixBatch) -> c.Round:
    candidates = tuple(
        c.Candidate(
            id=prefix.candidate_id,
            text=prefix.text,
            num_tokens=prefix.num_tokens,
            logprob=prefix.cumulative_logprob,
            finish=_back(_FINISH, prefix.finish_reason),
            new_token_ids=tuple(prefix.new_token_ids),
            new_logprobs=tuple(prefix.new_logprobs),
        )
        for prefix in message.prefixes
    )
    return c.Round(
        candidates=candidates,
        ended_by=_back(_ROUND_END, message.ended_by),
        num_tokens=message.num_tokens,
        slots=gauge_from_wire(message.slots),
    )


def generator_to_wire(
    description: c.GeneratorDescription,
) -> generator_pb2.GeneratorServiceDescribeResponse:
    return generator_pb2.GeneratorServiceDescribeResponse(
        model=description.model,
        fingerprint=description.fingerprint,
        context_tokens=description.context_tokens,
        max_candidates=description.max_candidates,
        vocabulary=description.vocabulary,
        slot_bytes=description.slot_bytes,
        device=description.device,
        slots=gauge_to_wire(description.slots),
        sessions=description.sessions,
        waiting=description.waiting,
    )


def generator_from_wire(
    message: generator_pb2.GeneratorServiceDescribeResponse,
) -> c.GeneratorDescription:
    return c.GeneratorDescription(
        model=message.model,
        fingerprint=message.fingerprint,
        context_tokens=message.context_tokens,
        max_candidates=message.max_candidates,
        vocabulary=message.vocabulary,
        slot_bytes=message.slot_bytes,
        device=message.device,
        slots=gauge_from_wire(message.slots),
        sessions=message.sessions,
        waiting=message.waiting,
    )


# The orchestrator's request


def schedule_to_wire(schedule: c.Schedule) -> orchestrator_pb2.Schedule:
    message = orchestrator_pb2.Schedule()
    match schedule.kind:
        case "memory":
            message.memory.SetInParent()
        case "tokens":
            message.tokens.decision_tokens.extend(schedule.tokens)
            message.tokens.SetInParent()
        case _:
            message.geometric.first = schedule.first
            message.geometric.factor = schedule.factor
    return message


def schedule_from_wire(message: orchestrator_pb2.Schedule, default: c.Schedule) -> c.Schedule:
    kind = message.WhichOneof("kind")
    if kind is None:
        return default
    if kind == "tokens":
        return c.Schedule(kind=kind, tokens=tuple(message.tokens.decision_tokens))
    if kind == "memory":
        return c.Schedule(kind=kind)
    base, shape = c.Schedule(), message.geometric
    return c.Schedule(
        kind=kind,
        first=shape.first if shape.HasField("first") else base.first,
        factor=shape.factor if shape.HasField("factor") else base.factor,
    )


def algorithm_to_wire(algorithm: c.Algorithm | None) -> orchestrator_pb2.Algorithm.ValueType:
    return _ALGORITHM[algorithm] if algorithm else orchestrator_pb2.ALGORITHM_UNSPECIFIED


def cache_to_wire(cache: c.CacheControl | None) -> orchestrator_pb2.CacheControl.ValueType:
    return _CACHE[cache] if cache else orchestrator_pb2.CACHE_CONTROL_UNSPECIFIED


def normalization_to_wire(normalization: c.Normalization) -> orchestrator_pb2.Normalization | None:
    """Raises ValueError for a kind that no message can hold."""
    match normalization.kind:
        case "none":
            return None
        case "fixed":
            fixed = orchestrator_pb2.FixedNormalization(
                mean=normalization.mean, deviation=normalization.deviation
            )
            return orchestrator_pb2.Normalization(fixed=fixed)
        case "batch":
            batch = orchestrator_pb2.BatchNormalization()
            return orchestrator_pb2.Normalization(batch=batch)
        case unknown:
            raise ValueError(f"no such normalization: {unknown}")


def normalization_from_wire(message: orchestrator_pb2.Normalization) -> c.Normalization:
    match message.WhichOneof("kind"):
        case "fixed":
            return c.Normalization("fixed", message.fixed.mean, message.fixed.deviation)
        case "batch":
            return c.Normalization("batch")
        case _:
            return c.Normalization()


def weighted_to_wire(reward: c.WeightedReward) -> orchestrator_pb2.WeightedReward:
    return orchestrator_pb2.WeightedReward(
        name=reward.name,
        weight=reward.weight,
        normalization=normalization_to_wire(reward.normalization),
        veto_below=reward.veto_below,
    )


def weighted_from_wire(message: orchestrator_pb2.WeightedReward) -> c.WeightedReward:
    return c.WeightedReward(
        name=message.name,
        weight=message.weight if message.HasField("weight") else 1.0,
        normalization=normalization_from_wire(message.normalization),
        veto_below=message.veto_below if message.HasField("veto_below") else None,
    )


def selection_to_wire(chosen: c.Selection) -> orchestrator_pb2.Selection:
    return orchestrator_pb2.Selection(
        n=chosen.n,
        alpha=chosen.alpha,
        schedule=schedule_to_wire(chosen.schedule),
        algorithm=algorithm_to_wire(chosen.algorithm),
        rewards=[weighted_to_wire(reward) for reward in chosen.rewards],
        return_candidates=chosen.return_candidates,
    )


def selection_from_wire(
    message: orchestrator_pb2.Selection,
    default_schedule: c.Schedule,
    violations: list[Violation],
) -> c.Selection:
    base = c.Selection()
    return c.Selection(
        n=message.n,
        alpha=message.alpha if message.HasField("alpha") else base.alpha,
        schedule=schedule_from_wire(message.schedule, default_schedule),
        algorithm=_enum(
            _ALGORITHM, message.algorithm, base.algorithm, "selection.algorithm", violations
        ),
        rewards=tuple(map(weighted_from_wire, message.rewards)),
        return_candidates=(
            message.return_candidates if message.HasField("return_candidates") else 1
        ),
    )


def request_to_wire(request: c.GenerationRequest) -> orchestrator_pb2.GenerateRequest:
    return orchestrator_pb2.GenerateRequest(
        model=request.model,
        prompt=prompt_to_wire(request.prompt),
        sampling=sampling_to_wire(request.sampling),
        selection=selection_to_wire(request.selection),
        cache_control=cache_to_wire(request.cache),
        allow_degraded=request.allow_degraded,
    )


def request_from_wire(
    message: orchestrator_pb2.GenerateRequest,
    default_schedule: c.Schedule,
    violations: list[Violation],
) -> c.GenerationRequest:
    """The request with defaults filled; unknown enum numbers are added to `violations`."""
    selection = selection_from_wire(message.selection, default_schedule, violations)
    return c.GenerationRequest(
        prompt=prompt_from_wire(message.prompt),
        sampling=sampling_from_wire(message.sampling),
        selection=selection,
        model=message.model,
        cache=_enum(_CACHE, message.cache_control, c.CacheControl.USE, "cache_control", violations),
        allow_degraded=message.allow_degraded,
    )


# The orchestrator's events


def trace_to_wire(trace: c.RoundTrace) -> orchestrator_pb2.RoundTrace:
    return orchestrator_pb2.RoundTrace(
        number=trace.number,
        decision_token=trace.decision_token,
        ended_by=_ROUND_END[trace.ended_by],
        num_started=trace.num_started,
        num_finished=trace.num_finished,
        num_rejected=trace.num_rejected,
        num_live=trace.num_live,
        best_score=trace.best_score,
        scores=trace.scores,
        session_slots=trace.session_slots,
        freed_slots=trace.freed_slots,
        capacity_slots=trace.capacity_slots,
        generated_tokens=trace.generated_tokens,
        extend_ms=trace.extend_ms,
        score_ms=trace.score_ms,
        prune_ms=trace.prune_ms,
        num_vetoed=trace.num_vetoed,
        num_lost=trace.num_lost,
        alpha=trace.alpha,
        candidates=[
            orchestrator_pb2.CandidateTrace(
                candidate_id=each.id, score=each.score, fate=_FATE[each.fate]
            )
            for each in trace.candidates
        ],
    )


def trace_from_wire(message: orchestrator_pb2.RoundTrace) -> c.RoundTrace:
    return c.RoundTrace(
        number=message.number,
        decision_token=message.decision_token,
        ended_by=_back(_ROUND_END, message.ended_by),
        num_started=message.num_started,
        num_finished=message.num_finished,
        num_rejected=message.num_rejected,
        num_live=message.num_live,
        best_score=message.best_score,
        scores=tuple(message.scores),
        session_slots=message.session_slots,
        freed_slots=message.freed_slots,
        capacity_slots=message.capacity_slots,
        generated_tokens=message.generated_tokens,
        extend_ms=message.extend_ms,
        score_ms=message.score_ms,
        prune_ms=message.prune_ms,
        num_vetoed=message.num_vetoed,
        num_lost=message.num_lost,
        alpha=message.alpha,
        candidates=tuple(
            c.CandidateTrace(each.candidate_id, each.score, _back(_FATE, each.fate))
            for each in message.candidates
        ),
    )


def ranked_to_wire(ranked: c.RankedCandidate) -> orchestrator_pb2.RankedCandidate:
    return orchestrator_pb2.RankedCandidate(
        candidate_id=ranked.id,
        text=ranked.text,
        score=ranked.score,
        finish_reason=_FINISH[ranked.finish],
        num_tokens=ranked.num_tokens,
        mean_logprob=ranked.mean_logprob,
        token_ids=ranked.token_ids,
        logprobs=ranked.logprobs,
        rewards=ranked.rewards,
        vetoed=ranked.vetoed,
    )


def ranked_from_wire(message: orchestrator_pb2.RankedCandidate) -> c.RankedCandidate:
    return c.RankedCandidate(
        id=message.candidate_id,
        text=message.text,
        score=message.score,
        finish=_back(_ENDED, message.finish_reason),
        num_tokens=message.num_tokens,
        mean_logprob=message.mean_logprob,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        rewards=tuple(message.rewards),
        vetoed=message.vetoed,
    )


def usage_to_wire(usage: c.Usage) -> orchestrator_pb2.Usage:
    return orchestrator_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.generated_tokens,
        answer_tokens=usage.answer_tokens,
        reward_tokens=usage.reward_tokens,
        freed_slots=usage.freed_slots,
        best_of_n_tokens_estimate=usage.best_of_n_tokens_estimate,
    )


def usage_from_wire(message: orchestrator_pb2.Usage) -> c.Usage:
    return c.Usage(
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        answer_tokens=message.answer_tokens,
        reward_tokens=message.reward_tokens,
        freed_slots=message.freed_slots,
        best_of_n_tokens_estimate=message.best_of_n_tokens_estimate,
    )


def generation_to_wire(generation: c.Generation) -> orchestrator_pb2.GenerateResponse:
    best, timings = generation.best, generation.timings
    return orchestrator_pb2.GenerateResponse(
        request_id=generation.request_id,
        text=best.text,
        score=best.score,
        finish_reason=_FINISH[best.finish],
        candidates=[ranked_to_wire(ranked) for ranked in generation.candidates],
        rounds=[trace_to_wire(trace) for trace in generation.rounds],
        usage=usage_to_wire(generation.usage),
        cached=generation.cached,
        degraded=generation.degraded,
        fingerprints=orchestrator_pb2.Fingerprints(
            generator=generation.generator_fingerprint, reward=generation.reward_fingerprint
        ),
        timings=orchestrator_pb2.Timings(
            total_ms=timings.total_ms,
            queue_ms=timings.queue_ms,
            open_ms=timings.open_ms,
            extend_ms=timings.extend_ms,
            score_ms=timings.score_ms,
            prune_ms=timings.prune_ms,
            first_round_ms=timings.first_round_ms,
        ),
        n=generation.n,
        degradations=[_DEGRADATION[each] for each in generation.degradations],
        hurried=generation.hurried,
    )


def generation_from_wire(message: orchestrator_pb2.GenerateResponse) -> c.Generation:
    timings = message.timings
    return c.Generation(
        candidates=tuple(map(ranked_from_wire, message.candidates)),
        rounds=tuple(trace_from_wire(trace) for trace in message.rounds),
        usage=usage_from_wire(message.usage),
        timings=c.Timings(
            total_ms=timings.total_ms,
            queue_ms=timings.queue_ms,
            open_ms=timings.open_ms,
            extend_ms=timings.extend_ms,
            score_ms=timings.score_ms,
            prune_ms=timings.prune_ms,
            first_round_ms=timings.first_round_ms,
        ),
        n=message.n,
        request_id=message.request_id,
        generator_fingerprint=message.fingerprints.generator,
        reward_fingerprint=message.fingerprints.reward,
        cached=message.cached,
        degradations=tuple(_back(_DEGRADATION, value) for value in message.degradations),
        hurried=message.hurried,
    )


def event_to_wire(event: c.Event) -> orchestrator_pb2.GenerateStreamResponse:
    match event:
        case c.Admitted():
            admitted = orchestrator_pb2.Admitted(
                request_id=event.request_id, n=event.n, prompt_tokens=event.prompt_tokens
            )
            return orchestrator_pb2.GenerateStreamResponse(admitted=admitted)
        case c.RoundCompleted():
            completed = orchestrator_pb2.RoundCompleted(
                round=trace_to_wire(event.trace),
                survivors=event.survivors,
                best_text=event.best_text,
            )
            return orchestrator_pb2.GenerateStreamResponse(round_completed=completed)
        case c.Finished():
            answer = generation_to_wire(event.generation)
            return orchestrator_pb2.GenerateStreamResponse(finished=answer)


def event_from_wire(message: orchestrator_pb2.GenerateStreamResponse) -> c.Event:
    match message.WhichOneof("event"):
        case "admitted":
            admitted = message.admitted
            return c.Admitted(admitted.n, admitted.prompt_tokens, admitted.request_id)
        case "round_completed":
            completed = message.round_completed
            return c.RoundCompleted(
                trace=trace_from_wire(completed.round),
                survivors=tuple(completed.survivors),
                best_text=completed.best_text,
            )
        case "finished":
            return c.Finished(generation_from_wire(message.finished))
        case _:
            raise ValueError("an event of no known kind")


# The record of a request


def record_to_wire(record: c.RequestRecord) -> orchestrator_pb2.RequestRecord:
    return orchestrator_pb2.RequestRecord(
        request_id=record.request_id,
        started_unix_s=record.started_unix_s,
        selection=selection_to_wire(record.selection),
        max_tokens=record.max_tokens,
        outcome=record.outcome,
        elapsed_ms=record.elapsed_ms,
        queued_at_ms=record.queued_at_ms,
        running_at_ms=record.running_at_ms,
        opened_at_ms=record.opened_at_ms,
        n=record.n,
        prompt_tokens=record.prompt_tokens,
        rounds=[
            orchestrator_pb2.RecordedRound(start_ms=each.start_ms, trace=trace_to_wire(each.trace))
            for each in record.rounds
        ],
        source=_SOURCE[record.source],
        answer_candidate_id=record.answer_id,
        score=record.score,
        usage=usage_to_wire(record.usage) if record.usage else None,
        degradations=[_DEGRADATION[each] for each in record.degradations],
        hurried=record.hurried,
    )


def record_from_wire(message: orchestrator_pb2.RequestRecord) -> c.RequestRecord:
    return c.RequestRecord(
        request_id=message.request_id,
        started_unix_s=message.started_unix_s,
        selection=selection_from_wire(message.selection, c.Schedule(), []),
        max_tokens=message.max_tokens,
        outcome=message.outcome,
        elapsed_ms=message.elapsed_ms,
        queued_at_ms=message.queued_at_ms if message.HasField("queued_at_ms") else None,
        running_at_ms=message.running_at_ms if message.HasField("running_at_ms") else None,
        opened_at_ms=message.opened_at_ms if message.HasField("opened_at_ms") else None,
        n=message.n,
        prompt_tokens=message.prompt_tokens,
        rounds=tuple(
            c.RecordedRound(each.start_ms, trace_from_wire(each.trace)) for each in message.rounds
        ),
        source=_back(_SOURCE, message.source),
        answer_id=message.answer_candidate_id,
        score=message.score,
        usage=usage_from_wire(message.usage) if message.HasField("usage") else None,
        degradations=tuple(_back(_DEGRADATION, value) for value in message.degradations),
        hurried=message.hurried,
    )


# The descriptions of the orchestrator and of the reward service


def service_to_wire(
    description: c.ServiceDescription,
) -> orchestrator_pb2.OrchestratorServiceDescribeResponse:
    return orchestrator_pb2.OrchestratorServiceDescribeResponse(
        generator=generator_to_wire(description.generator),
        rewards=description.rewards,
        cache_available=description.cache_available,
        running=description.running,
        queued=description.queued,
        default_schedule=schedule_to_wire(description.default_schedule),
        num_answers=description.num_answers,
        num_degraded=description.num_degraded,
        num_hurried=description.num_hurried,
    )


def service_from_wire(
    message: orchestrator_pb2.OrchestratorServiceDescribeResponse,
) -> c.ServiceDescription:
    return c.ServiceDescription(
        generator=generator_from_wire(message.generator),
        rewards=tuple(message.rewards),
        cache_available=message.cache_available,
        running=message.running,
        queued=message.queued,
        default_schedule=schedule_from_wire(message.default_schedule, c.Schedule()),
        num_answers=message.num_answers,
        num_degraded=message.num_degraded,
        num_hurried=message.num_hurried,
    )


def reward_from_wire(message: reward_pb2.RewardDescription) -> c.RewardDescription:
    return c.RewardDescription(
        name=message.name,
        fingerprint=message.fingerprint,
        description=message.description,
        max_batch=message.max_batch,
    )


# Any message, for people and scripts


def to_plain(message: Message) -> dict[str, object]:
    """JSON types under proto field names; absent fields are left out.

    Unlike protobuf's own JSON, 64-bit integers stay numbers.
    """
    return {
        field.name: _plain_field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_field(field: Any, value: Any) -> object:
    if field.is_repeated:
        return [_plain_value(field, item) for item in value]
    return _plain_value(field, value)


def _plain_value(field: Any, value: Any) -> object:
    if field.message_type:
        return to_plain(value)
    if field.enum_type:
        return field.enum_type.values_by_number[value].name
    return value
