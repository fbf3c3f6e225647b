"""How telemetry begins and ends: off it loads nothing, and no collector keeps a process alive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from specrej import telemetry
from specrej.client import RewardClient
from specrej.processes import Processes
from specrej.settings import ServiceSettings
from specrej.stack import Stack
from specrej.telemetry.setup import FLUSH_S

_OFF = """
import sys
from specrej import telemetry
from specrej.settings import ServiceSettings
with telemetry.configured("test", ServiceSettings()):
    with telemetry.served("service/Method", ()), telemetry.span("inner"):
        telemetry.metrics.add(telemetry.names.ROUNDS, ended_by="slots_full")
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "prometheus"))])
"""


async def test_off_it_loads_nothing() -> None:
    """Guards against exporters that are paid for where nobody asked for them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OFF, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0 and said.strip() == b"[]"


@pytest.fixture
def deaf() -> Iterator[str]:
    """A collector that lets everybody connect, and never says a word."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def absent() -> Iterator[str]:
    """A port that refuses connections, and that nobody else can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("collector", ["deaf", "absent"])
async def test_a_dead_collector_keeps_nobody(
    collector: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Guards against a drain that waits for telemetry; spans and metrics are under way here."""
    stack = reward_stack(SPECREJ_REWARD_OTLP_ENDPOINT=request.getfixturevalue(collector))
    async with Processes(
        [stack._replica(stack._rewards[0])], tmp_path, start_timeout_s=30
    ) as running:
        async with RewardClient(stack.reward_address) as client:
            await client.score("Why?", ["So."])
        pid = running.pids["reward"]
        began = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        code = await asyncio.wait_for(running._running["reward"].wait(), 20)
        seconds = time.monotonic() - began
    assert code == 0
    assert seconds < FLUSH_S + 2.5, f"ended after {seconds:.1f} s"


async def test_the_endpoint_serves_text_and_goes_with_the_process(tmp_path: Path) -> None:
    """Guards against an endpoint on another address, and one without a name for who it is."""
    stack = reward_stack()
    url = f"http://127.0.0.1:{stack.ports.metrics_reward}/metrics"
    async with Processes([stack._replica(stack._rewards[0])], tmp_path, start_timeout_s=30):
        text = await asyncio.to_thread(read, url)
    assert 'service_name="reward"' in text and "specrej_reward_batch_bucket" in text
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, url)


def test_a_taken_port_for_metrics_is_told() -> None:
    """Guards against a service without the endpoint that it was told to have."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        settings = ServiceSettings(metrics_port=taken.getsockname()[1])
        with (
            pytest.raises(OSError, match=r"cannot listen on .* \(metrics_port\)"),
            telemetry.configured("test", settings),
        ):
            pytest.fail("entered")


def reward_stack(**environment: str) -> Stack:
    """One whose reward is a toy."""
    toy = {"SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]', **environment}
    return Stack(environment=toy)


def read(url: str) -> str:
    try:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except HTTPError as error:
        return str(error)
