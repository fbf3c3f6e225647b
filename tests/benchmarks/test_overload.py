"""Behaviour beyond capacity: failed health checks, and percentiles."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from benchmarks import overload
from specrej import Client

_STATUS = health_pb2.HealthCheckResponse


async def test_a_failed_health_check_is_an_infinite_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards minutes of measurements against one lost health check."""
    timeout = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata()
    )
    outcomes: list[Any] = [_STATUS.SERVING, timeout, _STATUS.NOT_SERVING]

    async def check(*_: Any, **__: Any) -> Any:
        outcome = outcomes.pop(0) if outcomes else _STATUS.SERVING
        if isinstance(outcome, Exception):
            raise outcome
        return _STATUS(status=outcome)

    stub = SimpleNamespace(HealthStub=lambda _: SimpleNamespace(Check=check))
    monkeypatch.setattr("specrej.client.client.health_pb2_grpc", stub)
    monkeypatch.setattr(overload, "_PROBE_EVERY_S", 0.001)
    async with Client("127.0.0.1:1") as client:
        took_s = await overload._probe_health(client, seconds=0.1)
    assert [math.isinf(seconds) for seconds in took_s[:4]] == [False, True, True, False]
    summary = overload._summary([], [], [0.001, *took_s[1:3]], seconds=1.0)
    assert summary["health_failed"] == 2
    assert summary["health_ms"] == {"p50": None, "p99": None, "max": None}
    json.dumps(summary, allow_nan=False)
    assert overload._row({"load": 1.0, "of_peak": 1.0, **summary})[-1] == "2 failed"


def test_percentiles_are_those_of_the_load_tests() -> None:
    """Nearest ranks, not interpolated ones, as in `loadtest`."""
    assert overload._percentiles_ms([0.001, 0.002]) == {"p50": 1.0, "p99": 2.0, "max": 2.0}
    assert overload._percentiles_ms([]) is None
    summary = overload._summary([], [], [0.001], seconds=1.0)
    assert overload._row({"load": 1.0, "of_peak": 1.0, **summary})[-1] == "1"
