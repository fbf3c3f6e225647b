"""All services as processes that export to a real collector, and what their clients see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from deploy.local.stack import Stack
from specrej.client.channel import open_channel
from specrej.client.client import build_request
from specrej.contracts import CacheControl, Event, Options, wire
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.collector import Collector, collecting

GENERATE = "specrej.v1.OrchestratorService/Generate"
GENERATE_STREAM = "specrej.v1.OrchestratorService/GenerateStream"
SESSION = "specrej.backend.v1.GeneratorService/Session"
SCORE_SESSION = "specrej.backend.v1.RewardService/ScoreSession"
SERVICES = ("orchestrator", "generator", "reward")
_TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=10",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}


@dataclass(slots=True)
class Outcome:
    """The end of a call, as its client sees it."""

    code: str = "OK"
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Observed:
    """A running service and its collector."""

    stack: Stack
    collector: Collector
    stub: Any

    def log_of(self, service: str) -> list[dict[str, Any]]:
        """The JSON lines of a service so far."""
        text = (self.stack.log_dir / f"{service}.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@asynccontextmanager
async def observed(
    environment: Mapping[str, str] | None = None, *, on_toys: bool = True, gateway: bool = False
) -> AsyncIterator[Observed]:
    """A service of real processes that exports to a collector at short intervals."""
    async with collecting() as collector:
        variables = {
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "SPECREJ_ORCHESTRATOR_LOG_FORMAT": "json",
            # The default of a quarter of a second is short on a busy machine.
            "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
            **{
                f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": collector.endpoint
                for name in (*SERVICES, "gateway")
            },
            **(_TOYS if on_toys else {}),
            **(environment or {}),
        }
        async with (
            Stack(environment=variables, gateway=gateway) as stack,
            open_channel(stack.orchestrator_address) as channel,
        ):
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            yield Observed(stack, collector, stub)


def request(prompt: str = "Why?", **options: Any) -> orchestrator_pb2.GenerateRequest:
    """A small request; `options` override, for example, the cache bypass."""
    usual = Options(n=4, max_tokens=16, seed=1, ignore_eos=True, cache=CacheControl.BYPASS)
    return build_request(prompt, **{**usual, **options})


async def streamed(
    stub: Any, message: orchestrator_pb2.GenerateRequest, *, leave_after: int = 0, **call: Any
) -> Outcome:
    """The outcome of a stream, which is cancelled after `leave_after` events unless that is 0."""
    whole = orchestrator_pb2.GenerateStreamRequest(request=message)
    rpc, outcome = stub.GenerateStream(whole, **call), Outcome()
    try:
        async for event in rpc:
            outcome.events.append(wire.event_from_message(event))
            if len(outcome.events) == leave_after:
                rpc.cancel()
    except asyncio.CancelledError:
        outcome.code = "CANCELLED"
    except grpc.aio.AioRpcError as failure:
        outcome.code = failure.code().name
    return outcome
