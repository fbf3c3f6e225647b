"""The cost of services: fair turns of both sides."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import services
from benchmarks.harness import SETTLE_S


async def test_both_sides_come_first_in_turn_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first side against the idle threads of the second one, and the other way round."""
    order: list[str] = []
    pauses: list[float] = []

    def generation(side: str) -> Any:
        order.append(side)
        time.sleep(0.002)
        timings = SimpleNamespace(score_ms=1.0, total_ms=4.0)
        return SimpleNamespace(usage=SimpleNamespace(generated_tokens=7), timings=timings, n=1)

    async def by_services(*_: Any, **__: Any) -> Any:
        return generation("services")

    async def in_process(*_: Any) -> Any:
        return generation("in process")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[Any]:
        yield None, SimpleNamespace(generate=by_services)

    monkeypatch.setattr(services, "running", running)
    monkeypatch.setattr(services, "in_process", running)
    monkeypatch.setattr(services, "_in_process", in_process)
    monkeypatch.setattr("benchmarks.harness.asyncio.sleep", sleep)
    result = await services._measure(argparse.Namespace(n=1, new=1, rounds=2))
    sides = ["in process", "services"]
    assert order == [*sides, *reversed(sides), *sides, "services"]  # the last has many candidates
    assert pauses == [SETTLE_S] * 6
    assert [*map(len, result["seconds"].values())] == [2, 2]
    assert result["scoring_share"] == [0.25, 0.25]


def test_idle_threads_of_this_process_sleep_as_those_of_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the services against the spinning threads of the other side."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    async def measure(_: argparse.Namespace) -> None:
        raise InterruptedError(os.environ.get("GOMP_SPINCOUNT"))

    monkeypatch.setattr(services, "_measure", measure)
    monkeypatch.setattr("sys.argv", ["bench"])
    with pytest.raises(InterruptedError, match=r"^1000$"):
        services.main()
    # OpenMP reads the variable once, when torch is imported.
    code = "import sys, benchmarks.services; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
