"""All services as real processes on toys, used in every way that a metric tells of."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc

from specrej.channel import open_channel
from specrej.client import Client, Options
from specrej.contracts import Algorithm, CacheControl
from specrej.errors import DeadlineExceeded, Overloaded, SpecrejError
from specrej.processes import Processes, Program
from specrej.prometheus import Look, look, prometheus_name
from specrej.stack import HOST, Ports, Stack
from specrej.telemetry import names
from specrej.v1 import common_pb2, generator_pb2, generator_pb2_grpc

_BOUND_S = 60.0
_ATTEMPTS = 10
_ENVIRONMENT = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
    "SPECREJ_GENERATOR_LEASE_S": "1",
    "SPECREJ_REWARD_REWARDS": json.dumps([{"name": "toy", "kind": "toy"}]),
    "SPECREJ_ORCHESTRATOR_MAX_RUNNING": "1",
    "SPECREJ_ORCHESTRATOR_MAX_QUEUED": "1",
    "SPECREJ_ORCHESTRATOR_SHADOW_SHARE": "1",
    # So that a few requests are enough for a recommendation.
    "SPECREJ_ORCHESTRATOR_SHADOW_REGRET": "0.9",
    "SPECREJ_ORCHESTRATOR_BACKEND_POLL_S": "0.2",
}
# Many whose last would take too long though some have ended; some of which none ever ends.
_LATE: dict[str, Options] = {
    "hurried": {"n": 256, "max_tokens": 600, "alpha": 0.0},
    "degraded": {"n": 4, "max_tokens": 4000, "ignore_eos": True},
}
# Seconds; how fast the machine is decides which of them is too short, but not by too much.
_TIMEOUTS = {"hurried": (0.8, 0.5, 1.2, 2.0), "degraded": (2.5, 4.0, 1.5, 6.0)}


async def busy_look() -> Look:
    """What the endpoints tell in the end."""
    ports, spare = Ports.free(), Ports.free().generator
    both = f"{HOST}:{ports.generator},{HOST}:{spare}"
    environment = {**_ENVIRONMENT, "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": both}
    async with (
        Stack(ports, environment=environment) as stack,
        Client(stack.orchestrator_address, timeout_s=20) as client,
    ):
        urls = stack.ports.metrics_urls
        await _usual(client)
        await _shadows(client, urls)
        await _refused(client)
        await _hurried(client)
        await _silent(stack.generator_address)
        await _lost(client, spare, stack.log_dir)
        os.kill(stack.processes["redis"], signal.SIGKILL)
        await client.generate("without a cache", n=2, max_tokens=8)
        os.kill(stack.processes["reward"], signal.SIGSTOP)
        try:
            await _failed(client, urls[0])
        finally:
            os.kill(stack.processes["reward"], signal.SIGCONT)
        return await _until(urls, lambda now: bool(now.value(names.LEASES_EXPIRED)))


async def _usual(client: Client) -> None:
    for _ in range(2):  # the second comes from the cache
        await client.generate("usual", n=8, max_tokens=48)
    await client.generate("usual", n=4, max_tokens=48, algorithm=Algorithm.BEST_OF_N)
    equal = (client.generate("at the same time", n=8, max_tokens=48) for _ in range(2))
    await asyncio.gather(*equal)


async def _shadows(client: Client, urls: tuple[str, ...]) -> None:
    """Until there is a recommendation."""
    seeds, began = count(1), time.monotonic()
    while (await look(urls, 5.0)).value(names.SHADOW_ALPHA) is None:
        assert time.monotonic() - began < _BOUND_S, "shadows recommend nothing"
        with suppress(Overloaded):
            await client.generate("shadowed", n=8, max_tokens=48, seed=next(seeds))


async def _refused(client: Client) -> None:
    several = [client.generate("several", n=8, max_tokens=96, seed=seed) for seed in range(6)]
    ended = await asyncio.gather(*several, return_exceptions=True)
    assert any(isinstance(error, SpecrejError) for error in ended)


async def _hurried(client: Client) -> None:
    """Until an answer was cut deeper for its deadline, and another cut short by it."""
    missing, began = {"hurried", "degraded"}, time.monotonic()
    for seed in count():
        for kind in sorted(missing):
            options: Options = {
                **_LATE[kind],
                "seed": seed,
                "allow_degraded": True,
                "cache": CacheControl.BYPASS,
            }
            with suppress(DeadlineExceeded):
                answer = await client.generate(
                    "in time", timeout_s=_TIMEOUTS[kind][seed % 4], **options
                )
                missing -= {kind} if getattr(answer, kind) else set()
        if not missing:
            return
        assert time.monotonic() - began < _BOUND_S, f"no answer was {missing}"


async def _failed(client: Client, url: str) -> None:
    """Until the orchestrator itself ended a request for its deadline.

    Where it is late, its client has hung up before: that counts as cancelled.
    """
    name = f"{prometheus_name(names.RPC_DURATION)}_count"
    failed = {
        names.RPC_METHOD: "specrej.v1.OrchestratorService/Generate",
        names.RPC_CODE: grpc.StatusCode.DEADLINE_EXCEEDED.name,
    }
    for attempt in count(1):
        with suppress(DeadlineExceeded):
            await client.generate(f"late {attempt}", n=2, max_tokens=8, timeout_s=0.5 * attempt)
        if list((await look([url], 5.0)).matching(name, failed)):
            return
        assert attempt < _ATTEMPTS, "no request failed for its deadline"


async def _silent(address: str) -> None:
    """A peer that opens a session and says no more."""
    channel = open_channel(address, retries=False)
    stub = generator_pb2_grpc.GeneratorServiceStub(channel)
    opening = generator_pb2.OpenSession(
        prompt=common_pb2.Prompt(text="silence"),
        n=1,
        sampling=common_pb2.Sampling(max_tokens=8),
        first_round_tokens=8,
    )
    call = stub.Session()
    await call.write(generator_pb2.SessionRequest(sequence=1, open=opening))
    await call.read()
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION  # the lease has run out
    await channel.close()


async def _lost(client: Client, port: int, log_dir: Path) -> None:
    """Until a generator was lost, and what it did went on at another."""

    async def is_there() -> bool:
        return await _sessions(port) is not None

    program = Program(
        "spare",
        (sys.executable, "-m", "generator_service"),
        is_there,
        {**_ENVIRONMENT, "SPECREJ_GENERATOR_PORT": str(port)},
    )
    async with Processes([program], log_dir) as processes:
        began = time.monotonic()
        for number in count():
            asked = asyncio.ensure_future(client.generate(f"lost {number}", n=4, max_tokens=400))
            while not (asked.done() or await _sessions(port)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # another process's state has no event
            if not asked.done():
                os.kill(processes.pids["spare"], signal.SIGKILL)
                await asked
                return
            assert time.monotonic() - began < _BOUND_S, "a generator is never used"


async def _sessions(port: int) -> int | None:
    """That a generator has; None: it is not there."""
    async with open_channel(f"{HOST}:{port}", retries=False) as channel:
        stub = generator_pb2_grpc.GeneratorServiceStub(channel)
        try:
            told = await stub.Describe(generator_pb2.GeneratorServiceDescribeRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return None
    return int(told.sessions)


async def _until(urls: tuple[str, ...], condition: Callable[[Look], bool]) -> Look:
    began = time.monotonic()
    while not condition(now := await look(urls, 5.0)):
        assert time.monotonic() - began < _BOUND_S, "a metric never came"
    assert not now.failures
    return now
