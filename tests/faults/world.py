"""All services as real processes on toy models, proxies between them, and the invariant.

A world's clients never retry, so that they see every status.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import psutil  # type: ignore[import-untyped]

from deploy.local.stack import Ports, Stack
from specrej import contracts as c
from specrej.client.channel import open_channel
from specrej.client.client import build_request
from specrej.contracts import wire
from specrej.contracts.status import DETAILS_TRAILER, PUSHBACK_TRAILER
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests import serving
from tests.faults.proxy import HOST, Proxy, proxy
from tests.serving import describe_generator, describe_service, health_of

RECOVERY_S = 10.0  # bound of the invariant
until = partial(serving.until, bound_s=RECOVERY_S, every_s=0.01)
until_read = partial(serving.until_read, bound_s=RECOVERY_S, every_s=0.01)
_CALL_S = 20.0  # a call that takes longer hangs
CACHE_S = 1.0  # of a call to Redis: longer than it takes on a busy machine
LEASE_S = 3.0
MAX_RUNNING = 4
CACHE_SECRET = "cache-secret"  # a file
# The prompt of requests under attack, which proxies recognise.
PROMPT = "An unmistakable prompt of nine words, one two three"
SERVICES = ("orchestrator", "generator", "reward")
_REWARDS = ("nan", "exiting", "leaky")
_REFERENCE: Mapping[str, Any] = {
    "prompt": "What stays the same?",
    "max_tokens": 12,
    "seed": 7,
    "schedule": c.Schedule("tokens", tokens=(4,)),
}
_RETRYABLE = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
# Maximum of threads that grpc and asyncio add to those of a fresh process.
_MORE_THREADS = 24


class NotRecovered(Exception):
    """The invariant does not hold in time; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call, as its client sees it."""

    code: str
    generation: c.Generation | None = None
    error: grpc.aio.AioRpcError | None = None
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The status code, with a mark for degraded answers, and for a retryable status of ours
        without the delay before a retry."""
        degraded = self.generation is not None and self.generation.degraded
        trailers = dict((self.error and self.error.trailing_metadata()) or ())
        if self.code in _RETRYABLE and DETAILS_TRAILER in trailers:
            return self.code if PUSHBACK_TRAILER in trailers else f"{self.code} without a delay"
        return f"{self.code} degraded" if degraded else self.code


class Call:
    """One request in progress on a channel of its own; `events` are those of its stream."""

    def __init__(
        self,
        address: str,
        *,
        stream: bool = False,
        timeout_s: float | None = _CALL_S,
        narrow: bool = False,
        **options: Any,
    ) -> None:
        """`narrow`: limit the flow-control window to 64 KiB instead of 4 MiB."""
        self.events: list[Any] = []
        window = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
        narrowed = grpc.aio.insecure_channel(address, window) if narrow else None
        self._channel = narrowed or open_channel(address)
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
        message = request(**options)
        self._stream = stream
        if stream:
            whole = orchestrator_pb2.GenerateStreamRequest(request=message)
            self._rpc = stub.GenerateStream(whole, timeout=timeout_s)
        else:
            self._rpc = stub.Generate(message, timeout=timeout_s)
        self._task = asyncio.ensure_future(self._run())

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        return self._task.done()

    async def outcome(self) -> Outcome:
        """Wait for the end of the call, then close the channel."""
        try:
            return await self._task
        finally:
            await self._channel.close()

    def cancel(self) -> None:
        """Cancel the call."""
        self._rpc.cancel()

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
        generation = wire.generation_from_message(last)
        return Outcome("OK", generation, seconds=time.monotonic() - began)

    async def _last(self) -> Any:
        if not self._stream:
            return await self._rpc
        async for message in self._rpc:
            self.events.append(message)
        return self.events[-1].finished


@dataclass(eq=False, slots=True)
class World:
    """A stack, the proxies around it, and its reference answer."""

    stack: Stack
    proxies: Mapping[str, Proxy]  # between the orchestrator and "generator", "reward", "redis"
    _other_children: frozenset[int]  # ids of processes that do not belong to the stack
    _threads: dict[str, int] = field(default_factory=dict)
    _answer: c.Generation | None = None  # to the reference request, before all faults

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the services, without proxies."""
        stack = self.stack
        addresses = (stack.orchestrator_address, stack.generator_address, stack.reward_address)
        return dict(zip(SERVICES, addresses, strict=True))

    def call(self, **options: Any) -> Call:
        """Start a request with options of `Call` and of `specrej.client.Options`."""
        return Call(self.stack.orchestrator_address, **options)

    async def generate(self, **options: Any) -> Outcome:
        """Send a request and wait for its end."""
        return await self.call(**options).outcome()

    async def generator(self) -> c.GeneratorDescription:
        """Return the generator's description, without the proxy."""
        return await describe_generator(self.stack.generator_address)

    async def service(self) -> c.ServiceDescription:
        """Return the orchestrator's description of all services."""
        return await describe_service(self.stack.orchestrator_address)

    def process(self, name: str) -> psutil.Process:
        """Return one process of the stack."""
        return psutil.Process(self.stack.processes[name])

    def signal(self, name: str, number: Signals) -> None:
        """Send one process a signal."""
        os.kill(self.stack.processes[name], number)

    def kill(self, name: str) -> None:
        """Kill one process and reset its connections through a proxy."""
        self.signal(name, signal.SIGKILL)
        if name in self.proxies:
            self.proxies[name].cut()

    async def heal(self) -> None:
        """Reset all proxies, resume stopped processes and restart dead ones."""
        for forwarder in self.proxies.values():
            await forwarder.heal()
        for name in self.stack.processes:
            status = psutil.STATUS_ZOMBIE
            with suppress(psutil.NoSuchProcess):
                status = self.process(name).status()
            if status == psutil.STATUS_STOPPED:
                self.process(name).resume()
            if status == psutil.STATUS_ZOMBIE:
                await self.stack.restart(name)

    async def settle(self) -> None:
        """Wait until the invariant holds.

        Raises:
            NotRecovered: not within 10 s.
        """
        began = time.monotonic()
        while problem := await self.wrong():
            if time.monotonic() - began > RECOVERY_S:
                raise NotRecovered(problem)
            await asyncio.sleep(0.02)

    async def wrong(self) -> str:
        """Return the first violation of the invariant; empty if it holds."""
        try:
            generator, service = await self.generator(), await self.service()
        except grpc.aio.AioRpcError as error:
            return f"no description: {error.code().name} {error.details()}"
        held = (generator.sessions, generator.slots.owned, generator.waiting)
        if any((*held, service.running, service.queued)):
            return f"{held} sessions, slots, waiting; {service.running}+{service.queued} in flight"
        for name in SERVICES:
            if (health := await health_of(self.addresses[name])) != "SERVING":
                return f"{name} is {health}"
        return self._extra_processes() or await self._wrong_answer()

    def _extra_processes(self) -> str:
        expected = self.stack.processes
        if extra := _children() - self._other_children - set(expected.values()):
            return f"extra processes {extra}"
        for name, pid in expected.items():
            threads = self.process(name).num_threads()
            most = self._threads.setdefault(f"{name} {pid}", threads) + _MORE_THREADS
            if threads > most:
                return f"{name} has {threads} threads"
        return ""

    async def _wrong_answer(self) -> str:
        outcome = await self.generate(**_REFERENCE, timeout_s=5)
        if outcome.generation is None:
            details = outcome.error.details() if outcome.error else ""
            return f"the next request ends with {outcome.code}: {details}"
        if outcome.generation.degraded:
            return "the next answer is degraded"
        self._answer = self._answer or outcome.generation
        if not _is_same(outcome.generation, self._answer):
            return f"the next answer is {outcome.generation.best.text!r}"
        return ""


@asynccontextmanager
async def world(environment: Mapping[str, str] | None = None) -> AsyncIterator[World]:
    """Start a world; `environment` overrides the variables of all its services."""
    other_children = _children()
    async with AsyncExitStack() as undo:
        ports = Ports.free()
        targets = {"generator": ports.generator, "reward": ports.reward, "redis": ports.redis}
        proxies = {
            name: await undo.enter_async_context(proxy(port)) for name, port in targets.items()
        }
        files = Path(undo.enter_context(TemporaryDirectory(prefix="specrej-faults-")))
        (files / CACHE_SECRET).write_text(secrets.token_hex(32))
        variables = {**_environment(proxies, files), **(environment or {})}
        stack = await undo.enter_async_context(Stack(ports, environment=variables, grace_s=10))
        running = World(stack, proxies, other_children)
        await running.settle()  # the first answer is the reference
        yield running


def request(prompt: str = PROMPT, **options: Any) -> orchestrator_pb2.GenerateRequest:
    """Return a small request with these options; it bypasses the cache unless they name a mode."""
    defaults = c.Options(n=8, max_tokens=32, seed=3, ignore_eos=True, cache=c.CacheControl.BYPASS)
    return build_request(prompt, **{**defaults, **options})


def _environment(proxies: Mapping[str, Proxy], files: Path) -> dict[str, str]:
    addresses = {name: f"{HOST}:{proxy.port}" for name, proxy in proxies.items()}
    functions = [
        {"name": name, "kind": "function", "function": f"tests.faults.rewards:{name}"}
        for name in _REWARDS
    ]
    return {
        "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
        "SPECREJ_GENERATOR_LEASE_S": str(LEASE_S),
        "SPECREJ_REWARD_REWARDS": json.dumps([{"name": "toy", "kind": "toy"}, *functions]),
        "SPECREJ_REWARD_LEASE_S": str(2 * LEASE_S),
        "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": addresses["generator"],
        "SPECREJ_ORCHESTRATOR_REWARD_ADDRESS": addresses["reward"],
        "SPECREJ_ORCHESTRATOR_REDIS_URL": f"redis://{addresses['redis']}/0",
        "SPECREJ_ORCHESTRATOR_CACHE_SECRET_FILE": str(files / CACHE_SECRET),
        "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": str(CACHE_S),
        "SPECREJ_ORCHESTRATOR_MAX_RUNNING": str(MAX_RUNNING),
        **{f"SPECREJ_{name.upper()}_GRACE_S": "2" for name in SERVICES},
    }


def _is_same(one: c.Generation, other: c.Generation) -> bool:
    """Compare answers; scores may differ in their last digits, as prompts are read in chunks."""

    def texts(answer: c.Generation) -> list[Any]:
        return [(c.id, c.text, c.finish) for c in answer.candidates]

    pairs = zip(one.candidates, other.candidates, strict=False)
    return texts(one) == texts(other) and all(
        math.isclose(a.score, b.score, rel_tol=1e-5) for a, b in pairs
    )


def _children() -> frozenset[int]:
    return frozenset(child.pid for child in psutil.Process().children(recursive=True))
