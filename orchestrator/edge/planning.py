"""Plans: a request that was checked, with its defaults, rewards and cache keys filled in."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from orchestrator.cache import Keys, Secret, cache_keys
from orchestrator.loop.composition import LIKELIHOOD, Composite, check_expansion, expanded
from orchestrator.loop.run import first_round_tokens
from orchestrator.loop.schedule import most_rounds
from orchestrator.loop.scoring import LikelihoodScorer, fingerprint_of
from specrej.contracts import (
    Algorithm,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    Prompt,
    RewardDescription,
    Scorer,
    ScoringSession,
    Selection,
    WeightedReward,
)
from specrej.contracts.errors import (
    InternalError,
    NotFound,
    Overloaded,
    Unavailable,
    Violation,
    raise_if_any,
)
from specrej.contracts.validation import check_request, check_top_logprobs
from specrej.security import Share

T = TypeVar("T")

# Of English text, by the tokenizers of common models; the generator alone tokenises.
_TOKEN_CHARACTERS = 4
_REWARDS_PATH = "selection.rewards"
# Of a backend that does not describe itself, or of another program on its port.
_AWAY = (Unavailable, Overloaded, InternalError)


class Rewards(Protocol):
    """A reward service, or all of them."""

    def open(self, name: str, prompt: Prompt) -> AbstractAsyncContextManager[ScoringSession]: ...

    async def describe(self) -> Sequence[RewardDescription]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be served, and what its answer depends on.

    Its rewards are sorted by name, so that the caller's order does not change the answer;
    `reward_order` has, for each of the caller's rewards in order, its index among the sorted ones.
    """

    request: GenerationRequest
    reward_order: tuple[int, ...]
    candidate_tokens: int  # upper bound, for admission
    tenant: str
    share: Share
    keys: Keys
    generator_fingerprint: str
    reward_fingerprint: str
    arrived: float  # time.perf_counter()
    time_left_s: float | None  # to the deadline, at arrival
    has_no_rewards: bool  # the likelihood replaces rewards that were never described
    model: str

    def left_s(self) -> float | None:
        """Seconds to the deadline."""
        if self.time_left_s is None:
            return None
        return self.time_left_s - (time.perf_counter() - self.arrived)

    def fits(self, generation: Generation) -> bool:
        """Whether the backends named in the cache key made the answer: a rollout may change them
        while the request waits."""
        planned = self.generator_fingerprint, self.reward_fingerprint
        return planned == (generation.generator_fingerprint, generation.reward_fingerprint)


class Planner:
    """Checks requests against the backends' descriptions and fills in defaults."""

    def __init__(
        self,
        generator: Generator,
        rewards: Rewards,
        composites: Sequence[Composite] = (),
        default_reward: str = "",
        *,
        secret: Secret,
    ) -> None:
        """`composites` hide rewards of their names. `default_reward` is a reward or a composite;
        empty: the reward service's first. `secret`: of cache keys."""
        self._secret = secret
        self._composites = {composite.name: composite for composite in composites}
        self._default_reward = default_reward
        self._rewards = rewards
        self._generator = _LastDescription(generator.describe)
        self._served = _LastDescription(rewards.describe)

    async def plan(
        self,
        request: GenerationRequest,
        tenant: str,
        share: Share,
        violations: Sequence[Violation],
        time_left_s: float | None,
    ) -> Plan:
        """The plan of a request that arrives now.

        Raises:
            InvalidRequest: `violations`, and all others.
            NotFound: there is no such model or reward.
            Unavailable, Overloaded, InternalError: a backend that is needed was never described.
        """
        arrived = time.perf_counter()
        generator = await self._generator.get()
        raise_if_any([*violations, *_check_against(generator, request)])
        adapter = _adapter(request, generator)
        selection = request.selection
        most = _most_candidates(request, generator)
        raise_if_any(check_top_logprobs(request.sampling, most))
        if generator.whole_answers or selection.algorithm is Algorithm.BEST_OF_N:
            selection = replace(selection, algorithm=Algorithm.BEST_OF_N, alpha=0.0)
        has_no_rewards = False
        try:
            rewards, reward_fingerprint = await self._rewards_of(selection, most)
        except _AWAY:
            if not request.allow_degraded:
                raise
            has_no_rewards = True
            rewards, reward_fingerprint = [WeightedReward(LIKELIHOOD)], ""
        ordered = sorted(rewards, key=lambda reward: reward.name)
        selection = replace(selection, rewards=tuple(ordered))
        planned = replace(request, model=adapter, selection=selection)
        keys = cache_keys(
            planned,
            tenant=tenant,
            generator_fingerprint=generator.fingerprint,
            reward_fingerprint=reward_fingerprint,
            secret=self._secret,
        )
        return Plan(
            planned,
            tuple(ordered.index(reward) for reward in rewards),
            _candidate_tokens(request, most, generator),
            tenant,
            share,
            keys,
            generator.fingerprint,
            reward_fingerprint,
            arrived,
            time_left_s,
            has_no_rewards,
            adapter or generator.model,
        )

    def scorers(self, plan: Plan) -> list[Scorer]:
        """One scorer per reward of the plan."""
        names = (reward.name for reward in plan.request.selection.rewards)
        likelihood, opening = LikelihoodScorer(), self._rewards.open
        return [likelihood if name == LIKELIHOOD else partial(opening, name) for name in names]

    async def reward_names(self) -> tuple[str, ...]:
        """Names that a request may use, the default first."""
        available = self._names(reward.name for reward in await self._served.get())
        return tuple(sorted(available, key=lambda name: name != self._default_reward))

    async def _first_reward(self) -> str:
        served = await self._served.get()
        if not served:
            raise Unavailable("a reward service serves no reward")
        return served[0].name

    async def _rewards_of(
        self, selection: Selection, most: int
    ) -> tuple[list[WeightedReward], str]:
        """The rewards of a request of at most `most` candidates, composites expanded, and their
        fingerprint."""
        named = selection.rewards
        if not named:
            default = self._default_reward or await self._first_reward()
            named = (WeightedReward(default),)
        raise_if_any(check_expansion(named, self._composites, _REWARDS_PATH))
        parts = expanded(named, self._composites)
        served: dict[str, RewardDescription] = {}
        if any(part.name != LIKELIHOOD for _, part in parts):
            served = {reward.name: reward for reward in await self._served.get()}
        for index, part in parts:
            self._check_served(part.name, named[index].name, served)
        path = f"{_REWARDS_PATH}[{{}}]" if selection.rewards else "selection.n"
        raise_if_any(_check_batches(parts, most, served, path))
        rewards = [part for _, part in parts]
        own = [served[part.name].fingerprint if part.name in served else "" for part in rewards]
        return rewards, fingerprint_of(tuple(rewards), tuple(own))

    def _check_served(
        self, name: str, requested: str, served: Mapping[str, RewardDescription]
    ) -> None:
        """Raises NotFound: reward `name`, perhaps of composite `requested`, does not exist."""
        if name == LIKELIHOOD or name in served:
            return
        of_composite = f"reward {name} of composite {requested}"
        what = of_composite if requested in self._composites else "such reward"
        available = ", ".join(self._names(served))
        raise NotFound(f"no {what}, there are: {available}", metadata={"field": _REWARDS_PATH})

    def _names(self, served: Iterable[str]) -> list[str]:
        return list(dict.fromkeys((*served, *self._composites, LIKELIHOOD)))


class _LastDescription(Generic[T]):
    """A backend's description; the last one while the backend is away."""

    def __init__(self, describe: Callable[[], Awaitable[T]]) -> None:
        self._describe = describe
        self._last: T | None = None

    async def get(self) -> T:
        """Raises Unavailable, Overloaded or InternalError: the backend was never described."""
        try:
            self._last = await self._describe()
        except _AWAY:
            # A stored answer needs no backend.
            if self._last is None:
                raise
        return self._last


def _candidate_tokens(request: GenerationRequest, n: int, generator: GeneratorDescription) -> int:
    """The cost of a request: the tokens that `n` candidates may grow to (at most the generator's
    slots), plus the prompt's tokens (estimated), plus one per prefix that may be scored and one per
    value that may be returned."""
    selection, sampling = request.selection, request.sampling
    grown = min(n * sampling.max_tokens, _capacity(generator))
    is_cut = selection.algorithm is not Algorithm.BEST_OF_N
    scored = n * (most_rounds(selection.schedule, sampling.max_tokens) if is_cut else 1)
    values = sampling.max_tokens * (1 + sampling.top_logprobs) if sampling.logprobs else 1
    characters = sum(len(turn.content) for turn in request.prompt.turns)
    read = characters // _TOKEN_CHARACTERS
    return grown + scored + read + min(selection.return_candidates, n) * values


def _check_against(
    generator: GeneratorDescription, request: GenerationRequest
) -> Iterator[Violation]:
    limits = (generator.context_tokens, generator.max_candidates, generator.vocabulary)
    yield from check_request(request, *limits)
    if request.selection.branching and not generator.can_fork:
        refused = "must be absent: the generator does not fork candidates"
        yield Violation("selection.branching", refused)


def _adapter(request: GenerationRequest, generator: GeneratorDescription) -> str:
    """The adapter that the request names, or an empty text.

    Raises:
        NotFound: there is no such model.
    """
    if request.model not in ("", generator.model, *generator.adapters):
        models = ", ".join((generator.model, *generator.adapters))
        raise NotFound(f"no such model, there is: {models}", metadata={"field": "model"})
    return request.model if request.model in generator.adapters else ""


def _most_candidates(request: GenerationRequest, generator: GeneratorDescription) -> int:
    """Most candidates of a request; n = 0: as many as one generator holds at their first cut."""
    selection = request.selection
    # The newest token of a candidate has no slot yet.
    room = _capacity(generator) // max(1, first_round_tokens(request) - 1)
    most = min(max(1, room), generator.auto_candidates or generator.max_candidates)
    width = selection.branching.width if selection.branching else 0
    return max(selection.n or most, selection.min_answers, width)


def _capacity(generator: GeneratorDescription) -> int:
    """Slots that a request can own: those of one generator."""
    return generator.session_slots or generator.slots.capacity


def _check_batches(
    parts: Sequence[tuple[int, WeightedReward]],
    n: int,
    served: Mapping[str, RewardDescription],
    path: str,
) -> Iterator[Violation]:
    """Every reward must accept all candidates in one batch; `n` is the most there may be, `path`
    the field that is to be changed, with the reward's index."""
    for index, reward in parts:
        limit = served[reward.name].max_batch if reward.name in served else n
        if n > limit:
            description = f"{reward.name} takes at most {limit} candidates, there may be {n}"
            yield Violation(path.format(index), description)
