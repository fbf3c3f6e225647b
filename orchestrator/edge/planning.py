"""Plans: a request that was checked, with its defaults, rewards and cache keys filled in."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, Protocol, TypeAlias, TypeVar

from orchestrator.cache import Secret, answer_key
from orchestrator.edge.calls import CallChecks
from orchestrator.edge.extractors import Extract, extractor
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.run import AreValid, sampling_of
from orchestrator.loop.schedule import first_round_tokens, most_rounds, schedule_of
from orchestrator.loop.scoring import LikelihoodScorer, fingerprint_of
from specrej import contracts as c
from specrej.contracts import errors, validation

T = TypeVar("T")

# Of English text, by the tokenizers of common models; the generator alone tokenises.
_TOKEN_CHARACTERS = 4
_IMAGE_CHARACTERS = 4096  # as which an image counts
_SURE_CHARACTERS = 2  # per token of the context: prompts of fewer take the generator no time
_REWARDS_PATH = "selection.rewards"
_LIKELY = c.WeightedReward(LIKELIHOOD)
# Of a backend that does not describe itself, or of another program on its port.
_AWAY = (errors.Unavailable, errors.Overloaded, errors.InternalError)

_Chosen: TypeAlias = tuple[
    Sequence[c.WeightedReward], Mapping[str, c.RewardDescription], errors.SpecrejError | None
]


class Rewards(Protocol):
    """A reward service, or all of them."""

    def open(
        self, name: str, prompt: c.Prompt, data: str = ""
    ) -> AbstractAsyncContextManager[c.ScoringSession]: ...

    async def describe(self) -> Sequence[c.RewardDescription]: ...


@dataclass(frozen=True, slots=True)
class Defaults:
    """What requests get that do not name it; the docstrings of the settings describe each."""

    schedule: c.Schedule | None = None  # None: by the generator
    n: int = c.DEFAULT_N
    max_tokens: int = c.DEFAULT_MAX_TOKENS
    rewards: tuple[c.WeightedReward, ...] = ()  # none: the first that is served

    def schedule_for(self, generator: c.GeneratorDescription) -> c.Schedule:
        """Where a step costs the same for one candidate as for many, a cut saves tokens of which
        only other requests have use; so the first one waits until prefixes predict more."""
        first = 64 if generator.flat_steps else c.Schedule().first
        return self.schedule or c.Schedule(first=first)

    def filled(
        self, request: c.GenerationRequest, generator: c.GeneratorDescription
    ) -> c.GenerationRequest:
        """The request with what it leaves to the orchestrator, except the reward."""
        selection, sampling = request.selection, request.sampling
        if "schedule" in request.absent:
            selection = replace(selection, schedule=self.schedule_for(generator))
        if "alpha" in request.absent and selection.vote:
            selection = replace(selection, alpha=0.0)  # rejected candidates do not vote
        is_whole = sampling.structured_output or request.prompt.tools  # no use of a part
        if "prefer_complete" in request.absent and is_whole:
            selection = replace(selection, prefer_complete=True)
        if "n" in request.absent:
            width = selection.branching.width if selection.branching else 0
            needed = max(self.n, selection.return_candidates, selection.min_answers, width)
            n = min(needed, generator.max_candidates) if self.n else 0
            selection = replace(selection, n=1 if sampling.temperature == 0 else n)
        if request.fits_context:
            most = max(self.max_tokens, sampling.min_tokens)
            sampling = replace(sampling, max_tokens=min(most, generator.context_tokens))
        return replace(request, selection=selection, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be served, and what its answer depends on.

    Its rewards are sorted by name, so that the caller's order does not change the answer;
    `reward_order` has, for each of the caller's rewards in order, its index among the sorted ones.
    """

    request: c.GenerationRequest
    reward_order: tuple[int, ...]
    scorers: tuple[c.Scorer, ...]  # one per reward of the request
    candidate_tokens: int  # upper bound, for admission
    grown_tokens: int  # most of these that candidates may grow to
    tenant: str
    weight: float  # of the tenant
    key_of: Callable[[str, str], str]  # of the answer, by the fingerprints that make it
    generator_fingerprint: str
    reward_fingerprint: str
    arrived: float  # time.perf_counter()
    time_left_s: float  # to the deadline, at arrival
    must_check: bool  # whether the generator is asked before admission, see `Generator.check`
    has_no_rewards: bool  # the likelihood replaces rewards that were never described
    cheap: frozenset[str]  # names of rewards that can veto within rounds
    extract: Extract  # what a complete text votes for
    are_valid: AreValid  # of an answer's calls
    model: str

    @property
    def left_s(self) -> float:
        """Seconds to the deadline; inf: there is none."""
        return self.time_left_s - (time.perf_counter() - self.arrived)

    @property
    def cache(self) -> c.CacheControl:
        """Use of the cache; a likelihood in place of unknown rewards is neither read nor stored."""
        return c.CacheControl.BYPASS if self.has_no_rewards else self.request.cache


class Planner:
    """Checks requests against the backends' descriptions and fills in defaults."""

    def __init__(
        self,
        generator: c.Generator,
        rewards: Rewards,
        defaults: Defaults = Defaults(),
        *,
        secret: Secret,
        extractors: Mapping[str, Extract] = MappingProxyType({}),
    ) -> None:
        """`secret`: of cache keys. `extractors`: the functions of votes by name."""
        self._extractors = extractors
        self._calls = CallChecks()
        self._secret = secret
        self._defaults = defaults
        self._rewards = rewards
        self._generator = _LastDescription(generator.describe)
        self._served = _LastDescription(rewards.describe)

    async def plan(
        self,
        request: c.GenerationRequest,
        tenant: str,
        weight: float,
        violations: Sequence[errors.Violation],
        time_left_s: float,
    ) -> Plan:
        """The plan of a request that arrives now.

        Raises:
            InvalidRequest: `violations`, and all others.
            NotFound: there is no such model or reward.
            Unavailable, Overloaded, InternalError: a backend that is needed was never described.
        """
        arrived = time.perf_counter()
        generator = await self._generator.get()
        request = self._defaults.filled(request, generator)
        errors.raise_if_any([*violations, *_check_against(generator, request)])
        # The other checks need valid fields.
        most, vote = _most_candidates(request, generator), request.selection.vote
        named, served, away = await self._chosen(request)
        problems = [
            *validation.check_logprobs(sampling_of(request), most),
            *self._check_vote(vote),
            *_check_batches(request, named, most, served),
            *_check_data(named, served),
        ]
        errors.raise_if_any(problems)
        are_valid = await self._calls.of(request.prompt, tenant)
        validation.check_prompt_bytes(
            request.prompt, generator.max_prompt_bytes, generator.context_tokens
        )
        if away and not request.allow_degraded:
            raise away
        adapter = _adapter(request, generator)
        rewards = [replace(reward, data=_one_spelling(reward.data)) for reward in named]
        for reward in rewards:
            if reward.name not in (*served, LIKELIHOOD):
                raise _unknown(reward.name, (*served, LIKELIHOOD), _REWARDS_PATH)
        ordered = sorted(rewards, key=attrgetter("name"))
        planned = _as_run(replace(request, model=adapter), generator, ordered)
        prints = (served[one.name].fingerprint if one.name in served else "" for one in rewards)
        is_long = _characters(request) > _SURE_CHARACTERS * generator.context_tokens
        return Plan(
            planned,
            reward_order=tuple(ordered.index(reward) for reward in rewards),
            scorers=tuple(self._scorer(r, rewards.index(r), served.get(r.name)) for r in ordered),
            candidate_tokens=_candidate_tokens(request, most, generator),
            grown_tokens=_grown_tokens(request, most, generator),
            tenant=tenant,
            weight=weight,
            key_of=partial(answer_key, planned, tenant=tenant, secret=self._secret),
            generator_fingerprint=generator.fingerprint,
            reward_fingerprint="" if away else fingerprint_of(tuple(rewards), tuple(prints)),
            arrived=arrived,
            time_left_s=time_left_s,
            # What the generator must look at before it holds a permit.
            must_check=is_long or bool(request.sampling.structured_output or request.prompt.tools),
            has_no_rewards=away is not None,
            cheap=frozenset(reward.name for reward in served.values() if reward.is_cheap),
            extract=extractor(vote, self._extractors) if vote else lambda _: None,
            are_valid=are_valid,
            model=adapter or generator.model,
        )

    async def _chosen(self, request: c.GenerationRequest) -> _Chosen:
        """The request's rewards or the default ones, and the descriptions that they need by name;
        the likelihood, and the error, if those are away."""
        try:
            named = request.selection.rewards or await self._default()
            if all(reward.name == LIKELIHOOD for reward in named):
                return named, {}, None
            return named, {reward.name: reward for reward in await self._served.get()}, None
        except _AWAY as error:
            return (_LIKELY,), {}, error

    def _scorer(
        self, reward: c.WeightedReward, index: int, served: c.RewardDescription | None
    ) -> c.Scorer:
        """The scorer of a reward, which is the one at `index` in the request."""
        if reward.name == LIKELIHOOD:
            return LikelihoodScorer()
        path = f"{_REWARDS_PATH}[{index}]."
        takes_images = served is not None and served.takes_images

        def open_session(prompt: c.Prompt) -> AbstractAsyncContextManager[c.ScoringSession]:
            read = prompt if takes_images else prompt.without_images
            return _placed(self._rewards.open(reward.name, read, reward.data), path)

        return open_session

    def _check_vote(self, vote: c.Vote | None) -> Sequence[errors.Violation]:
        try:
            if vote:
                extractor(vote, self._extractors)
        except errors.InvalidRequest as error:
            return error.violations
        return ()

    async def reward_for(
        self, prompt: c.Prompt, responses: Sequence[str], name: str, data: str
    ) -> tuple[str, c.Prompt]:
        """The reward that scores these, the default for "", and what it reads of the prompt.

        Raises:
            InvalidRequest: a field is not valid.
            NotFound: there is no such reward.
            Unavailable, Overloaded, InternalError: the rewards were never described.
        """
        served = {reward.name: reward for reward in await self._served.get()}
        name = name or (await self._default())[0].name
        if name not in served:
            raise _unknown(name, [*served], "reward")
        problems = [*validation.check_prompt(prompt), *validation.check_data(data, "data")]
        if data and not served[name].takes_data:
            problems.append(errors.Violation("data", f"must be empty: {name} takes none"))
        if prompt.continue_final:
            text = "must be false: responses have all of the answer"
            problems.append(errors.Violation("prompt.continue_final", text))
        most = min(validation.MAX_RESPONSES, served[name].max_batch)
        if not 1 <= len(responses) <= most:
            text = f"must have 1 .. {most} items, has {len(responses)}"
            problems.append(errors.Violation("responses", text))
        errors.raise_if_any(problems)
        return name, prompt if served[name].takes_images else prompt.without_images

    async def reward_names(self) -> tuple[str, ...]:
        """Names that a request may use, the first default first."""
        first = [reward.name for reward in self._defaults.rewards[:1]]
        served = [reward.name for reward in await self._served.get()]
        return tuple(dict.fromkeys((*first, *served, LIKELIHOOD)))

    async def _default(self) -> tuple[c.WeightedReward, ...]:
        """The rewards of requests that name none."""
        if self._defaults.rewards:
            return self._defaults.rewards
        served = await self._served.get()
        if not served:
            raise errors.Unavailable("a reward service serves no reward")
        return (c.WeightedReward(served[0].name),)


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


@asynccontextmanager
async def _placed(
    opening: AbstractAsyncContextManager[c.ScoringSession], path: str
) -> AsyncIterator[c.ScoringSession]:
    """A scoring session, whose errors about its data have the request's paths."""
    async with AsyncExitStack() as stack:
        try:
            session = await stack.enter_async_context(opening)
        except errors.InvalidRequest as error:
            fields = [one.field.removeprefix("open.") for one in error.violations]
            moved = [
                replace(one, field=path + name) if name.startswith("data") else one
                for name, one in zip(fields, error.violations, strict=True)
            ]
            raise errors.InvalidRequest(
                moved, reason=error.reason, metadata=error.metadata
            ) from error
        yield session


def _unknown(name: str, available: Sequence[str], field: str) -> errors.NotFound:
    text = f'unknown reward "{name}"; available: {", ".join(available)}'
    return errors.NotFound(text, metadata={"field": field})


def _one_spelling(data: str) -> str:
    return json.dumps(json.loads(data), sort_keys=True) if data else ""


def _check_data(
    rewards: Sequence[c.WeightedReward], served: Mapping[str, c.RewardDescription]
) -> Iterator[errors.Violation]:
    for index, reward in enumerate(rewards):
        if reward.data and not (reward.name in served and served[reward.name].takes_data):
            path = f"{_REWARDS_PATH}[{index}].data"
            yield errors.Violation(path, f"must be empty: {reward.name} takes none")


def _candidate_tokens(
    request: c.GenerationRequest, n: int, generator: c.GeneratorDescription
) -> int:
    """The cost of a request: the tokens that `n` candidates may grow to (at most the generator's
    slots), plus the prompt's tokens (estimated), plus one per prefix that may be scored and one per
    value that may be returned."""
    selection, sampling = request.selection, request.sampling
    grown = _grown_tokens(request, n, generator)
    scored = n * most_rounds(schedule_of(selection), sampling.max_tokens)
    values = sampling.max_tokens * (1 + sampling.top_logprobs) if sampling.logprobs else 1
    read = characters_to_tokens(_characters(request))
    return grown + scored + read + min(selection.return_candidates, n) * values


def _grown_tokens(request: c.GenerationRequest, n: int, generator: c.GeneratorDescription) -> int:
    return min(n * request.sampling.max_tokens, _capacity(generator))


def characters_to_tokens(characters: int) -> int:
    """An estimate."""
    return characters // _TOKEN_CHARACTERS


def _characters(request: c.GenerationRequest) -> int:
    prompt = request.prompt
    tools = sum(len(tool.description) + len(tool.parameters) for tool in prompt.tools)
    calls = sum(len(call.arguments) for turn in prompt.turns for call in turn.tool_calls)
    images = _IMAGE_CHARACTERS * sum(len(turn.images) for turn in prompt.turns)
    return sum(len(turn.text) for turn in prompt.turns) + tools + calls + images


def _check_against(
    generator: c.GeneratorDescription, request: c.GenerationRequest
) -> Iterator[errors.Violation]:
    limits = (generator.context_tokens, generator.max_candidates, generator.vocabulary)
    yield from validation.check_request(request, *limits)
    if request.selection.branching and not generator.can_fork:
        refused = "must be absent: the generator does not fork candidates"
        yield errors.Violation("selection.branching", refused)
    yield from _check_parts(generator, request)


def _check_parts(
    generator: c.GeneratorDescription, request: c.GenerationRequest
) -> Iterator[errors.Violation]:
    """What tools, images and reasoning exclude."""
    prompt, sampling = request.prompt, request.sampling
    if prompt.tools and not generator.tool_format:
        yield errors.Violation(
            "prompt.tools", "must be empty: the generator has no format of calls"
        )
    for name in ("structured_output", "stop", "stop_token_ids", "ignore_eos"):
        if prompt.tools and getattr(sampling, name):
            yield errors.Violation(f"sampling.{name}", "must be absent with tools")
    for number, turn in enumerate(prompt.messages):
        if turn.images and not generator.takes_images:
            text = "must have no images: the generator takes none"
            yield errors.Violation(f"prompt.messages[{number}].parts", text)


def _as_run(
    request: c.GenerationRequest,
    generator: c.GeneratorDescription,
    rewards: Sequence[c.WeightedReward],
) -> c.GenerationRequest:
    """The request with these rewards, as the generator can run it."""
    selection = replace(request.selection, rewards=tuple(rewards))
    if generator.whole_answers or selection.algorithm is c.Algorithm.BEST_OF_N:
        selection = replace(selection, algorithm=c.Algorithm.BEST_OF_N, alpha=0.0)
    is_drawn_anew = generator.ignores_seeds and request.sampling.temperature > 0
    cache = c.CacheControl.BYPASS if is_drawn_anew else request.cache
    return replace(request, selection=selection, cache=cache)


def _adapter(request: c.GenerationRequest, generator: c.GeneratorDescription) -> str:
    """The model that the request names, of several; else an empty text.

    Raises:
        NotFound: there is no such model.
    """
    models = (generator.model, *generator.adapters)
    if request.model not in ("", *models):
        text = f'unknown model "{request.model}"; available: {", ".join(models)}'
        raise errors.NotFound(text, metadata={"field": "model"})
    return request.model if request.model in generator.adapters else ""


def _most_candidates(request: c.GenerationRequest, generator: c.GeneratorDescription) -> int:
    """Most candidates of a request; n = 0: as many as one generator holds at their first cut."""
    selection = request.selection
    first = first_round_tokens(schedule_of(selection), request.sampling.max_tokens)
    # The newest token of a candidate has no slot yet.
    room = _capacity(generator) // max(1, first - 1)
    most = min(max(1, room), generator.auto_candidates or generator.max_candidates)
    width = selection.branching.width if selection.branching else 0
    return max(selection.n or most, selection.min_answers, width)


def _capacity(generator: c.GeneratorDescription) -> int:
    """Slots that a request can own: those of one generator."""
    return generator.session_slots or generator.slots.capacity


def _check_batches(
    request: c.GenerationRequest,
    rewards: Sequence[c.WeightedReward],
    n: int,
    served: Mapping[str, c.RewardDescription],
) -> Iterator[errors.Violation]:
    """Every reward must accept all candidates in one batch; `n` is the most there may be."""
    for index, reward in enumerate(rewards):
        limit = served[reward.name].max_batch if reward.name in served else n
        if n > limit:
            path = f"{_REWARDS_PATH}[{index}]" if request.selection.rewards else "selection.n"
            yield errors.Violation(
                path, f"{reward.name} takes at most {limit} candidates, there may be {n}"
            )
