"""The whole service as processes, on toys, with a real collector behind them; what clients saw."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from specrej import wire
from specrej.channel import open_channel
from specrej.client import Options, build_request
from specrej.contracts import CacheControl, Event
from specrej.stack import Stack
from specrej.telemetry.names import Metric
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.collector import Collector, collecting

GENERATE = "specrej.v1.OrchestratorService/Generate"
GENERATE_STREAM = "specrej.v1.OrchestratorService/GenerateStream"
SESSION = "specrej.v1.GeneratorService/Session"
SCORE_SESSION = "specrej.v1.RewardService/ScoreSession"
SERVICES = ("orchestrator", "generator", "reward")
BOUND_S = 20.0
MAX_RUNNING, MAX_QUEUED = 4, 4
_REWARDS = [
    {"name": "toy", "kind": "toy"},
    {"name": "raising", "kind": "function", "function": "tests.faults.rewards:raising"},
]


@dataclass(frozen=True, slots=True)
class Values:
    """What a Prometheus endpoint said: samples by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples of a name with these labels, dots as underscores."""
        wanted = {(key.replace(".", "_"), value) for key, value in labels.items()}
        return sum(
            value
            for (sample, having), value in self.samples.items()
            if sample == name and wanted <= having
        )

    def __sub__(self, before: Values) -> Values:
        return Values(
            {key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()}
        )


@dataclass(slots=True)
class Outcome:
    """How a call ended for its client."""

    code: str = "OK"
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Observed:
    """A running service and its collector."""

    stack: Stack
    collector: Collector
    stub: Any

    async def scrape(self, service: str) -> Values:
        """What a service's Prometheus endpoint says now."""
        port = getattr(self.stack.ports, f"metrics_{service}")
        return await asyncio.to_thread(_scrape, f"http://127.0.0.1:{port}/metrics")

    def log_of(self, service: str) -> list[dict[str, Any]]:
        """Its lines so far."""
        text = (self.stack.log_dir / f"{service}.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@asynccontextmanager
async def observed(
    environment: Mapping[str, str] | None = None, *, on_toys: bool = True
) -> AsyncIterator[Observed]:
    """A service of real processes that tells a collector everything, soon."""
    async with collecting() as collector:
        told = {
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "SPECREJ_ORCHESTRATOR_LOG_FORMAT": "json",
            "SPECREJ_ORCHESTRATOR_MAX_RUNNING": str(MAX_RUNNING),
            "SPECREJ_ORCHESTRATOR_MAX_QUEUED": str(MAX_QUEUED),
            **{f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": collector.endpoint for name in SERVICES},
            **(_TOYS if on_toys else {}),
            **(environment or {}),
        }
        async with (
            Stack(environment=told) as stack,
            open_channel(stack.orchestrator_address, retries=False) as channel,
        ):
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            yield Observed(stack, collector, stub)


_TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=10",
    "SPECREJ_GENERATOR_LEASE_S": "2",
    "SPECREJ_REWARD_REWARDS": json.dumps(_REWARDS),
}


def request(prompt: str = "Why?", **options: Any) -> orchestrator_pb2.GenerateRequest:
    """A small request, past the cache if it says nothing else."""
    usual = Options(n=4, max_tokens=16, seed=1, ignore_eos=True, cache=CacheControl.BYPASS)
    return build_request(prompt, **{**usual, **options})


async def streamed(
    stub: Any, message: orchestrator_pb2.GenerateRequest, *, leave_after: int = 0, **call: Any
) -> Outcome:
    """A stream to its end, or cancelled after so many events."""
    whole = orchestrator_pb2.GenerateStreamRequest(request=message)
    rpc, outcome = stub.GenerateStream(whole, **call), Outcome()
    try:
        async for event in rpc:
            outcome.events.append(wire.event_from_wire(event))
            if len(outcome.events) == leave_after:
                rpc.cancel()
    except asyncio.CancelledError:
        outcome.code = "CANCELLED"
    except grpc.aio.AioRpcError as failure:
        outcome.code = failure.code().name
    return outcome


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Returns once the condition holds; TimeoutError after 20 s."""
    async with asyncio.timeout(BOUND_S):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.02)


def calls_by_code(values: Values, method: str) -> Counter[str]:
    """Calls of a method that ended."""
    counts: Counter[str] = Counter()
    for (name, labels), value in values.samples.items():
        having = dict(labels)
        if name == "rpc_server_call_duration_seconds_count" and having["rpc_method"] == method:
            counts[having["rpc_response_status_code"]] += int(value)
    return +counts


def prometheus_name(metric: Metric) -> str:
    """Of its family, without `_total`."""
    unit = {"s": "_seconds"}.get(metric.unit, "")
    return metric.name.replace(".", "_") + unit


@contextmanager
def client_spans(collector: Collector, service: str = "client") -> Iterator[None]:
    """This process's own spans go to the collector too, as an application's would."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from specrej.telemetry import traces

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
    # As set_tracer_provider would, but it works only once per process.
    before, traces._tracer = traces._tracer, provider.get_tracer("application")
    try:
        yield
    finally:
        traces._tracer = before


async def num_series(port: int) -> int:
    """How many there are at a Prometheus endpoint of this machine."""
    return len((await asyncio.to_thread(_scrape, f"http://127.0.0.1:{port}/metrics")).samples)


def _scrape(url: str) -> Values:
    with urlopen(url, timeout=BOUND_S) as answer:
        text = answer.read().decode()
    return Values(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
