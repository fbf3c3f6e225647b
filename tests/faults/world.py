"""The whole service as real processes, toys for models, proxies between them, and the invariant.

A world's clients never retry, so that they see what the service really answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import grpc.aio
import psutil  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from generator_service.toy import ToyGenerator
from orchestrator.run import run
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej import wire
from specrej.channel import open_channel
from specrej.client import Options, build_request
from specrej.contracts import (
    CacheControl,
    Finished,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    Prompt,
    Sampling,
    Schedule,
    Selection,
    ServiceDescription,
)
from specrej.stack import Ports, Stack
from specrej.v1 import generator_pb2, generator_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from tests.faults.proxy import HOST, Proxy, proxy
from tests.faults.rogue import OVER_GRPC, OVER_HTTP, grpc_rogue, http_rogue

RECOVERY_S = 10.0  # what section 2 of the contract allows
CALL_S = 20.0  # a call that takes longer hangs
LEASE_S = 3.0
MAX_RUNNING = 4
MAX_QUEUED = 128
FAILING_SEED = 666
# What requests under attack say, so that a proxy recognises them.
PROMPT = "An unmistakable prompt of nine words, one two three"
SERVICES = ("orchestrator", "generator", "reward")
_TOY = f"toy:step_ms=5,failing_seed={FAILING_SEED}"
_REWARDS = ("nan", "inf", "too_few", "too_many", "raising", "exiting", "exhausted", "slow", "leaky")
# Of rewards behind other services, by "grpc_" or "http_" and what those do to a batch.
_FAR = (*(f"grpc_{name}" for name in OVER_GRPC), *(f"http_{name}" for name in OVER_HTTP))
_REFERENCE = GenerationRequest(
    prompt=Prompt.from_user("What stays the same?"),
    sampling=Sampling(max_tokens=12, seed=7, ignore_eos=True),
    selection=Selection(n=8, schedule=Schedule("tokens", (4,))),
    cache=CacheControl.BYPASS,
)
# Threads that grpc and asyncio may add to those of a fresh process, at most, and no more.
_MORE_THREADS = 24


class NotRecovered(Exception):
    """The invariant does not hold within its 10 seconds; says what is wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, as its client saw it."""

    code: str
    generation: Generation | None = None
    error: grpc.aio.AioRpcError | None = None
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The code; an answer that says it is a lesser one is told apart."""
        degraded = self.generation is not None and self.generation.degraded
        return f"{self.code} degraded" if degraded else self.code


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process, as the kernel counts."""

    resident_mib: float
    fds: int
    threads: int


class Call:
    """One request under way on a channel of its own."""

    def __init__(
        self,
        address: str,
        *,
        stream: bool = False,
        timeout_s: float | None = CALL_S,
        metadata: Mapping[str, str] | None = None,
        message: orchestrator_pb2.GenerateRequest | None = None,
        narrow: bool = False,
        **options: Any,
    ) -> None:
        """`narrow`: the server may be ahead of what is read by 64 KiB only, not by 4 MiB."""
        self.events: list[Any] = []
        self._channel = _narrow_channel(address) if narrow else open_channel(address, retries=False)
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
        message = message or request(**options)
        sent = tuple((metadata or {}).items())
        self._stream = stream
        if stream:
            whole = orchestrator_pb2.GenerateStreamRequest(request=message)
            self._rpc = stub.GenerateStream(whole, timeout=timeout_s, metadata=sent)
        else:
            self._rpc = stub.Generate(message, timeout=timeout_s, metadata=sent)
        self._task = asyncio.ensure_future(self._run())

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    async def outcome(self) -> Outcome:
        """Its end; closes the channel."""
        try:
            return await self._task
        finally:
            await self._channel.close()

    def cancel(self) -> None:
        """As a client that changes its mind."""
        self._rpc.cancel()

    async def close_channel(self) -> None:
        """As a client that goes away."""
        await self._channel.close()

    async def _run(self) -> Outcome:
        began = time.monotonic()
        try:
            last = await self._last()
        except grpc.aio.AioRpcError as error:
            return Outcome(error.code().name, error=error, seconds=time.monotonic() - began)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            return Outcome("CANCELLED", seconds=time.monotonic() - began)
        generation = wire.generation_from_wire(last)
        return Outcome("OK", generation, seconds=time.monotonic() - began)

    async def _last(self) -> Any:
        if not self._stream:
            return await self._rpc
        async for message in self._rpc:
            self.events.append(message)
        return self.events[-1].finished


class World:
    """A stack, the proxies around it, and what is known of it."""

    def __init__(
        self,
        stack: Stack,
        proxies: Mapping[str, Proxy],
        answer: Generation,
        strangers: frozenset[int],
    ) -> None:
        """`strangers` are children of this process that are none of the stack's."""
        self.stack = stack
        # On the orchestrator's ways to "generator", "reward", "redis", and before it: "front".
        self.proxies = proxies
        self._answer = answer
        self._strangers = strangers
        self._threads: dict[str, int] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """Where the services themselves listen."""
        stack = self.stack
        where = (stack.orchestrator_address, stack.generator_address, stack.reward_address)
        return dict(zip(SERVICES, where, strict=True))

    def call(self, through_front: bool = False, **options: Any) -> Call:
        """Begin a request: options of `Call`, and of `specrej.client.Options`."""
        front = f"127.0.0.1:{self.proxies['front'].port}"
        return Call(front if through_front else self.stack.orchestrator_address, **options)

    async def ask(self, **options: Any) -> Outcome:
        """A request from beginning to end."""
        return await self.call(**options).outcome()

    async def generator(self) -> GeneratorDescription:
        """What the generator says of itself, past the proxy."""
        async with open_channel(self.stack.generator_address, retries=False) as channel:
            stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
            message = generator_pb2.GeneratorServiceDescribeRequest()
            return wire.generator_from_wire(await stub.Describe(message, timeout=2))

    async def service(self) -> ServiceDescription:
        """What the orchestrator says of all."""
        async with open_channel(self.stack.orchestrator_address, retries=False) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            message = orchestrator_pb2.OrchestratorServiceDescribeRequest()
            return wire.service_from_wire(await stub.Describe(message, timeout=2))

    async def health(self, name: str) -> str:
        """SERVING, NOT_SERVING or the code of the failure."""
        async with open_channel(self.addresses[name], retries=False) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def usage(self, name: str) -> Usage:
        """What one process takes of the machine."""
        process = psutil.Process(self.stack.processes[name])
        resident, fds = process.memory_info().rss, process.num_fds()
        return Usage(resident / (1 << 20), fds, process.num_threads())

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send one process a signal."""
        os.kill(self.stack.processes[name], number)

    def kill(self, name: str) -> None:
        """As the kernel does; what the dead one had on its way through a proxy is lost."""
        self.signal(name, signal.SIGKILL)
        if name in self.proxies:
            self.proxies[name].cut()

    async def heal(self) -> None:
        """All proxies forward, whoever is stopped goes on, whoever is dead is started again."""
        for each in self.proxies.values():
            await each.heal()
        for name, pid in self.stack.processes.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() == psutil.STATUS_STOPPED:
                    process.resume()
            if not _is_alive(pid):
                await self.stack.restart(name)

    async def settle(self) -> float:
        """Seconds until the invariant holds.

        Raises:
            NotRecovered: it does not, within 10 s.
        """
        began, wrong = time.monotonic(), "nothing was checked"
        while time.monotonic() - began < RECOVERY_S:
            wrong = await self.wrong()
            if not wrong:
                return time.monotonic() - began
            await asyncio.sleep(0.02)
        raise NotRecovered(wrong)

    async def wrong(self) -> str:
        """What is not as before; empty if all is well."""
        try:
            generator, service = await self.generator(), await self.service()
        except grpc.aio.AioRpcError as error:
            return f"no description: {error.code().name} {error.details()}"
        held = (generator.sessions, generator.slots.owned, generator.waiting)
        if any((*held, service.running, service.queued)):
            return f"{held} sessions, slots, waiting; {service.running}+{service.queued} in flight"
        for name in SERVICES:
            if (health := await self.health(name)) != "SERVING":
                return f"{name} is {health}"
        return self._odd_processes() or await self._wrong_answer()

    def _odd_processes(self) -> str:
        expected = self.stack.processes
        if extra := _children() - self._strangers - set(expected.values()):
            return f"extra processes {[_name(pid) for pid in extra]}"
        for name, pid in expected.items():
            threads = psutil.Process(pid).num_threads()
            most = self._threads.setdefault(f"{name} {pid}", threads) + _MORE_THREADS
            if threads > most:
                return f"{name} has {threads} threads"
        return ""

    async def _wrong_answer(self) -> str:
        outcome = await self.ask(message=wire.request_to_wire(_REFERENCE), timeout_s=5)
        if outcome.generation is None:
            details = outcome.error.details() if outcome.error else ""
            return f"the next request ends {outcome.code}: {details}"
        if outcome.generation.degraded:
            return "the next answer is degraded"
        if not _is_same(outcome.generation, self._answer):
            return f"the next answer is {outcome.generation.best.text!r}"
        return ""


@asynccontextmanager
async def world(
    environment: Mapping[str, str] | None = None, make_stack: Callable[..., Stack] = Stack
) -> AsyncIterator[World]:
    """A running world; `environment` is for all its services, over what worlds have.

    Its right answer is made without any service where its generator is a toy; else it is the first.
    """
    strangers = _children()
    async with AsyncExitStack() as undo:
        ports = Ports.free()
        targets = {
            "generator": ports.generator,
            "reward": ports.reward,
            "redis": ports.redis,
            "front": ports.orchestrator,
        }
        proxies = {
            name: await undo.enter_async_context(proxy(port)) for name, port in targets.items()
        }
        far = {
            "grpc": await undo.enter_async_context(grpc_rogue()),
            "http": await undo.enter_async_context(http_rogue()),
        }
        told = {**_environment(proxies, far), **(environment or {})}
        stack = await undo.enter_async_context(make_stack(ports, environment=told, grace_s=10))
        is_toy = told["SPECREJ_GENERATOR_MODEL"] == _TOY
        yield World(
            stack,
            proxies,
            await (_right_answer() if is_toy else _first_answer(stack.orchestrator_address)),
            strangers,
        )


def request(prompt: str = PROMPT, **options: Any) -> orchestrator_pb2.GenerateRequest:
    """A small request with some options of its own; past the cache, if it names none."""
    usual = Options(n=8, max_tokens=32, seed=3, ignore_eos=True, cache=CacheControl.BYPASS)
    return build_request(prompt, **{**usual, **options})


def _narrow_channel(address: str) -> grpc.aio.Channel:
    window = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
    return grpc.aio.insecure_channel(address, window)


async def until(condition: Callable[[], Awaitable[bool]], bound_s: float = RECOVERY_S) -> None:
    """Returns once the condition holds; TimeoutError after `bound_s` seconds."""
    async with asyncio.timeout(bound_s):
        while not await condition():  # noqa: ASYNC110  # other processes' state has no event
            await asyncio.sleep(0.01)


def _environment(proxies: Mapping[str, Proxy], far: Mapping[str, int]) -> dict[str, str]:
    where = {name: f"127.0.0.1:{each.port}" for name, each in proxies.items()}
    paths = [
        {"name": name, "kind": "function", "function": f"tests.faults.rewards:{name}"}
        for name in _REWARDS
    ]
    paths += [_far_reward(name, far) for name in _FAR]
    return {
        "SPECREJ_GENERATOR_MODEL": _TOY,
        "SPECREJ_GENERATOR_LEASE_S": str(LEASE_S),
        "SPECREJ_GENERATOR_GRACE_S": "2",
        "SPECREJ_REWARD_REWARDS": json.dumps([{"name": "toy", "kind": "toy"}, *paths]),
        "SPECREJ_REWARD_LEASE_S": str(2 * LEASE_S),
        "SPECREJ_REWARD_GRACE_S": "2",
        "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": where["generator"],
        "SPECREJ_ORCHESTRATOR_REWARD_ADDRESS": where["reward"],
        "SPECREJ_ORCHESTRATOR_REDIS_URL": f"redis://{where['redis']}/0",
        "SPECREJ_ORCHESTRATOR_MAX_RUNNING": str(MAX_RUNNING),
        "SPECREJ_ORCHESTRATOR_MAX_QUEUED": str(MAX_QUEUED),
        "SPECREJ_ORCHESTRATOR_GRACE_S": "2",
    }


def _far_reward(name: str, ports: Mapping[str, int]) -> dict[str, str]:
    kind, _, what = name.partition("_")
    where = f"{HOST}:{ports[kind]}"
    if kind == "grpc":
        return {"name": name, "kind": kind, "address": where, "reward": what}
    return {"name": name, "kind": kind, "url": f"http://{where}/{what}"}


async def _first_answer(address: str) -> Generation:
    outcome = await Call(address, message=wire.request_to_wire(_REFERENCE)).outcome()
    assert outcome.generation, outcome.code
    return outcome.generation


async def _right_answer() -> Generation:
    """The reference request's, made without any service."""
    scorer = await Worker.start(ToyReward)
    try:
        async for event in run(_REFERENCE, ToyGenerator(), scorer):
            if isinstance(event, Finished):
                return event.generation
    finally:
        scorer.close()
    raise AssertionError("a run ended without an answer")


def _is_same(one: Generation, other: Generation) -> bool:
    """To the last character; a prompt that is read in other pieces moves the last digits only."""
    if len(one.candidates) != len(other.candidates):
        return False
    pairs = [(asdict(a), asdict(b)) for a, b in zip(one.candidates, other.candidates, strict=True)]
    return all(_is_close(a[name], b[name]) for a, b in pairs for name in a)


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_close, one, other))
    return math.isclose(one, other, rel_tol=1e-5) if isinstance(one, float) else one == other


def _children() -> frozenset[int]:
    return frozenset(child.pid for child in psutil.Process().children(recursive=True))


def _is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _name(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline()[:4])
    return "gone"
