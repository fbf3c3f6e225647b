"""Runs all services as processes on toys and triggers every metric."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from deploy.local.processes import Processes, Program
from deploy.local.stack import HOST, Ports, Stack, replies
from specrej.backend.v1 import generator_pb2, generator_pb2_grpc, reward_pb2, reward_pb2_grpc
from specrej.client import Client
from specrej.client.channel import open_channel
from specrej.contracts import Algorithm, Options
from specrej.contracts.errors import DeadlineExceeded, SpecrejError
from specrej.security import Credentials, new_token
from specrej.telemetry import names
from specrej.telemetry.names import Metric
from specrej.v1 import common_pb2
from tests import serving
from tests.certificates import Authority
from tests.collector import Collector, collecting
from tests.endpoints import Scrape, prometheus_name, scrape
from tests.serving import describe_generator, health_of

METRICS = [metric for metric in vars(names).values() if isinstance(metric, Metric)]
_BOUND_S = 60.0
_ATTEMPTS = 10
_MAX_CALLS = 40
_ENVIRONMENT = {
    "SPECREJ_GENERATOR_MAX_CALLS": str(_MAX_CALLS),
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
    "SPECREJ_GENERATOR_LEASE_S": "1",
    "SPECREJ_REWARD_REWARDS": json.dumps([{"name": "toy", "kind": "toy"}]),
    "SPECREJ_ORCHESTRATOR_MAX_RUNNING": "1",
    "SPECREJ_ORCHESTRATOR_MAX_QUEUED": "1",
    "OTEL_METRIC_EXPORT_INTERVAL": "200",
}
# Hurried: many candidates, the last of which would take too long. Degraded: none ever ends.
_LATE: dict[str, Options] = {
    "hurried": {"n": 256, "max_tokens": 600, "alpha": 0.0, "allow_degraded": True},
    "degraded": {"n": 4, "max_tokens": 4000, "ignore_eos": True, "allow_degraded": True},
}
# Seconds; the speed of the machine decides which of them is too short, but not by too much.
_TIMEOUTS = {"hurried": (0.8, 0.5, 1.2, 2.0), "degraded": (2.5, 4.0, 1.5, 6.0)}

until = partial(serving.until, bound_s=_BOUND_S, every_s=0.02)


async def busy_scrape(directory: Path) -> tuple[Scrape, Collector]:
    """Return the metrics of a stack that has recorded every metric, and those it has exported.

    The reward service admits only the token that it writes to the directory.
    """
    ports, spare = Ports.free(), f"{HOST}:{Ports.free().generator}"
    authority = Authority(directory)
    pair, credentials = authority.issue(), Credentials(tls_ca=authority.path)
    async with collecting() as collector:
        environment = {
            **_ENVIRONMENT,
            **_tokens(directory),
            "SPECREJ_GATEWAY_ORCHESTRATOR_TLS_CA": str(authority.path),
            "SPECREJ_ORCHESTRATOR_TLS_CERT": str(pair.cert),
            "SPECREJ_ORCHESTRATOR_TLS_KEY": str(pair.key),
            "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": f"{HOST}:{ports.generator},{spare}",
            **{
                f"SPECREJ_{kind.upper()}_OTLP_ENDPOINT": collector.endpoint
                for kind in ("orchestrator", "generator", "reward", "gateway")
            },
        }
        async with (
            Stack(
                ports,
                environment=environment,
                credentials=credentials,
                gateway=True,
                log_dir=directory,
            ) as stack,
            Client(stack.orchestrator_address, timeout_s=20, **credentials) as client,
        ):
            urls = stack.metrics_urls
            assert await replies(ports.gateway, b"what?\r\n\r\n", b" 400 ")
            assert await replies(
                ports.gateway, b"GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n", b" 404 "
            )
            await _too_many(stack.generator_address)
            # It waits for a bound of the service, beside all others.
            waiting = asyncio.ensure_future(_silent(stack.generator_address))
            await _usual(client)
            await _refused(client)
            async with open_channel(stack.reward_address) as channel:  # without a token
                stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
                with suppress(grpc.aio.AioRpcError):
                    await stub.Describe(reward_pb2.RewardServiceDescribeRequest())
            await _hurried(client)
            await waiting
            await _lost(client, spare, directory)
            await _without_backends(stack, client, urls[0])
            return await _under_way(client, urls, collector), collector


async def _without_backends(stack: Stack, client: Client, url: str) -> None:
    """Requests after Redis has ended, and while the reward service is stopped."""
    os.kill(stack.processes["redis"], signal.SIGKILL)
    await client.generate("without a cache", n=2, max_tokens=8)
    os.kill(stack.processes["reward"], signal.SIGSTOP)
    try:
        await _failed(client, url)
    finally:
        os.kill(stack.processes["reward"], signal.SIGCONT)


async def _under_way(client: Client, urls: Sequence[str], collector: Collector) -> Scrape:
    """The metrics during a request, once all are exported and those of tenants are shown."""
    options: Options = {"n": 2, "max_tokens": 4000, "ignore_eos": True}
    under_way = asyncio.ensure_future(client.generate("under way", **options))
    exported = {metric.name for metric in METRICS}
    await until(lambda: {name for _, name in collector.metrics} >= exported)
    name = prometheus_name(names.TENANT_TOKENS)
    shown = partial(serving.until_read, bound_s=_BOUND_S, every_s=0.02)
    await shown(lambda: scrape(urls), lambda found: name in found.values)
    busy = await scrape(urls)
    assert name in busy.values
    under_way.cancel()
    return busy


async def _usual(client: Client) -> None:
    for _ in range(2):  # the second comes from the cache
        await client.generate("usual", n=8, max_tokens=48)
    await client.generate("usual", n=4, max_tokens=48, algorithm=Algorithm.BEST_OF_N)
    equal = (client.generate("at the same time", n=8, max_tokens=48) for _ in range(2))
    await asyncio.gather(*equal)


async def _refused(client: Client) -> None:
    several = [client.generate("several", n=8, max_tokens=96, seed=seed) for seed in range(6)]
    ended = await asyncio.gather(*several, return_exceptions=True)
    assert any(isinstance(error, SpecrejError) for error in ended)


def _tokens(directory: Path) -> dict[str, str]:
    """Settings with which the orchestrator sends the reward service a token."""
    token, line = new_token("orchestrator")
    tokens_file, token_file = directory / "tokens", directory / "token"
    tokens_file.write_text(line)
    token_file.write_text(token)
    return {
        "SPECREJ_REWARD_TOKENS_FILE": str(tokens_file),
        "SPECREJ_ORCHESTRATOR_BACKEND_TOKEN_FILE": str(token_file),
        "SPECREJ_ORCHESTRATOR_BACKEND_ALLOW_PLAINTEXT_TOKEN": "true",
    }


async def _too_many(address: str) -> None:
    """Begin calls on two connections until one of them is refused."""
    port = address.rpartition(":")[2]
    async with open_channel(address) as one, open_channel(f"localhost:{port}") as other:
        method = "/specrej.backend.v1.GeneratorService/Describe"
        stubs: list[Any] = [channel.stream_stream(method) for channel in (one, other)]
        calls = [stub() for stub in stubs for _ in range(_MAX_CALLS)]
        codes = [asyncio.ensure_future(call.code()) for call in calls]
        await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        assert {code.result() for code in codes if code.done()} == {
            grpc.StatusCode.RESOURCE_EXHAUSTED
        }
        for call in calls:
            call.cancel()
        await asyncio.wait(codes)


async def _hurried(client: Client) -> None:
    """Send requests until one answer was hurried and another was truncated by its deadline."""
    missing, seeds = {"hurried", "degraded"}, count()

    async def are_complete() -> bool:
        seed = next(seeds)
        for kind in sorted(missing):
            timeout_s = _TIMEOUTS[kind][seed % 4]
            with suppress(DeadlineExceeded):
                answer = await client.generate(f"{seed}", timeout_s=timeout_s, **_LATE[kind])
                missing.difference_update({kind} if getattr(answer, kind) else ())
        return not missing

    await until(are_complete)


async def _failed(client: Client, url: str) -> None:
    """Send requests until the orchestrator itself ended one for its deadline.

    If it is late, its client has ended the call before, which counts as cancelled.
    """
    name = f"{prometheus_name(names.RPC_DURATION)}_count"
    failed = {
        names.RPC_METHOD: "specrej.v1.OrchestratorService/Generate",
        names.RPC_CODE: grpc.StatusCode.DEADLINE_EXCEEDED.name,
    }
    for attempt in range(1, _ATTEMPTS + 1):
        with suppress(DeadlineExceeded):
            await client.generate(f"late {attempt}", n=2, max_tokens=8, timeout_s=0.5 * attempt)
        if (await scrape([url])).matching(name, **failed):
            return
    raise AssertionError("no request failed for its deadline")


async def _silent(address: str) -> None:
    """Open a session and send nothing more, until the lease expires."""
    async with open_channel(address) as channel:
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
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION  # the lease has expired


async def _lost(client: Client, address: str, log_dir: Path) -> None:
    """Kill a generator while it has a session; the session must continue on another."""

    async def is_ready() -> bool:
        return await health_of(address) == "SERVING"

    program = Program(
        "spare",
        (sys.executable, "-m", "generator_service"),
        is_ready,
        {**_ENVIRONMENT, "SPECREJ_GENERATOR_PORT": address.rpartition(":")[2]},
    )
    async with Processes([program], log_dir) as processes:
        for number in range(_ATTEMPTS):
            request = asyncio.ensure_future(client.generate(f"lost {number}", n=4, max_tokens=400))
            await until(partial(_is_used, request, address))
            if not request.done():
                os.kill(processes.processes["spare"], signal.SIGKILL)
                await request
                return
        raise AssertionError("the generator received no session")


async def _is_used(request: asyncio.Future[Any], address: str) -> bool:
    return request.done() or (await describe_generator(address)).sessions > 0
