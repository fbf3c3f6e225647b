"""Start and end of telemetry: off it loads nothing, and a collector delays no exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deploy.local.processes import Processes
from deploy.local.stack import Stack
from specrej import telemetry
from specrej.backend.v1.reward_pb2 import ScoreRequest
from specrej.backend.v1.reward_pb2_grpc import RewardServiceStub
from specrej.client.channel import open_channel
from specrej.settings import ServiceSettings
from specrej.telemetry import names, setup
from specrej.telemetry.setup import FLUSH_S
from specrej.v1.common_pb2 import Prompt
from tests.endpoints import scrape
from tests.programs import run

_OFF = """
import sys
from specrej import telemetry
from specrej.settings import ServiceSettings
with telemetry.configured("test", ServiceSettings()):
    caller = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")
    with telemetry.served("service/Method", [caller]), telemetry.span("inner") as span:
        telemetry.metrics.add(telemetry.names.ROUNDS, ended_by="slots_full")
        span.set_attributes({"of the inner span": 1})
        sent = telemetry.ClientSpan("service/Other").metadata
        assert not span.is_recording() and telemetry.span("next") is telemetry.span("last")
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "prometheus"))])
print(sent == (caller,))
"""


async def test_off_it_loads_nothing() -> None:
    """Guards against exporters that no setting enables, work for spans that nothing records, and a
    caller's trace that ends at a service without a collector."""
    assert (await run(sys.executable, "-c", _OFF)).split() == ["[]", "True"]


@pytest.mark.parametrize("is_hanging", [True, False])
async def test_a_dead_collector_does_not_delay_the_end(is_hanging: bool, tmp_path: Path) -> None:
    """Guards against a drain that waits for telemetry, which is under way here, and against a
    metrics endpoint without the service's name or on another address."""
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if is_hanging:
            collector.listen()  # accepts connections and never answers; else refuses them
        toy = {"SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]'}
        address = f"http://127.0.0.1:{collector.getsockname()[1]}"
        stack = Stack(environment={**toy, "SPECREJ_REWARD_OTLP_ENDPOINT": address})
        url, rewards = stack.metrics_urls[2], [stack._replica(stack._rewards[0])]
        async with Processes(rewards, tmp_path, start_timeout_s=30) as running:
            async with open_channel(stack.reward_address) as channel:
                stub: Any = RewardServiceStub(channel)
                await stub.Score(ScoreRequest(prompt=Prompt(text="Why?"), responses=["So."]))
            values = (await scrape([url])).values
            began = time.monotonic()
            os.kill(running.processes["reward"], signal.SIGTERM)
            code = await asyncio.wait_for(running._running["reward"].wait(), 20)
            seconds = time.monotonic() - began
    assert code == 0
    assert seconds < FLUSH_S + 10, f"ended after {seconds:.1f} s"
    (process,) = values["target_info"]
    assert ("service_name", "reward") in process.labels and "specrej_reward_batch_bucket" in values
    with pytest.raises(OSError, match="refused"):
        await scrape([url])


def test_a_call_is_in_flight_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[float] = []

    def add(metric: names.Metric, count: float = 1, **_: Any) -> None:
        counts.extend([count] if metric is names.RPC_IN_FLIGHT else [])

    monkeypatch.setattr(telemetry.metrics, "add", add)
    with telemetry.served("service/Method", ()):
        assert sum(counts) == 1
    assert sum(counts) == 0


def test_a_taken_metrics_port_raises() -> None:
    """Guards against a service without the endpoint of its settings."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = ServiceSettings(metrics_port=taken.getsockname()[1])
        with (
            pytest.raises(OSError, match=r"cannot listen on .* \(metrics_port\)"),
            telemetry.configured("test", settings),
        ):
            pytest.fail("entered")


@contextmanager
def metrics_port() -> Iterator[tuple[str, int]]:
    server = setup.serve_metrics(0, "127.0.0.1", CollectorRegistry())
    try:
        yield "127.0.0.1", server.server_port
    finally:
        server.shutdown()
        server.server_close()


def test_connections_to_the_metrics_port_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread for every connection, and a scrape that 300 silent ones prevent."""
    most = threading.active_count() + 302
    monkeypatch.setattr(setup, "_MOST_THREADS", most)
    monkeypatch.setattr(setup, "SILENT_S", 60)
    with metrics_port() as address, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        with socket.create_connection(address, timeout=10) as scrape:
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert scrape.recv(12) == b"HTTP/1.0 200"
        silent += [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
        silent[-1].settimeout(20)
        with suppress(ConnectionResetError):
            assert silent[-1].recv(1) == b""
        assert threading.active_count() <= most


def test_the_metrics_port_of_this_machine_refuses_other_names() -> None:
    """Guards against a web page that reads metrics by a name of its own (DNS rebinding)."""
    codes = {"localhost:9": b"200", "127.0.0.1": b"200", "evil.example": b"403"}
    with metrics_port() as address:
        for name, code in codes.items():
            with socket.create_connection(address, timeout=10) as scrape:
                scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: %b\r\n\r\n" % name.encode())
                assert scrape.recv(12)[9:] == code


def test_a_silent_connection_to_the_metrics_port_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against threads that are held by connections which never send a request."""
    monkeypatch.setattr(setup, "SILENT_S", 0.1)
    with metrics_port() as address, socket.create_connection(address, timeout=10) as silent:
        assert silent.recv(1) == b""
