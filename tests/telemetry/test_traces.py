"""Traces of real requests through real processes, as a collector gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from specrej import Client
from specrej.contracts import Schedule
from specrej.telemetry import names, traces
from tests.collector import CLIENT, SERVER, Collector, Seen
from tests.faults.world import SERVICES, Call
from tests.serving import until
from tests.telemetry import observed

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "An unmistakable prompt"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service() -> AsyncIterator[observed.Observed]:
    async with observed.observed() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trace(service: observed.Observed) -> list[Seen]:
    """The trace of one request through the client, whose answer is generated and stored."""
    with client_spans(service.collector):
        async with Client(service.stack.orchestrator_address) as client:
            await client.describe()  # connects: the root's time is that of the request alone
            answer = await client.generate(
                PROMPT,
                n=8,
                max_tokens=192,
                seed=0,
                ignore_eos=True,
                schedule=Schedule("tokens", tokens=(16, 64)),
            )
        assert not answer.cached
        return await whole_trace(service, observed.GENERATE, answer.request_id)


async def whole_trace(service: observed.Observed, method: str, request_id: str) -> list[Seen]:
    """All spans of the request's trace, once the root and those of all services have arrived."""
    collector = service.collector
    spans: list[Seen] = []

    def is_whole() -> bool:
        servers = collector.named(method, kind=SERVER)
        ids = {s.span.trace_id for s in servers if s.attributes.get(names.REQUEST_ID) == request_id}
        spans[:] = [seen for trace_id in ids for seen in collector.trace(trace_id)]
        services = {seen.service for seen in spans if seen.span.kind == SERVER}
        has_root = any(not seen.span.parent_span_id for seen in spans)
        return services >= set(SERVICES) and has_root

    await until(is_whole)
    return spans


def below(trace: Iterable[Seen], parent: Seen) -> list[Seen]:
    """The children of a span, in the order of their starts."""
    children = [seen for seen in trace if seen.span.parent_span_id == parent.span.span_id]
    return sorted(children, key=lambda seen: seen.span.start_time_unix_nano)


@contextmanager
def client_spans(collector: Collector) -> Iterator[None]:
    """Send this process's spans to the collector too, as an application's are."""
    provider = TracerProvider(resource=Resource.create({"service.name": "client"}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=50))
    # As set_tracer_provider would, but it works only once per process.
    before, traces._tracer = traces._tracer, provider.get_tracer("application")
    try:
        yield
    finally:
        traces._tracer = before


async def coded(service: observed.Observed, method: str, code: str) -> Seen:
    """A server span that ended with a code."""
    spans: list[Seen] = []

    def is_here() -> bool:
        having = service.collector.named(method, kind=SERVER)
        spans[:] = [seen for seen in having if seen.attributes.get(names.RPC_CODE) == code]
        return bool(spans)

    await until(is_here)
    return spans[-1]


def server_of(trace: list[Seen], method: str) -> Seen:
    (server,) = (seen for seen in trace if seen.name == method and seen.span.kind == SERVER)
    return server


async def test_a_request_is_one_trace_through_everything(trace: list[Seen]) -> None:
    """Guards against a hop that drops the context: client, three services, and Redis."""
    (root,) = (seen for seen in trace if not seen.span.parent_span_id)
    ids = {seen.span.span_id for seen in trace}
    orphans = [s.name for s in trace if s is not root and s.span.parent_span_id not in ids]
    assert not orphans, f"the parents of {orphans} are missing"
    assert (root.service, root.name, root.span.kind) == ("client", observed.GENERATE, CLIENT)
    assert {seen.service for seen in trace} == {"client", *SERVICES}
    on_redis = [seen for seen in trace if seen.attributes.get(names.DB_SYSTEM) == "redis"]
    assert {seen.name for seen in on_redis} >= {names.cache_span(p) for p in ("read", "write")}
    assert all(seen.span.kind == CLIENT for seen in on_redis)


async def test_steps_are_those_of_the_algorithm(trace: list[Seen]) -> None:
    """Guards against a waterfall that lacks a step, or has it elsewhere."""
    server = server_of(trace, observed.GENERATE)
    steps = [seen for seen in below(trace, server) if seen.span.kind != CLIENT]
    assert [seen.name for seen in steps] == [
        names.SPAN_PLAN,
        names.SPAN_FLIGHT,
        names.SPAN_LOOKUP,
        names.SPAN_SHARED_FLIGHT,
        names.SPAN_QUEUE,
        names.SPAN_OPEN,
        *3 * [names.SPAN_ROUND],
        names.SPAN_CLOSE,
        names.SPAN_STORE,
    ]
    rounds = [seen for seen in steps if seen.name == names.SPAN_ROUND]
    phases = [names.SPAN_EXTEND, names.SPAN_SCORE, names.SPAN_PRUNE]
    assert all([seen.name for seen in below(trace, span)] == phases for span in rounds)
    assert [span.attributes[names.DECISION_TOKEN] for span in rounds] == [16, 64, 192]
    assert [span.attributes[names.NUM_LIVE] for span in rounds] == [4, 2, 0]
    assert rounds[0].attributes[names.ROUND_TOKENS] == 8 * 16
    assert rounds[0].attributes[names.FREED_SLOTS] == 4 * 16
    best = rounds[0].attributes[names.SCORES]
    assert best == sorted(best, reverse=True) and len(best) == 8


async def test_backends_show_their_commands(trace: list[Seen]) -> None:
    """Guards against a long stream as one opaque span; it is the request's child, not open's."""
    server = server_of(trace, observed.GENERATE)
    calls = (seen for seen in below(trace, server) if names.RPC_METHOD in seen.attributes)
    streams = {s.name: s for s in calls if s.span.kind == CLIENT}
    assert set(streams) == {observed.SESSION, observed.SCORE_SESSION}
    first = ["extend", "extend", "prune"]  # the prompt is read in a stride of its own
    for method, commands in (
        (observed.SESSION, ["open", *first, "extend", "prune", "extend", "close"]),
        (observed.SCORE_SESSION, ["open", *3 * ["score"]]),
    ):
        stream = server_of(trace, method)
        assert stream.span.parent_span_id == streams[method].span.span_id
        assert [seen.name for seen in below(trace, stream)] == commands


async def test_attributes_follow_the_conventions(trace: list[Seen]) -> None:
    """Guards against names that are not OpenTelemetry's, and against a prompt in a span."""
    attributes = server_of(trace, observed.GENERATE).attributes
    assert attributes[names.OPERATION] == "chat" and attributes[names.REQUEST_MODEL] == "toy"
    assert attributes[names.CHOICES] == 8 and attributes[names.MAX_TOKENS] == 192
    assert attributes[names.OUTPUT_TOKENS] == 8 * 16 + 4 * 48 + 2 * 128
    assert attributes[names.FINISH_REASONS] == ["length"] and attributes[names.RPC_CODE] == "OK"
    assert not any("unmistakable" in str(seen.span) for seen in trace)


async def test_cancelled_calls_end_their_spans_with_the_code(service: observed.Observed) -> None:
    """Guards against OK, or no span, for a call cancelled during a round."""
    options: dict[str, Any] = {"n": 8, "max_tokens": 400, "schedule": Schedule()}
    call = Call(service.stack.orchestrator_address, stream=True, **options)
    await until(lambda: len(call.events) == 2)
    call.cancel()
    assert (await call.outcome()).code == "CANCELLED"
    cancelled = await coded(service, observed.GENERATE_STREAM, "CANCELLED")

    def session_codes() -> list[str]:
        trace = service.collector.trace(cancelled.span.trace_id)
        sessions = (s for s in trace if s.name in (observed.SESSION, observed.SCORE_SESSION))
        return [s.attributes[names.RPC_CODE] for s in sessions if s.span.kind == SERVER]

    await until(lambda: len(session_codes()) == 2)
    assert set(session_codes()) == {"CANCELLED"}


async def test_a_deadline_ends_the_span_with_its_code(service: observed.Observed) -> None:
    """Guards against a late call that counts as cancelled, because grpc cancels it."""
    address = service.stack.orchestrator_address
    call = Call(address, stream=True, timeout_s=1.0, n=8, max_tokens=400)
    assert (await call.outcome()).code == "DEADLINE_EXCEEDED"
    await coded(service, observed.GENERATE_STREAM, "DEADLINE_EXCEEDED")


async def test_logs_of_a_request_are_in_its_trace(
    service: observed.Observed, trace: list[Seen]
) -> None:
    """Guards against a line that leads to no trace, and a request without its line."""
    server = server_of(trace, observed.GENERATE)
    lines = service.log_of("orchestrator")
    (line,) = (
        fields for fields in lines if fields.get("id") == server.attributes[names.REQUEST_ID]
    )
    assert line["trace_id"] == server.span.trace_id.hex()
    assert line["span_id"] == server.span.span_id.hex()
    assert (line["code"], line["rounds"], line["level"]) == ("OK", 3, "INFO")
    assert not any("unmistakable" in str(fields) for fields in lines)
