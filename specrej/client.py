"""Typed clients of the public API and of the reward service.

They build messages from plain arguments, give back the contract's values and raise the exceptions
of `errors.py`. They check nothing: the server does, and says everything that is wrong at once. An
argument left out stays absent on the wire, so that the server's own default applies.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, TypedDict, Unpack

import grpc.aio

from specrej import telemetry, wire
from specrej.channel import open_channel
from specrej.contracts import (
    Algorithm,
    CacheControl,
    Event,
    Finished,
    Generation,
    Message,
    Prompt,
    RequestRecord,
    RewardDescription,
    Schedule,
    Scores,
    ServiceDescription,
    WeightedReward,
)
from specrej.credentials import Credentials
from specrej.errors import InternalError, InvalidRequest, Violation
from specrej.status import from_rpc_error
from specrej.v1 import (
    common_pb2,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
)

_ORCHESTRATOR = "specrej.v1.OrchestratorService"
_REWARD = "specrej.v1.RewardService"

# One user turn, a whole prompt, or a conversation.
PromptLike = str | Prompt | Sequence[Message]


class Options(TypedDict, total=False):
    """How to answer; ranges and defaults as in `specrej.v1.GenerateRequest`."""

    # Which candidate is returned
    n: int  # candidates; 0: as many as the free slots take
    alpha: float  # fraction of the ranked candidates rejected at each decision token
    schedule: Schedule
    algorithm: Algorithm
    # Name -> weight, or values that can also be normalised and veto; rewards or composites.
    rewards: Mapping[str, float] | Sequence[WeightedReward]
    return_candidates: int
    # How tokens are drawn
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: Sequence[str]
    seed: int
    ignore_eos: bool
    min_tokens: int
    logprobs: bool  # report token ids and log-probabilities of the returned candidates
    # And
    model: str
    cache: CacheControl
    allow_degraded: bool  # something weaker is better than an error


def build_request(
    prompt: PromptLike,
    *,
    n: int = 0,
    alpha: float | None = None,
    schedule: Schedule | None = None,
    algorithm: Algorithm | None = None,
    rewards: Mapping[str, float] | Sequence[WeightedReward] = (),
    return_candidates: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    ignore_eos: bool = False,
    min_tokens: int | None = None,
    logprobs: bool = False,
    model: str = "",
    cache: CacheControl | None = None,
    allow_degraded: bool = False,
) -> orchestrator_pb2.GenerateRequest:
    """The message for a prompt and `Options`.

    Raises:
        InvalidRequest: a value that no message can hold, such as a number beyond 64 bits.
    """
    try:
        return orchestrator_pb2.GenerateRequest(
            model=model,
            prompt=_prompt(prompt),
            sampling=common_pb2.Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=stop,
                seed=seed,
                ignore_eos=ignore_eos,
                min_tokens=min_tokens,
                logprobs=logprobs,
            ),
            selection=orchestrator_pb2.Selection(
                n=n,
                alpha=alpha,
                schedule=wire.schedule_to_wire(schedule) if schedule else None,
                algorithm=wire.algorithm_to_wire(algorithm),
                rewards=_rewards(rewards),
                return_candidates=return_candidates,
            ),
            cache_control=wire.cache_to_wire(cache),
            allow_degraded=allow_degraded,
        )
    except ValueError as error:
        raise InvalidRequest([Violation("request", str(error))]) from None


class _Connection:
    """A channel that lives as long as its context, and the deadline of its calls.

    Made inside a running event loop; connects when first used.
    """

    def __init__(self, address: str, timeout_s: float, credentials: Credentials) -> None:
        try:
            self._channel = open_channel(address, **credentials)
        except (OSError, ValueError) as error:
            raise InvalidRequest([Violation("credentials", str(error))]) from error
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._channel.close()

    def _deadline(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s


class Client(_Connection):
    """A client of the orchestrator at `address` ("host:port").

    Every call has a deadline of `timeout_s` seconds, unless it names its own; a call that finds
    the server unavailable is retried a few times within a second or two. With `credentials` it
    shows a token or a certificate, and checks the server's; `specrej.credentials` has them all.

    Raises:
        InvalidRequest: the credentials cannot be used, or may not be sent there.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50050",
        *,
        timeout_s: float = 300.0,
        **credentials: Unpack[Credentials],
    ) -> None:
        super().__init__(address, timeout_s, credentials)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The best answer.

        Raises:
            SpecrejError: one of its kinds.
        """
        request = build_request(prompt, **options)
        with _calling(f"{_ORCHESTRATOR}/Generate") as span:
            answer = await self._stub.Generate(
                request, timeout=self._deadline(timeout_s), metadata=span.metadata
            )
        return wire.generation_from_wire(answer)

    async def stream(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """The same, with an event at admission and after every round; `Finished` is the last.

        Leaving the loop early cancels the call and frees its slots; `contextlib.aclosing` makes
        that immediate.

        Raises:
            SpecrejError: one of its kinds.
        """
        request = orchestrator_pb2.GenerateStreamRequest(request=build_request(prompt, **options))
        finished = False
        with _calling(f"{_ORCHESTRATOR}/GenerateStream") as span:
            call = self._stub.GenerateStream(
                request, timeout=self._deadline(timeout_s), metadata=span.metadata
            )
            try:
                async for message in call:
                    event = wire.event_from_wire(message)
                    if finished := isinstance(event, Finished):
                        span.end(grpc.StatusCode.OK.name)  # who has the answer may leave
                    yield event
            finally:
                call.cancel()
        if not finished:
            raise InternalError("the stream ended without an answer")

    async def describe(self, *, timeout_s: float | None = None) -> ServiceDescription:
        """Models, rewards, limits and defaults."""
        with _calling(f"{_ORCHESTRATOR}/Describe") as span:
            answer = await self._stub.Describe(
                orchestrator_pb2.OrchestratorServiceDescribeRequest(),
                timeout=self._deadline(timeout_s),
                metadata=span.metadata,
            )
        return wire.service_from_wire(answer)

    async def record(self, request_id: str, *, timeout_s: float | None = None) -> RequestRecord:
        """How one of the caller's last requests went, or goes.

        Raises:
            NotFound: the server does not remember it, or it is somebody else's.
        """
        with _calling(f"{_ORCHESTRATOR}/GetRecord") as span:
            answer = await self._stub.GetRecord(
                orchestrator_pb2.GetRecordRequest(request_id=request_id),
                timeout=self._deadline(timeout_s),
                metadata=span.metadata,
            )
        return wire.record_from_wire(answer.record)


class RewardClient(_Connection):
    """A client of the reward service at `address` ("host:port"); arguments as of `Client`."""

    def __init__(
        self,
        address: str = "127.0.0.1:50052",
        *,
        timeout_s: float = 60.0,
        **credentials: Unpack[Credentials],
    ) -> None:
        super().__init__(address, timeout_s, credentials)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)

    async def score(
        self,
        prompt: PromptLike,
        responses: Sequence[str],
        *,
        reward: str = "",
        unfinished: bool = False,
        timeout_s: float | None = None,
    ) -> Scores:
        """One score per response, in order; higher is better. `reward` "": the service's first.

        `unfinished`: the responses are beginnings of answers.

        Raises:
            SpecrejError: one of its kinds.
        """
        request = reward_pb2.ScoreRequest(
            reward=reward, prompt=_prompt(prompt), responses=responses, unfinished=unfinished
        )
        with _calling(f"{_REWARD}/Score") as span:
            answer = await self._stub.Score(
                request, timeout=self._deadline(timeout_s), metadata=span.metadata
            )
        return Scores(tuple(answer.scores), answer.computed_tokens)

    async def describe(self, *, timeout_s: float | None = None) -> tuple[RewardDescription, ...]:
        """The rewards that are served; the first is the default."""
        with _calling(f"{_REWARD}/Describe") as span:
            answer = await self._stub.Describe(
                reward_pb2.RewardServiceDescribeRequest(),
                timeout=self._deadline(timeout_s),
                metadata=span.metadata,
            )
        return tuple(wire.reward_from_wire(reward) for reward in answer.rewards)


def _prompt(prompt: PromptLike) -> common_pb2.Prompt:
    if isinstance(prompt, str):
        prompt = Prompt.from_user(prompt)
    elif not isinstance(prompt, Prompt):
        prompt = Prompt(messages=tuple(prompt))
    return wire.prompt_to_wire(prompt)


def _rewards(
    rewards: Mapping[str, float] | Sequence[WeightedReward],
) -> list[orchestrator_pb2.WeightedReward]:
    if isinstance(rewards, Mapping):
        rewards = [WeightedReward(name, weight) for name, weight in rewards.items()]
    return [wire.weighted_to_wire(reward) for reward in rewards]


@contextmanager
def _calling(method: str) -> Iterator[telemetry.ClientSpan]:
    """One call: its span, and its failure as one of our own errors."""
    span = telemetry.ClientSpan(method)
    try:
        yield span
        span.end(grpc.StatusCode.OK.name)
    except grpc.aio.AioRpcError as failure:
        span.end(failure.code().name)
        raise from_rpc_error(failure) from failure
    finally:
        span.end(grpc.StatusCode.CANCELLED.name)  # unless it has ended otherwise
