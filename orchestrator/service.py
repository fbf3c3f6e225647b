"""The orchestrator itself: validate, look in the cache, join a flight, be admitted, run, store.

Decides everything, holds no model. Knows no wire: the servicer unpacks and packs.
"""

from __future__ import annotations

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
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Generic, Protocol, TypeVar

from orchestrator.admission import Admission
from orchestrator.cache import Cache, cache_key, tenant_digest
from orchestrator.composition import LIKELIHOOD, Composite, check_expansion, expanded
from orchestrator.flight import Flights
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel
from specrej import fingerprint
from specrej.contracts import (
    Admitted,
    Algorithm,
    CacheControl,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    RewardDescription,
    Schedule,
    Scorer,
    Selection,
    ServiceDescription,
    WeightedReward,
)
from specrej.errors import InvalidRequest, NotFound, Unavailable, Violation
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
    tenant: str  # others share neither its answers nor its prompt prefixes
    generator_fingerprint: str
    reward_fingerprint: str
    arrived: float  # time.perf_counter()


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
        describe_every_s: float = 2.0,
    ) -> None:
        """Backends are asked to describe themselves at most every `describe_every_s` seconds.

        `default_schedule` is for requests that name none; whoever unpacks them fills it in.
        `composites`, valid ones, come before rewards of their names. `default_reward` is for
        requests that name none: a reward, a composite or, if empty, the reward service's first.
        """
        self.default_schedule = default_schedule or Schedule()
        self._composites = {composite.name: composite for composite in composites}
        self._default_reward = default_reward
        self._generator = generator
        self._rewards = rewards
        self._cache = cache
        self._admission = admission
        self._flights: Flights[Generation] = Flights()
        self._described = _Recent(generator.describe, describe_every_s)
        self._described_rewards = _Recent(rewards.describe, describe_every_s)

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
        )

    async def generate(
        self, request: GenerationRequest, *, tenant: str, violations: Sequence[Violation] = ()
    ) -> AsyncGenerator[Event, None]:
        """Events of one request, the last one `Finished`; close the iterator when done with it.

        `violations` were found while the request was unpacked.

        Raises:
            SpecrejError: whatever its caller must be told.
        """
        plan = await self._plan(request, tenant, violations, time.perf_counter())
        request_id = uuid.uuid4().hex
        async with aclosing(self._answer(plan)) as events:
            async for event in events:
                yield _signed(event, request_id, plan.reward_order)

    def _answer(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """From the cache, from a flight under way, or from a run of its own."""
        key = cache_key(
            plan.request,
            tenant=plan.tenant,
            generator_fingerprint=plan.generator_fingerprint,
            reward_fingerprint=plan.reward_fingerprint,
        )
        match plan.request.cache:
            case CacheControl.USE:
                return self._use_cache(plan, key)
            case CacheControl.REFRESH:
                return self._run_and_store(plan, key)
            case CacheControl.BYPASS:
                return self._run(plan)

    async def _use_cache(self, plan: _Plan, key: str) -> AsyncGenerator[Event, None]:
        if stored := await self._cache.get(key):
            yield Finished(stored)
            return
        async with self._flights.join(key) as flight:
            if flight.landed:
                # Made once, for the leader: for this caller it comes from memory.
                yield Finished(replace(flight.result, cached=True))
                return
            async with aclosing(self._run_and_store(plan, key)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        flight.land(event.generation)
                    yield event

    async def _run_and_store(self, plan: _Plan, key: str) -> AsyncGenerator[Event, None]:
        async with aclosing(self._run(plan)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    await self._cache.put(key, event.generation)
                yield event

    async def _run(self, plan: _Plan) -> AsyncGenerator[Event, None]:
        """Admission, then the loop."""
        waiting = time.perf_counter()
        async with self._admission.enter():
            queue_ms, before_run_ms = _ms_since(waiting), _ms_since(plan.arrived)
            panel = Panel([self._scorer(each.name) for each in plan.request.selection.rewards])
            salt = tenant_digest(plan.tenant)
            with _public_paths():
                async with aclosing(run(plan.request, self._generator, panel, salt)) as events:
                    async for event in events:
                        yield _completed(event, plan, queue_ms, before_run_ms)

    async def _plan(
        self,
        request: GenerationRequest,
        tenant: str,
        violations: Sequence[Violation],
        arrived: float,
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
        rewards, reward_fingerprint = await self._plan_rewards(chosen)
        ordered = sorted(rewards, key=lambda reward: reward.name)
        return _Plan(
            replace(request, selection=replace(chosen, rewards=tuple(ordered))),
            tuple(ordered.index(reward) for reward in rewards),
            tenant,
            generator.fingerprint,
            reward_fingerprint,
            arrived,
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
        prints = {
            part.name: [asdict(part), known[part.name].fingerprint if part.name in known else ""]
            for part in rewards
        }
        return rewards, fingerprint.of_values(rewards=prints)

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

    def _scorer(self, name: str) -> Scorer:
        return LikelihoodScorer() if name == LIKELIHOOD else self._rewards.scorer(name)


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
    timings = event.generation.timings
    since_arrival = replace(
        timings,
        total_ms=before_run_ms + timings.total_ms,
        queue_ms=queue_ms,
        first_round_ms=before_run_ms + timings.first_round_ms,
    )
    return Finished(
        replace(
            event.generation,
            generator_fingerprint=plan.generator_fingerprint,
            reward_fingerprint=plan.reward_fingerprint,
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
            candidates = tuple(
                replace(ranked, rewards=tuple(ranked.rewards[index] for index in reward_order))
                for ranked in generation.candidates
            )
            return Finished(replace(generation, candidates=candidates, request_id=request_id))
        case _:
            return event
