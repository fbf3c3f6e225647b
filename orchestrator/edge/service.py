"""The orchestrator: plan a request, find its answer or wait for admission and run, record it.

It holds no model and does not depend on the wire: the servicer converts messages.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from orchestrator.cache import Answers, Cache, tenant_digest
from orchestrator.edge.admission import Admission
from orchestrator.edge.extractors import Extract
from orchestrator.edge.planning import Defaults, Plan, Planner, Rewards, characters_to_tokens
from orchestrator.loop.progress import WithinRounds
from orchestrator.loop.run import run, spec_of
from orchestrator.loop.scoring import checked
from orchestrator.observe.requests import ObservedRequest, note_request, observing
from specrej import contracts as c
from specrej import telemetry
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.telemetry import names


class Orchestrator:
    """Answers requests with the best of many candidates."""

    def __init__(
        self,
        generator: c.Generator,
        rewards: Rewards,
        cache: Cache,
        admission: Admission,
        *,
        defaults: Defaults = Defaults(),  # noqa: B008
        extractors: Mapping[str, Extract] = MappingProxyType({}),
    ) -> None:
        """`extractors`: functions of votes by name."""
        self._defaults = defaults
        secret = cache.secret
        self._planner = Planner(generator, rewards, defaults, secret=secret, extractors=extractors)
        self._generator = generator
        self._rewards = rewards
        self._cache = cache
        self._admission = admission
        self._answers = Answers(cache)

    async def describe(self) -> c.ServiceDescription:
        """Models, rewards, load and defaults.

        Raises:
            SpecrejError: a backend is away.
        """
        generator = await self._generator.describe()
        return c.ServiceDescription(
            generator=generator,
            rewards=await self._planner.reward_names(),
            cache_available=await self._cache.redis.available(),
            running=self._admission.running,
            queued=self._admission.queued,
            default_schedule=self._defaults.schedule_for(generator),
            default_n=self._defaults.n,
            default_max_tokens=self._defaults.max_tokens,
        )

    async def generate(
        self,
        request: c.GenerationRequest,
        emit: Callable[[c.Event], None],
        *,
        tenant: str,
        weight: float,
        violations: Sequence[Violation] = (),
        time_left_s: float = math.inf,
        within: WithinRounds | None = None,
    ) -> None:
        """Answer one request: `emit` receives each event as it happens, `Finished` last; `within`
        those within rounds.

        `emit` must return at once: the run waits for it. `weight` is the tenant's; `violations`
        are those of the message's conversion; `time_left_s`: to the deadline.

        Raises:
            SpecrejError: see `specrej.contracts.errors`.
        """
        request_id = uuid.uuid4().hex
        note_request(request, request_id, tenant)
        with telemetry.span(names.SPAN_PLAN):
            plan = await self._planner.plan(request, tenant, weight, violations, time_left_s)
        if within:
            emit_within = within.emit

            def deliver_within(event: c.Progress | c.TextDelta) -> None:
                if isinstance(event, c.TextDelta):
                    event = replace(event, parts=_named(event.parts, request_id))
                emit_within(event)

            within = replace(within, emit=deliver_within)
        with observing(plan.request, plan.model, plan.arrived, time_left_s) as observed:

            def deliver(event: c.Event) -> None:
                observed.add(event)
                emit(_for_caller(event, request_id, plan.reward_order))

            generation, source = await self._answers.get_or_run(
                plan.key_of,
                partial(self._run, plan, observed, deliver, within),
                # Requests share a run only if the same outcome suits them: one that allows
                # degradation may get an answer where another one gets an error.
                group=str(plan.request.allow_degraded),
                control=plan.cache,
                left_s=lambda: plan.left_s,
                made_by=(plan.generator_fingerprint, plan.reward_fingerprint),
            )
            deliver(c.Finished(generation, source))

    async def score(
        self,
        prompt: c.Prompt,
        responses: Sequence[str],
        *,
        reward: str,
        unfinished: bool,
        data: str,
        tenant: str,
        weight: float,
        time_left_s: float = math.inf,
    ) -> tuple[str, c.Scores]:
        """The name of the reward ("" is the default), and its score for each response.

        Raises:
            SpecrejError: see `specrej.contracts.errors`.
        """
        name, prompt = await self._planner.reward_for(prompt, responses, reward, data)
        finish = None if unfinished else c.FinishReason.STOP
        candidates = [c.Candidate(n, text, 0, 0.0, finish) for n, text in enumerate(responses)]
        tokens = characters_to_tokens(sum(map(len, responses)))
        try:
            async with (
                self._admission.enter(tenant, max(1, tokens), time_left_s, weight),
                self._rewards.open(name, prompt, data) as session,
            ):
                return name, await checked(session, candidates)
        except InvalidRequest as error:
            raise _with_public_paths(error) from error

    async def _run(
        self,
        plan: Plan,
        observed: ObservedRequest,
        deliver: Callable[[c.Event], None],
        within: WithinRounds | None,
    ) -> c.Generation:
        """The answer of a run; its other events are delivered."""
        salt = tenant_digest(plan.tenant)  # the generator knows a tenant by it
        async with AsyncExitStack() as stack:
            try:
                if plan.must_check:  # before it holds a permit
                    await self._generator.check(spec_of(plan.request, salt))
                tokens, left_s = plan.candidate_tokens, plan.left_s
                entering = self._admission.enter(plan.tenant, tokens, left_s, plan.weight)
                permit, queue_ms = await observed.admitted(stack, entering)
            except InvalidRequest as error:
                raise _with_public_paths(error) from error
            permit.unused = plan.grown_tokens
            before_run_ms = (time.perf_counter() - plan.arrived) * 1e3
            events = run(
                plan.request,
                self._generator,
                plan.scorers,
                salt,
                plan.left_s,
                within=within,
                weight=plan.weight,
                cheap=plan.cheap,
                extract=plan.extract,
                are_valid=plan.are_valid,
            )
            try:
                async with aclosing(events):
                    async for event in events:
                        if isinstance(event, c.Finished):
                            answer = _completed(event.generation, plan, queue_ms, before_run_ms)
                            continue
                        if isinstance(event, c.RoundCompleted):
                            permit.unused = max(0, permit.unused - event.trace.generated_tokens)
                        deliver(event)
            except InvalidRequest as error:
                raise _with_public_paths(error) from error
        return answer


def _completed(
    generation: c.Generation, plan: Plan, queue_ms: float, before_run_ms: float
) -> c.Generation:
    """A run's answer with times since the request's arrival, and what the plan adds."""
    timings = generation.timings
    added = (c.Degradation.REWARD,) if plan.has_no_rewards else ()
    degradations = (*generation.degradations, *added)
    judge = "" if c.Degradation.REWARD in degradations else plan.reward_fingerprint
    return replace(
        generation,
        degradations=degradations,
        generator_fingerprint=generation.generator_fingerprint or plan.generator_fingerprint,
        reward_fingerprint=generation.reward_fingerprint or judge,
        timings=replace(
            timings,
            total_ms=before_run_ms + timings.total_ms,
            queue_ms=queue_ms,
            first_round_ms=before_run_ms + timings.first_round_ms,
        ),
    )


def _with_public_paths(error: InvalidRequest) -> InvalidRequest:
    """The error with field paths of the public request instead of the generator's."""
    fields = [violation.field.removeprefix("open.") for violation in error.violations]
    violations = [
        Violation(f"selection.{name}" if name in ("n", "min_answers") else name, v.description)
        for name, v in zip(fields, error.violations, strict=True)
    ]
    return InvalidRequest(violations, reason=error.reason, metadata=error.metadata)


def _for_caller(event: c.Event, request_id: str, reward_order: Sequence[int]) -> c.Event:
    """An event with the request's id, and raw scores in the order of the caller's rewards."""
    match event:
        case c.Admitted():
            return replace(event, request_id=request_id)
        case c.Finished(generation):
            candidates = tuple(
                replace(_in_order(ranked, reward_order), parts=_named(ranked.parts, request_id))
                for ranked in generation.candidates
            )
            generation = replace(generation, candidates=candidates, request_id=request_id)
            return c.Finished(generation, event.source)
        case _:
            return event


P = TypeVar("P", c.AnswerParts, c.PartsDelta)


def _named(parts: P | None, request_id: str) -> P | None:
    """Parts whose calls have ids of this request: a conversation has several, and clients tell the
    results of calls by their ids."""
    if not parts or not parts.tool_calls:
        return parts
    prefix = f"call_{request_id[:12]}_"
    calls = [replace(call, id=call.id.replace("call_", prefix, 1)) for call in parts.tool_calls]
    return replace(parts, tool_calls=tuple(calls))


def _in_order(ranked: c.RankedCandidate, reward_order: Sequence[int]) -> c.RankedCandidate:
    # After a fallback there is one value, the likelihood, whatever the rewards were.
    if len(ranked.rewards) != len(reward_order):
        return ranked
    return replace(ranked, rewards=tuple(ranked.rewards[index] for index in reward_order))
