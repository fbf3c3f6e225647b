"""The orchestrator itself: validate, look in the cache, join a flight, be admitted, run, store.

Decides everything, holds no model. Knows no wire: the servicer unpacks and packs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from orchestrator import instruments
from orchestrator.admission import Admission
from orchestrator.cache import Cache, Hit, is_as_asked
from orchestrator.composition import LIKELIHOOD, Composite, check_expansion, expanded
from orchestrator.flight import Flight, Flights
from orchestrator.journal import Entry, Journal
from orchestrator.keys import Keys, cache_keys, tenant_digest
from orchestrator.refresh import Refreshes
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel, fingerprint_of
from orchestrator.shadowing import Shadows
from orchestrator.shared_flight import SharedFlights, Turn
from specrej import telemetry
from specrej.contracts import (
    Admitted,
    Algorithm,
    AnswerSource,
    CacheControl,
    Degradation,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    RankedCandidate,
    RequestRecord,
    RewardDescription,
    RoundCompleted,
    Schedule,
    Scorer,
    Selection,
    ServiceDescription,
    WeightedReward,
)
from specrej.errors import InvalidRequest, NotFound, Unavailable, Violation
from specrej.telemetry import names
from specrej.validation import check_request, raise_if_any

T = TypeVar("T")

_REWARDS_PATH = "selection.rewards"


class Rewards(Protocol):
    """What the orchestrator needs of a reward service."""

    def scorer(self, name: str) -> Scorer: ...

    async def describe(self) -> Sequence[RewardDescription]: ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """A request that can be served: canonical, with what will make its answer.

    Its rewards are in the order of their names, so that equal requests have equal answers to the
    last field; `reward_order` has the index of each reward in the caller's order.
    """

    request: GenerationRequest
    reward_order: tuple[int, ...]
    candidate_tokens: int  # what it may come to
    tenant: str  # others share neither its answers nor its prompt prefixes
    keys: Keys
    generator_fingerprint: str
    reward_fingerprint: str
    arrived: float  # time.perf_counter()
    time_left_s: float | None  # then
    likelihood_instead: bool  # of rewards that nobody can describe
    model: str  # that is served
    entry: Entry | None = None  # what is remembered of it; None: nothing

    def left_s(self) -> float | None:
        """Seconds to the deadline."""
        if self.time_left_s is None:
            return None
        return self.time_left_s - (time.perf_counter() - self.arrived)

    def fits(self, generation: Generation) -> bool:
        """Whether an answer was made by whom the keys name: others may serve by now."""
        planned = self.generator_fingerprint, self.reward_fingerprint
        return planned == (generation.generator_fingerprint, generation.reward_fingerprint)


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
        shared_flights: SharedFlights | None = None,
        refreshes: Refreshes | None = None,
        shadows: Shadows | None = None,
        journal: Journal | None = None,
        log_texts: bool = False,
        describe_every_s: float = 2.0,
    ) -> None:
        """Without `shared_flights`, equal requests are one generation in this process only.

        Backends are asked to describe themselves at most every `describe_every_s` seconds.
        `log_texts`: a request's line in the log has its prompt and its answer.

        `default_schedule` is for requests that name none; whoever unpacks them fills it in.
        `composites`, valid ones, come before rewards of their names. `default_reward` is for
        requests that name none: a reward, a composite or, if empty, the reward service's first.
        """
        self.default_schedule = default_schedule or Schedule()
        self._composites = {composite.name: composite for composite in composites}
        self._default_reward = default_reward
        self._num_answers = self._num_degraded = self._num_hurried = 0
        self._generator = generator
        self._rewards = rewards
        self._cache = cache
        self._admission = admission
        self._flights: Flights[Generation] = Flights()
        self._shared_flights = shared_flights
        self._refreshes = refreshes or Refreshes()
        self._shadows = shadows or Shadows(share=0.0)
        self._journal = journal or Journal()
        self._log_texts = log_texts
        self._described = _Recent(generator.describe, describe_every_s)
        self._described_rewards = _Recent(rewards.describe, describe_every_s)

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._refreshes.aclose()
        await self._shadows.aclose()

    async def describe(self) -> ServiceDescription:
        """Models, rewards and load, as of now."""
        names = self._names(reward.name for reward in await self._described_rewards.get())
        return ServiceDescription(
            generator=await self._generator.describe(),
            rewards=tuple(sorted(names, key=lambda name: name != self._default_reward)),
            cache_available=await self._cache.available(),
            running=self._admission.running,
            queued=self._admission.queued,
            default_schedule=self.default_schedule,
            num_answers=self._num_answers,
            num_degraded=self._num_degraded,
            num_hurried=self._num_hurried,
        )

    async def generate(
        self,
        request: GenerationRequest,
        *,
        tenant: str,
        violations: Sequence[Violation] = (),
        time_left_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Events of one request, the last one `Finished`; close the iterator when done with it.

        `violations` were found while the request was unpacked; `time_left_s`: to its deadline.

        Raises:
            SpecrejError: whatever its caller must be told.
        """
        arrived = time.perf_counter()
        request_id = uuid.uuid4().hex
        instruments.asked(request, request_id, with_texts=self._log_texts)
        with telemetry.span(names.SPAN_PLAN):
            plan = await self._plan(request, tenant, violations, arrived, time_left_s)
        instruments.planned(plan.model, plan.request.selection)
        with self._written(plan, request_id) as entry:
            async with aclosing(self._answer(replace(plan, entry=entry))) as events:
                async for event in events:
                    entry.saw(event)
                    instruments.saw(event, with_texts=self._log_texts)
                    yield _signed(event, request_id, plan.reward_order)

    def record(self, request_id: str, *, tenant: str) -> RequestRecord:
        """How one of the tenant's last requests went, or goes.

        Raises:
            NotFound: it is not remembered.
        """
        return self._journal.find(request_id, tenant)

    def _written(self, plan: _Plan, request_id: str) -> AbstractContextManager[Entry]:
        return self._journal.writing(
            request_id,
            plan.tenant,
            plan.request.selection,
            plan.request.sampling.max_tokens,
            arrived=plan.arrived,
            time_left_s=plan.time_left_s,
        )

    def _answer(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """From the cache, from a flight under way, or from a run of its own."""
        if plan.likelihood_instead:
            return self._run(plan)
        match plan.request.cache:
            case CacheControl.USE | CacheControl.USE_BETTER:
                return self._use_cache(plan)
            case CacheControl.REFRESH:
                return self._run_and_store(plan)
            case CacheControl.BYPASS:
                return self._run(plan)

    async def _use_cache(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """What is stored, at once, even while it is made anew; else from a flight."""
        num_landed = self._flights.num_landed
        with telemetry.span(names.SPAN_LOOKUP):
            hit = await self._stored(plan)
        if hit:
            yield self._served(plan, hit)
            return
        async with aclosing(self._fly(plan, num_landed)) as events:
            async for event in events:
                yield event

    async def _stored(self, plan: _Plan) -> Hit | None:
        if plan.request.cache is CacheControl.USE_BETTER:
            return await self._cache.get_better(plan.keys)
        return await self._cache.get(plan.keys.answer)

    def _served(self, plan: _Plan, hit: Hit) -> Finished:
        if hit.stale:
            self._refreshes.start(plan.keys.answer, partial(self._make_anew, plan))
        return Finished(hit.generation, AnswerSource.CACHE)

    async def _fly(self, plan: _Plan, num_landed: int | None = None) -> AsyncGenerator[Event, None]:
        """From a flight under way, here or in another process, or from a run of its own.

        `num_landed`: flights that had landed before this caller looked for what is stored; None if
        that is not to be looked for. One that landed since may have been ours.
        """
        key = plan.keys.answer
        # What is an error to one caller is an answer to another, who would take a weaker one.
        flown = f"{key}:{plan.request.allow_degraded}"
        async with AsyncExitStack() as stack:
            instruments.count_wait(self._flights.is_led(flown))
            flight = await instruments.entered(stack, names.SPAN_FLIGHT, self._flights.join(flown))
            if flight.landed:
                # Made once, for the leader: for this caller it comes from memory.
                yield Finished(replace(flight.result, cached=True), AnswerSource.FLIGHT)
                return
            missed_one = num_landed is not None and num_landed != self._flights.num_landed
            if missed_one and (hit := await self._cache.get(key)):
                flight.land(hit.generation)
                yield Finished(hit.generation, AnswerSource.CACHE)
                return
            async with aclosing(self._lead(plan, flight)) as events:
                async for event in events:
                    yield event

    async def _lead(self, plan: _Plan, flight: Flight[Generation]) -> AsyncGenerator[Event, None]:
        """Make the answer, unless another process does; it lands for all who wait here."""
        async with AsyncExitStack() as stack:
            turn = await self._shared_turn(stack, plan.keys.answer)
            if turn and turn.answer:
                flight.land(turn.answer)
                yield Finished(turn.answer, AnswerSource.FLIGHT)
                return
            async with aclosing(self._run_and_store(plan, turn)) as events:
                async for event in events:
                    # What this caller's deadline or leniency made of it is not for the others.
                    if isinstance(event, Finished) and is_as_asked(event.generation):
                        flight.land(event.generation)
                    yield event

    async def _shared_turn(self, stack: AsyncExitStack, key: str) -> Turn | None:
        if not self._shared_flights:
            return None
        joining = self._shared_flights.join(key)
        return await instruments.entered(stack, names.SPAN_SHARED_FLIGHT, joining)

    async def _run_and_store(
        self, plan: _Plan, turn: Turn | None = None
    ) -> AsyncGenerator[Event, None]:
        async with aclosing(self._run(plan)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    with telemetry.span(names.SPAN_STORE):
                        await self._keep(plan, event.generation, turn)
                yield event

    async def _keep(self, plan: _Plan, generation: Generation, turn: Turn | None) -> None:
        """Store an answer and tell who waits; never at the price of the caller's deadline."""
        left_s = plan.left_s()
        try:
            async with asyncio.timeout(None if left_s is None else left_s / 2):
                stored = plan.fits(generation) and await self._cache.put(plan.keys, generation)
                if turn:
                    await turn.land(stored)
        except TimeoutError:
            if turn:
                turn.abandon()

    async def _make_anew(self, plan: _Plan) -> None:
        """Replace an answer that is stale, at nobody's expense and in nobody's time."""
        now = time.perf_counter()
        strict = replace(plan.request, allow_degraded=False)
        plan = replace(plan, request=strict, arrived=now, time_left_s=None, entry=None)
        with telemetry.span(names.SPAN_REFRESH):
            async with aclosing(self._fly(plan)) as events:
                async for _ in events:
                    pass

    async def _run(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """Admission, then the loop."""
        waiting = time.perf_counter()
        if plan.entry:
            plan.entry.queued()
        turn = self._admission.enter(plan.tenant, plan.candidate_tokens, plan.left_s())
        async with AsyncExitStack() as stack:
            await instruments.admitted(stack, turn)
            if plan.entry:
                plan.entry.running()
            queue_ms, before_run_ms = _ms_since(waiting), _ms_since(plan.arrived)
            panel = Panel([self._scorer(each.name) for each in plan.request.selection.rewards])
            salt = tenant_digest(plan.tenant)
            with _public_paths():
                watched = self._shadows.watch(plan.request, self._generator, panel, salt)
                notes = watched.notes if watched else None
                events = run(plan.request, self._generator, panel, salt, plan.left_s(), notes=notes)
                async with aclosing(events):
                    async for event in events:
                        if watched and isinstance(event, Finished):
                            is_busy = self._admission.queued > 0
                            self._shadows.follow(watched, event.generation, is_busy=is_busy)
                        completed = _completed(event, plan, queue_ms, before_run_ms)
                        self._count(completed, plan.request.selection.algorithm)
                        yield completed

    async def _plan(
        self,
        request: GenerationRequest,
        tenant: str,
        violations: Sequence[Violation],
        arrived: float,
        time_left_s: float | None,
    ) -> _Plan:
        """The request, checked and with its defaults filled in."""
        generator = await self._described.get()
        raise_if_any(
            [
                *violations,
                *check_request(request, generator.context_tokens, generator.max_candidates),
            ]
        )
        if request.model not in ("", generator.model):
            raise NotFound(f"no such model, there is: {generator.model}")
        chosen = request.selection
        if chosen.algorithm is Algorithm.BEST_OF_N:
            chosen = replace(chosen, alpha=0.0)
        likelihood_instead = False
        try:
            rewards, reward_fingerprint = await self._plan_rewards(chosen)
        except Unavailable:  # and no reward has ever been described
            if not request.allow_degraded:
                raise
            likelihood_instead = True
            rewards, reward_fingerprint = [WeightedReward(LIKELIHOOD)], ""
        ordered = sorted(rewards, key=lambda reward: reward.name)
        planned = replace(request, selection=replace(chosen, rewards=tuple(ordered)))
        return _Plan(
            planned,
            tuple(ordered.index(reward) for reward in rewards),
            _candidate_tokens(request, generator),
            tenant,
            cache_keys(
                planned,
                tenant=tenant,
                generator_fingerprint=generator.fingerprint,
                reward_fingerprint=reward_fingerprint,
            ),
            generator.fingerprint,
            reward_fingerprint,
            arrived,
            time_left_s,
            likelihood_instead,
            generator.model,
        )

    async def _plan_rewards(self, selection: Selection) -> tuple[list[WeightedReward], str]:
        """The rewards that judge, composites expanded, and their fingerprint."""
        named = selection.rewards or (WeightedReward(await self._default_name()),)
        raise_if_any(list(check_expansion(named, self._composites, _REWARDS_PATH)))
        parts = expanded(named, self._composites)
        known: dict[str, RewardDescription] = {}
        if any(part.name != LIKELIHOOD for _, part in parts):
            known = {reward.name: reward for reward in await self._described_rewards.get()}
        for index, part in parts:
            self._check_known(part.name, named[index].name, known)
        raise_if_any(list(_check_batches(parts, selection.n, known)))
        rewards = [part for _, part in parts]
        own = [known[part.name].fingerprint if part.name in known else "" for part in rewards]
        return rewards, fingerprint_of(rewards, own)

    async def _default_name(self) -> str:
        return self._default_reward or (await self._described_rewards.get())[0].name

    def _check_known(self, name: str, asked: str, known: Mapping[str, RewardDescription]) -> None:
        """Raises NotFound unless there is the reward that was asked for, perhaps in a composite."""
        if name == LIKELIHOOD or name in known:
            return
        what = f"reward {name} of composite {asked}" if asked in self._composites else "such reward"
        raise NotFound(f"no {what}, there are: {', '.join(self._names(known))}")

    def _names(self, served: Iterable[str]) -> list[str]:
        """What a request may ask for: what the reward service serves, composites, likelihood."""
        return list(dict.fromkeys((*served, *self._composites, LIKELIHOOD)))

    def _count(self, event: Event, algorithm: Algorithm) -> None:
        if isinstance(event, Finished):
            self._num_answers += 1
            self._num_degraded += event.generation.degraded
            self._num_hurried += event.generation.hurried
            instruments.count_run(event.generation, algorithm)
        elif isinstance(event, RoundCompleted):
            instruments.count_round(event.trace)

    def _scorer(self, name: str) -> Scorer:
        return LikelihoodScorer() if name == LIKELIHOOD else self._rewards.scorer(name)


def _candidate_tokens(request: GenerationRequest, generator: GeneratorDescription) -> int:
    """Candidates times the tokens each may grow to; as many as fit, where the caller leaves n."""
    n = request.selection.n or generator.max_candidates
    return max(1, min(n * request.sampling.max_tokens, generator.slots.capacity))


class _Recent(Generic[T]):
    """A backend's description, asked for again when it is old; an old one beats none."""

    def __init__(self, ask: Callable[[], Awaitable[T]], max_age_s: float) -> None:
        self._ask = ask
        self._max_age_s = max_age_s
        self._value: T | None = None
        self._asked = 0.0

    async def get(self) -> T:
        """Raises Unavailable if the backend has never answered."""
        if self._value is None or time.monotonic() - self._asked > self._max_age_s:
            try:
                self._value = await self._ask()
            except Unavailable:
                # What follows will tell whether the backend is really needed.
                if self._value is None:
                    raise
            self._asked = time.monotonic()
        return self._value


def _check_batches(
    parts: Sequence[tuple[int, WeightedReward]], n: int, known: Mapping[str, RewardDescription]
) -> Iterator[Violation]:
    """Every reward must take all candidates at once: better found out before the first round."""
    for index, reward in parts:
        limit = known[reward.name].max_batch if reward.name in known else n
        if n > limit:
            description = f"{reward.name} takes at most {limit} candidates, n is {n}"
            yield Violation(f"{_REWARDS_PATH}[{index}]", description)


def _completed(event: Event, plan: _Plan, queue_ms: float, before_run_ms: float) -> Event:
    """A run's answer with what only the orchestrator knows; the run's clock began with the run."""
    if not isinstance(event, Finished):
        return event
    generation, timings = event.generation, event.generation.timings
    if plan.likelihood_instead:
        degradations = (*generation.degradations, Degradation.REWARD)
        generation = replace(generation, degradations=degradations)
    since_arrival = replace(
        timings,
        total_ms=before_run_ms + timings.total_ms,
        queue_ms=queue_ms,
        first_round_ms=before_run_ms + timings.first_round_ms,
    )
    return Finished(
        replace(
            generation,
            generator_fingerprint=generation.generator_fingerprint or plan.generator_fingerprint,
            reward_fingerprint=generation.reward_fingerprint or plan.reward_fingerprint,
            timings=since_arrival,
        )
    )


@contextmanager
def _public_paths() -> Iterator[None]:
    """What a generator says of its own fields is told of the caller's."""
    try:
        yield
    except InvalidRequest as error:
        violations = [Violation(_public_path(v.field), v.description) for v in error.violations]
        raise InvalidRequest(violations, reason=error.reason, metadata=error.metadata) from error


def _public_path(field: str) -> str:
    path = field.removeprefix("open.")
    return "selection.n" if path == "n" else path


def _ms_since(then: float) -> float:
    return (time.perf_counter() - then) * 1e3


def _signed(event: Event, request_id: str, reward_order: Sequence[int]) -> Event:
    """An event as its caller gets it: with the request's id, values in the order of its rewards."""
    match event:
        case Admitted():
            return replace(event, request_id=request_id)
        case Finished(generation):
            candidates = tuple(_in_order(each, reward_order) for each in generation.candidates)
            generation = replace(generation, candidates=candidates, request_id=request_id)
            return Finished(generation, event.source)
        case _:
            return event


def _in_order(ranked: RankedCandidate, reward_order: Sequence[int]) -> RankedCandidate:
    """Where the likelihood stood in for the rewards there is one value, whatever was asked for."""
    if len(ranked.rewards) != len(reward_order):
        return ranked
    return replace(ranked, rewards=tuple(ranked.rewards[index] for index in reward_order))
