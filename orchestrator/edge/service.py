"""The orchestrator: plan, read the cache, join a flight, wait for admission, run, store.

It holds no model and does not depend on the wire: the servicer converts messages.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from orchestrator.background import BackgroundTasks
from orchestrator.cache import (
    Cache,
    Flight,
    Lease,
    SharedRecords,
    SharedSingleFlight,
    SingleFlight,
    tenant_digest,
)
from orchestrator.cache.records import MAX_LISTED
from orchestrator.edge.admission import Admission
from orchestrator.edge.planning import Plan, Planner, Rewards
from orchestrator.loop.composition import Composite
from orchestrator.loop.progress import WithinRounds
from orchestrator.loop.run import run
from orchestrator.observe import instruments
from orchestrator.observe.request_records import OpenRecord, RequestRecords
from orchestrator.observe.shadows import Shadows
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    AnswerSource,
    BackendState,
    CacheControl,
    Degradation,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    RankedCandidate,
    RequestRecord,
    RoundCompleted,
    Schedule,
    ServiceDescription,
)
from specrej.contracts.errors import InvalidRequest, NotFound, Overloaded, Violation
from specrej.security import Share
from specrej.telemetry import names


@dataclass(frozen=True, slots=True)
class _Lead:
    """A run that this request must make; its answer goes to the cache if `stores`, and to requests
    that wait for `flight` or `lease`."""

    stores: bool
    flight: Flight[Generation] | None = None
    lease: Lease | None = None

    def pause_timer(self) -> None:
        """Keep the lead while the run waits for its turn."""
        if self.flight:
            self.flight.pause_timer()

    def note_progress(self) -> None:
        """Keep the lead: the run has advanced."""
        if self.flight:
            self.flight.note_progress()


class Orchestrator:
    """Answers requests with the best of many candidates."""

    def __init__(
        self,
        generator: Generator,
        rewards: Rewards,
        cache: Cache,
        admission: Admission,
        *,
        default_schedule: Schedule | None = None,
        composites: Sequence[Composite] = (),
        default_reward: str = "",
        lead_s: float = 120.0,
        shared_flights: SharedSingleFlight | None = None,
        refreshes: BackgroundTasks | None = None,
        shadows: Shadows | None = None,
        records: RequestRecords | None = None,
        backends: Callable[[], Sequence[BackendState]] = tuple,
        log_texts: bool = False,
    ) -> None:
        """Without `shared_flights`, equal requests are one generation in this process only.
        `lead_s`: see `SingleFlight`.

        `default_schedule` is for requests that name none; the servicer fills it in. `composites`
        must be valid. `default_reward`: see `Planner`. `log_texts`: a request's
        log line has its prompt and its answer.
        """
        self.default_schedule = default_schedule or Schedule()
        self._planner = Planner(
            generator,
            rewards,
            composites,
            default_reward,
            secret=cache.secret,
        )
        self._num_answers = self._num_degraded = self._num_hurried = self._num_cached = 0
        self._num_refused = self._generated_tokens = self._saved_tokens = 0
        self._generator = generator
        self._cache = cache
        self._admission = admission
        self._flights: SingleFlight[Generation] = SingleFlight(lead_s)
        self._shared_flights = shared_flights
        self._refreshes = refreshes or BackgroundTasks("refreshing a stale answer")
        self._shadows = shadows or Shadows(share=0.0)
        self._records = records or RequestRecords()
        self._shared_records = SharedRecords(cache)
        self._records.on_ended = self._shared_records.keep
        self._backends = backends
        self._process_id = uuid.uuid4().hex
        self._log_texts = log_texts

    async def aclose(self) -> None:
        """Cancel background tasks and wait for their end."""
        await self._refreshes.aclose()
        await self._shadows.tasks.aclose()
        await self._shared_records.aclose()

    async def describe(self, *, with_backends: bool = False) -> ServiceDescription:
        """Models, rewards and load; with addresses and states of the backends on request.

        Raises:
            SpecrejError: a backend is away.
        """
        return ServiceDescription(
            generator=await self._generator.describe(),
            rewards=await self._planner.reward_names(),
            cache_available=await self._cache.redis.available(),
            running=self._admission.running,
            queued=self._admission.queued,
            default_schedule=self.default_schedule,
            num_answers=self._num_answers,
            num_degraded=self._num_degraded,
            num_hurried=self._num_hurried,
            process_id=self._process_id,
            num_cached=self._num_cached,
            num_refused=self._num_refused,
            generated_tokens=self._generated_tokens,
            saved_tokens_estimate=self._saved_tokens,
            backends=tuple(self._backends()) if with_backends else (),
        )

    async def record(self, request_id: str, *, tenant: str) -> RequestRecord:
        """The record of one of the tenant's latest requests.

        Raises:
            NotFound: there is none, or it is another tenant's; the error does not differ.
        """
        own = self._records.find(request_id, tenant)
        record = own or await self._shared_records.find(request_id, tenant)
        if record is None:
            raise NotFound("no record of such a request of this tenant")
        return record

    async def records(self, *, tenant: str) -> list[RequestRecord]:
        """The tenant's latest requests, those of other orchestrators included, without rounds."""
        shared = await self._shared_records.latest(tenant)
        own = self._records.latest(tenant, MAX_LISTED)
        latest = {record.request_id: record for record in (*shared, *own)}
        ordered = sorted(latest.values(), key=attrgetter("started_unix_s"), reverse=True)
        return ordered[:MAX_LISTED]

    async def generate(
        self,
        request: GenerationRequest,
        emit: Callable[[Event], None],
        *,
        tenant: str,
        share: Share,
        violations: Sequence[Violation] = (),
        time_left_s: float | None = None,
        within: WithinRounds | None = None,
    ) -> None:
        """Answer one request: `emit` receives each event as it happens, `Finished` last; `within`
        those within rounds.

        `emit` must return at once: the run waits for it. `share` is the tenant's; `violations`
        are those of the message's conversion; `time_left_s`: to the deadline.

        Raises:
            SpecrejError: see `specrej.contracts.errors`.
        """
        request_id = uuid.uuid4().hex
        digest = tenant_digest(tenant)
        instruments.note_request(request, request_id, digest, with_texts=self._log_texts)
        with telemetry.span(names.SPAN_PLAN):
            plan = await self._planner.plan(request, tenant, share, violations, time_left_s)
        selection = plan.request.selection
        instruments.note_plan(plan.model, selection)
        with self._records.recording(
            request_id,
            tenant,
            selection,
            request.sampling.max_tokens,
            arrived=plan.arrived,
            time_left_s=time_left_s,
        ) as record:
            async with aclosing(self._answer(plan, record, within=within)) as events:
                async for event in events:
                    record.add(event)
                    instruments.note_event(event, with_texts=self._log_texts)
                    emit(_for_caller(event, request_id, plan.reward_order))

    async def _answer(
        self,
        plan: Plan,
        record: OpenRecord | None = None,
        *,
        is_refresh: bool = False,
        within: WithinRounds | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Events of a plan: the answer of the cache or of an equal request, or those of a run."""
        async with AsyncExitStack() as stack:
            lead = await self._find_answer(plan, stack, is_refresh=is_refresh)
            if isinstance(lead, Finished):
                yield lead
                return
            if record:
                record.queued()
            lead.pause_timer()
            queue_ms = await self._admitted(plan, stack)
            if record:
                record.running()
            before_run_ms = _ms_since(plan.arrived)
            scorers, salt = self._planner.scorers(plan), tenant_digest(plan.tenant)
            watched = self._shadows.watch(plan.request, self._generator, scorers, salt)
            on_round = watched.take if watched else None
            events = run(
                plan.request,
                self._generator,
                scorers,
                salt,
                plan.left_s(),
                on_round=on_round,
                within=within,
            )
            async with aclosing(events):
                try:
                    async for event in events:
                        lead.note_progress()
                        if isinstance(event, RoundCompleted):
                            instruments.count_round(event.trace)
                            self._generated_tokens += event.trace.generated_tokens
                        if isinstance(event, Finished):
                            answer = _completed(event.generation, plan, queue_ms, before_run_ms)
                            if watched:
                                is_busy = self._admission.queued > 0
                                self._shadows.follow(watched, answer, is_busy=is_busy)
                            event = await self._finish(plan, answer, lead)
                        yield event
                except InvalidRequest as error:
                    raise _with_public_paths(error) from error

    async def _admitted(self, plan: Plan, stack: AsyncExitStack) -> float:
        """Wait for a permit, which the stack holds; the milliseconds that it took."""
        permit = self._admission.enter(
            plan.tenant, plan.candidate_tokens, plan.left_s(), plan.share
        )
        try:
            return await instruments.admitted(stack, permit)
        except Overloaded:
            self._num_refused += 1
            raise

    async def _find_answer(
        self, plan: Plan, stack: AsyncExitStack, *, is_refresh: bool
    ) -> Finished | _Lead:
        """The answer of the cache or of an equal request, or the lead if this request must run.

        The stack holds the flights that this request leads. A refresh skips the cache.
        """
        control, key = plan.request.cache, plan.keys.answer
        if plan.has_no_rewards or control is CacheControl.BYPASS:
            return _Lead(stores=False)
        if control is CacheControl.REFRESH:
            return _Lead(stores=True)
        # Requests share a run only if the same outcome suits them: one that allows degradation may
        # get an answer where another one gets an error.
        is_better_wanted = control is CacheControl.USE_BETTER
        conditions = (plan.request.allow_degraded, is_better_wanted, is_refresh)
        joining = self._flights.join(f"{key}:{conditions}", plan.left_s)
        flight = await instruments.entered(stack, names.SPAN_FLIGHT, joining)
        if flight.is_published:
            return Finished(replace(flight.result, cached=True), AnswerSource.FLIGHT)
        if not is_refresh:
            with telemetry.span(names.SPAN_LOOKUP):
                hit = await (
                    self._cache.get_better(plan.keys) if is_better_wanted else self._cache.get(key)
                )
            if hit:
                if hit.stale:
                    self._refreshes.start(key, partial(self._refresh, plan))
                flight.publish(hit.generation)
                self._num_cached += 1
                return Finished(hit.generation, AnswerSource.CACHE)
        if not self._shared_flights:
            return _Lead(stores=True, flight=flight)
        leasing = self._shared_flights.join(key, flight)
        lease = await instruments.entered(stack, names.SPAN_SHARED_FLIGHT, leasing)
        if lease.answer:
            flight.publish(lease.answer)
            return Finished(lease.answer, AnswerSource.FLIGHT)
        return _Lead(stores=True, flight=flight, lease=lease)

    async def _refresh(self, plan: Plan) -> None:
        """Replace a stale answer, without a deadline and without degradation."""
        strict = replace(plan.request, allow_degraded=False)
        plan = replace(plan, request=strict, arrived=time.perf_counter(), time_left_s=None)
        with telemetry.span(names.SPAN_REFRESH):
            async with aclosing(self._answer(plan, is_refresh=True)) as events:
                async for _ in events:
                    pass

    async def _finish(self, plan: Plan, generation: Generation, lead: _Lead) -> Finished:
        """Count a run's answer, give it to the requests that wait for it, and store it.

        Storing takes at most half of the time left.
        """
        self._num_answers += 1
        self._num_degraded += generation.degraded
        self._num_hurried += generation.hurried
        usage = generation.usage
        self._saved_tokens += max(0, usage.best_of_n_tokens_estimate - usage.generated_tokens)
        instruments.count_run(generation, plan.request.selection.algorithm)
        if lead.flight:  # those that wait here need not wait for the cache
            # An answer degraded only by a reward is final: all requests of a flight allow that.
            is_final = not generation.hurried and {*generation.degradations} <= {Degradation.REWARD}
            lead.flight.publish(generation, is_final=is_final)
        if lead.stores:
            left_s, lease = plan.left_s(), lead.lease
            with telemetry.span(names.SPAN_STORE):
                try:
                    async with asyncio.timeout(None if left_s is None else left_s / 2):
                        stored = plan.fits(generation)
                        stored = stored and await self._cache.put(plan.keys, generation)
                        if lease:
                            await lease.release(handing_over=stored)
                except TimeoutError:
                    if lease:
                        lease.abandon()
        return Finished(generation)


def _completed(
    generation: Generation, plan: Plan, queue_ms: float, before_run_ms: float
) -> Generation:
    """A run's answer with times since the request's arrival, and what the plan adds."""
    timings = generation.timings
    added = (Degradation.REWARD,) if plan.has_no_rewards else ()
    degradations = (*generation.degradations, *added)
    judge = "" if Degradation.REWARD in degradations else plan.reward_fingerprint
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


def _ms_since(then: float) -> float:
    return (time.perf_counter() - then) * 1e3


def _for_caller(event: Event, request_id: str, reward_order: Sequence[int]) -> Event:
    """An event with the request's id, and raw scores in the order of the caller's rewards."""
    match event:
        case Admitted():
            return replace(event, request_id=request_id)
        case Finished(generation):
            candidates = tuple(_in_order(ranked, reward_order) for ranked in generation.candidates)
            generation = replace(generation, candidates=candidates, request_id=request_id)
            return Finished(generation, event.source)
        case _:
            return event


def _in_order(ranked: RankedCandidate, reward_order: Sequence[int]) -> RankedCandidate:
    # After a fallback there is one value, the likelihood, whatever the rewards were.
    if len(ranked.rewards) != len(reward_order):
        return ranked
    return replace(ranked, rewards=tuple(ranked.rewards[index] for index in reward_order))
