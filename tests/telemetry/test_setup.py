"""Start and end of telemetry: off it loads nothing, and a collector delays no exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from deploy.local.processes import Processes
from deploy.local.stack import Stack
from specrej import telemetry
from specrej.client import RewardClient
from specrej.settings import ServiceSettings
from specrej.telemetry import setup
from specrej.telemetry.setup import FLUSH_S
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
        await _run_a_reward(f"http://127.0.0.1:{collector.getsockname()[1]}", tmp_path)


async def _run_a_reward(collector: str, log_dir: Path) -> None:
    toy = {"SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]'}
    stack = Stack(environment={**toy, "SPECREJ_REWARD_OTLP_ENDPOINT": collector})
    url = stack.metrics_urls[2]
    async with Processes(
        [stack._replica(stack._rewards[0])], log_dir, start_timeout_s=30
    ) as running:
        async with RewardClient(stack.reward_address) as client:
            await client.score("Why?", ["So."])
        values = (await scrape([url])).values
        began = time.monotonic()
        os.kill(running.pids["reward"], signal.SIGTERM)
        code = await asyncio.wait_for(running._running["reward"].wait(), 20)
        seconds = time.monotonic() - began
    assert code == 0
    assert seconds < FLUSH_S + 10, f"ended after {seconds:.1f} s"
    (process,) = values["target_info"]
    assert ("service_name", "reward") in process.labels and "specrej_reward_batch_bucket" in values
    with pytest.raises(OSError, match="refused"):
        await scrape([url])


def test_a_taken_metrics_port_raises() -> None:
    """Guards against a service without the endpoint of its settings."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = ServiceSettings(metrics_port=taken.getsockname()[1])
        with (
            pytest.raises(OSError, match=r"cannot listen on .* \(metrics_port\)"),
            telemetry.configured("test", settings),
        ):
            pytest.fail("entered")


def test_scrapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a thread and a descriptor for each connection that sends nothing."""
    monkeypatch.setattr(setup, "_MAX_SCRAPES", 2)
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    setup._bound(server)
    num_before = threading.active_count()
    with ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            for _ in range(6)
        ]
        for refused in silent[2:]:
            refused.settimeout(10)
            assert refused.recv(1) == b""
        assert threading.active_count() - num_before <= 2 * 2  # each with its timer
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_thread_that_cannot_start_holds_no_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a metrics port that refuses all scrapes after moments without threads."""
    monkeypatch.setattr(setup, "_MAX_SCRAPES", 2)
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    with monkeypatch.context() as without_threads:
        failing = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        without_threads.setattr(server, "process_request", failing)
        without_threads.setattr(server, "handle_error", lambda *_: None)
        setup._bound(server)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.server_port)) as refused:
                refused.settimeout(20)
                assert refused.recv(1) == b""
    assert failing.call_count == 5
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_scrape_has_a_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against connections that send a byte now and then, and keep Prometheus out."""
    monkeypatch.setattr(setup, "_SCRAPE_S", 0.3)
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    setup._bound(server)
    with socket.create_connection(("127.0.0.1", server.server_port)) as slow:
        slow.settimeout(0.05)
        until = time.monotonic() + 20
        with suppress(ConnectionError):
            while time.monotonic() < until:
                slow.sendall(b"G")
                with suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        break
        assert time.monotonic() < until
    server.shutdown()
    thread.join()
    server.server_close()
