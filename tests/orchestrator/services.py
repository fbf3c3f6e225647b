"""The whole service in one process: three real gRPC servers on loopback ports, toys behind them.

The toys can be held in any phase, and a backend can die and come back on its port.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from orchestrator.admission import Admission, Limits
from orchestrator.cache import Cache
from orchestrator.composition import Composite
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.service import Orchestrator
from orchestrator.servicer import OrchestratorServicer
from orchestrator.shadowing import Shadows
from orchestrator.shared_flight import SharedFlights
from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.channel import open_channel
from specrej.contracts import (
    Candidate,
    Event,
    Finished,
    FinishReason,
    Generation,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scores,
    Session,
    SlotGauge,
    Timings,
)
from specrej.serving import Context, Server, Service, time_left_s
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2_grpc, reward_pb2
from tests.serving import serving, until

LEASE_S = 30.0
BOUND_S = 10.0


class Gate:
    """Open at first; shut, it holds whoever comes. `held` counts those."""

    def __init__(self) -> None:
        self.held = 0
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        self.held += 1
        try:
            await self._open.wait()
        finally:
            self.held -= 1


class HeldGenerator:
    """A toy generator with a gate before each verb; counts the sessions asked for."""

    def __init__(self, capacity_slots: int = 100_000, *, end_every: int = 40) -> None:
        self.toy = ToyGenerator(capacity_slots, end_every=end_every)
        self.num_opened = 0
        self.salts: list[str] = []
        self.times_left_s: list[float | None] = []
        self.gates = {verb: Gate() for verb in ("open", "extend", "prune", "close")}

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[Session]:
        self.num_opened += 1
        self.salts.append(cache_salt)
        self.times_left_s.append(time_left_s())
        await self.gates["open"].passed()
        async with self.toy.open(
            prompt, n, sampling, first_round_tokens, cache_salt, first_candidate
        ) as session:
            yield _HeldSession(session, self.gates)
            await self.gates["close"].passed()

    async def describe(self) -> GeneratorDescription:
        return await self.toy.describe()

    @property
    def is_idle(self) -> bool:
        """Whether no session is left, nor anybody at a gate."""
        ledger = self.toy.ledger
        return not (ledger.num_sessions or ledger.owned or any(g.held for g in self.gates.values()))


class MuteGenerator(HeldGenerator):
    """Can be made deaf to questions."""

    def __init__(self) -> None:
        super().__init__()
        self.hearing = Gate()

    async def describe(self) -> GeneratorDescription:
        await self.hearing.passed()
        return await super().describe()


class _HeldSession:
    def __init__(self, session: Session, gates: dict[str, Gate]) -> None:
        self._session = session
        self._gates = gates
        self.n = session.n
        self.prompt_tokens = session.prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        await self._gates["extend"].passed()
        return await self._session.extend(until_tokens)

    async def prune(self, keep: Collection[int]) -> Pruned:
        await self._gates["prune"].passed()
        return await self._session.prune(keep)


class LongWinded(HeldGenerator):
    """A generator whose candidates say `characters` characters, two bytes each, in one round."""

    def __init__(self, characters: int, finish: FinishReason | None = None) -> None:
        super().__init__()
        self.num_closed = 0
        self._characters = characters
        self._finish = finish

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[Session]:
        self.num_opened += 1
        yield LongWindedSession(n, self._characters, self._finish)
        self.num_closed += 1


class LongWindedSession:
    """Says the same in every round, and holds no slots."""

    prompt_tokens = 1

    def __init__(self, n: int, characters: int, finish: FinishReason | None) -> None:
        self.n = n
        self._characters = characters
        self._finish = finish

    async def extend(self, until_tokens: int) -> Round:
        texts = (f"{number} ".ljust(self._characters, "é") for number in range(self.n))
        candidates = tuple(
            Candidate(number, text, 2000, -0.5, self._finish, tuple(range(2000)))
            for number, text in enumerate(texts)
        )
        ended_by = RoundEnd.ALL_FINISHED if self._finish else RoundEnd.DECISION_TOKEN
        return Round(candidates, ended_by, 2000, SlotGauge(1, 0, 0))

    async def prune(self, keep: Collection[int]) -> Pruned:
        return Pruned(len(keep), SlotGauge(1, 0, 0))


class HeldReward(ToyReward):
    """A toy reward that a shut gate holds in its thread; counts the batches asked for."""

    def __init__(self, name: str = "toy") -> None:
        super().__init__(name)
        self.gate = threading.Event()
        self.gate.set()
        self.held = 0
        self.num_batches = -1  # the worker's warm-up does not count

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        self.num_batches += 1
        self.held += 1
        try:
            assert self.gate.wait(BOUND_S), "nobody opened the gate"
        finally:
            self.held -= 1
        return super().score(prompt, candidates)


class Backend:
    """A server of one service that can die and come back on its port."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server: Server | None = None
        self.port = 0

    async def start(self) -> None:
        server = Server(ServiceSettings(port=self.port), [self._service])
        await server.start()
        await server.set_serving(True)
        self.port, self._server = server.port, server

    async def kill(self) -> None:
        """End it and every call to it, at once."""
        if self._server:
            await self._server.stop(0)
            self._server = None


class CountedRewards(RewardServicer):
    """Knows how many scoring sessions are open."""

    num_sessions = 0

    async def ScoreSession(  # type: ignore[override] # noqa: N802
        self, _requests: AsyncIterator[reward_pb2.ScoreSessionRequest], context: Context
    ) -> None:
        self.num_sessions += 1
        try:
            await super().ScoreSession(_requests, context)
        finally:
            self.num_sessions -= 1


class RewardBackend(Backend):
    """A reward service that can die and come back."""

    def __init__(self, servicer: CountedRewards) -> None:
        super().__init__(servicer.service())
        self._servicer = servicer

    @property
    def is_idle(self) -> bool:
        """Whether no scoring session is left."""
        return not self._servicer.num_sessions


@asynccontextmanager
async def generator_backend(generator: Any) -> AsyncIterator[Backend]:
    """A generator behind its port."""
    servicer = GeneratorServicer(LEASE_S)
    servicer.load(generator)
    backend = Backend(servicer.service())
    await backend.start()
    try:
        yield backend
    finally:
        await backend.kill()


@asynccontextmanager
async def reward_backend(*rewards: Reward) -> AsyncIterator[RewardBackend]:
    """Rewards behind their port, each in a thread of its own."""
    async with AsyncExitStack() as stack:
        workers = [await Worker.start(partial(_same, reward)) for reward in rewards]
        for worker in workers:
            stack.callback(worker.close)
        servicer = CountedRewards(max_batch=1024, lease_s=LEASE_S)
        servicer.serve(workers)
        backend = RewardBackend(servicer)
        await backend.start()
        stack.push_async_callback(backend.kill)
        yield backend


def _same(reward: Reward) -> Reward:
    return reward


@asynccontextmanager
async def channel_to(backend: Backend) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{backend.port}", retries=False) as channel:
        yield channel


@contextmanager
def dead_port() -> Iterator[int]:
    """A loopback port that refuses connections, and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@dataclass(slots=True)
class Whole:
    """All three services and what they hold."""

    stub: Any
    channel: grpc.aio.Channel
    orchestrator: Orchestrator
    admission: Admission
    cache: Cache
    generator: HeldGenerator
    reward: HeldReward
    generator_server: Backend
    reward_server: RewardBackend

    @property
    def is_idle(self) -> bool:
        """The invariant after every case: nothing runs, waits, flies, is scored or owns a slot."""
        busy = self.admission.running or self.admission.queued
        flying = self.orchestrator._flights.num_flying or self.orchestrator._refreshes.num_running
        behind = flying or self.orchestrator._shadows.num_running
        return not (busy or behind) and self.generator.is_idle and self.reward_server.is_idle


@asynccontextmanager
async def whole(
    generator: HeldGenerator | None = None,
    *,
    redis_url: str = "",
    max_running: int = 8,
    max_queued: int = 64,
    default_deadline_s: float | None = None,
    default_schedule: Schedule | None = None,
    composites: Sequence[Composite] = (),
    default_reward: str = "",
    describe_every_s: float = 2.0,
    cache_options: Mapping[str, Any] | None = None,
    lease_s: float = 3.0,
    shadows: Shadows | None = None,
) -> AsyncIterator[Whole]:
    """All three services, the rewards "toy" and "other", and a check that nothing is left."""
    generator, reward = generator or HeldGenerator(), HeldReward()
    cache = Cache(redis_url, **(cache_options or {}))
    admission = Admission(Limits(max_running, max_queued))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cache.close)
        generator_server = await stack.enter_async_context(generator_backend(generator))
        reward_server = await stack.enter_async_context(reward_backend(reward, ToyReward("other")))
        stack.callback(reward.gate.set)
        orchestrator = Orchestrator(
            RemoteGenerator(await stack.enter_async_context(channel_to(generator_server))),
            RemoteRewards(await stack.enter_async_context(channel_to(reward_server))),
            cache,
            admission,
            default_schedule=default_schedule,
            composites=composites,
            default_reward=default_reward,
            describe_every_s=describe_every_s,
            shared_flights=SharedFlights(cache, lease_s=lease_s),
            shadows=shadows,
        )
        stack.push_async_callback(orchestrator.aclose)
        port = OrchestratorServicer(orchestrator).service()
        channel = await stack.enter_async_context(
            serving(port, default_deadline_s=default_deadline_s)
        )
        everything = Whole(
            stub=orchestrator_pb2_grpc.OrchestratorServiceStub(channel),
            channel=channel,
            orchestrator=orchestrator,
            admission=admission,
            cache=cache,
            generator=generator,
            reward=reward,
            generator_server=generator_server,
            reward_server=reward_server,
        )
        yield everything
        await until(lambda: everything.is_idle)


def timeless(event: Event) -> Event:
    """An event without what two equal runs may differ in: durations and the request's id."""
    match event:
        case RoundCompleted(trace):
            return replace(event, trace=replace(trace, extend_ms=0, score_ms=0, prune_ms=0))
        case Finished(generation):
            return Finished(timeless_answer(generation))
        case _:
            return replace(event, request_id="")


def timeless_answer(generation: Generation) -> Generation:
    """An answer without durations and ids."""
    rounds = tuple(
        replace(trace, extend_ms=0, score_ms=0, prune_ms=0) for trace in generation.rounds
    )
    return replace(generation, rounds=rounds, timings=Timings(), request_id="")


def retry_info_s(error: grpc.aio.AioRpcError) -> float | None:
    """The delay in the error's RetryInfo."""
    info = error_details_pb2.RetryInfo()
    return info.retry_delay.ToMilliseconds() / 1000 if _unpacked(error, info) else None


def trailer(error: grpc.aio.AioRpcError, key: str) -> str | bytes | None:
    """One of the trailers an error came with."""
    return next((value for name, value in error.trailing_metadata() or () if name == key), None)


def _unpacked(error: grpc.aio.AioRpcError, detail: Message) -> bool:
    packed = trailer(error, "grpc-status-details-bin")
    if not isinstance(packed, bytes):
        return False
    details = status_pb2.Status.FromString(packed).details
    return any(found.Unpack(detail) for found in details)
