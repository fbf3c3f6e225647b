"""Behaviour beyond capacity, open loop: `make bench-overload`.

Requests arrive as a Poisson process at 0.5 to 4 times the capacity, then from tenants: five with a
tenth of the capacity each, alone and beside a sixth with four times the capacity. All processes are
real; the generator is a toy with steps of a fixed time, so that the capacity is that of the
orchestrator's permits and not of the machine's processor. Times count from the moment a request was
due. Clients do not retry.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from benchmarks.harness import TOYS, parse_arguments, report
from deploy.local.stack import Stack
from loadtest.arrivals import LATE_S, poisson, send_open_loop
from loadtest.thresholds import percentile
from specrej import Client, Retries, Schedule
from specrej.client.channel import open_channel
from specrej.client.client import build_request
from specrej.contracts import CacheControl
from specrej.security import TENANT_METADATA
from specrej.v1 import orchestrator_pb2_grpc

_RUNNING, _QUEUED = 4, 8
_STEP_MS, _TOKENS = 10, 20
_PROBE_EVERY_S, _PROBE_TIMEOUT_S = 0.25, 10.0
_LIGHT = {f"light-{number}": 0.1 for number in range(5)}  # loads by tenant
_HEAVY = {"heavy": 4.0}
_ENVIRONMENT = {
    **TOYS,
    "SPECREJ_GENERATOR_MODEL": f"toy:step_ms={_STEP_MS}",
    "SPECREJ_ORCHESTRATOR_MAX_RUNNING": str(_RUNNING),
    "SPECREJ_ORCHESTRATOR_MAX_QUEUED": str(_QUEUED),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """How one request ended; seconds since it was due, and its delay before it was sent."""

    code: str
    seconds: float
    late_s: float
    has_retry_info: bool


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        loads=([0.5, 0.8, 1.0, 1.5, 2.0, 4.0], "offered loads as multiples of the capacity"),
        seconds=(15.0, "duration of each load"),
        deadline=(2.0, "deadline of a request in seconds"),
        spare=(4, "spare permits, of tenants that run nothing: they add to the peak of one tenant"),
    )
    capacity, points, mixes = asyncio.run(_measure(arguments))
    peak = max(point["goodput"] for point in points)
    if not peak:
        sys.exit("bench-overload: no request was answered within its deadline")
    for point in points:
        point["of_peak"] = round(point["goodput"] / peak, 3)
    alone, beside = (mix["light_p95_ms"] for mix in mixes)
    headings = (
        *("load", "offered/s", "goodput/s", "of peak", "answer p50, p99 ms"),
        *("refused", "with RetryInfo", "refusal p50, p99 ms", "missed", "health max ms"),
    )
    report(
        f"capacity {capacity:.1f} answers per second",
        headings,
        map(_row, points),
        {
            "capacity_per_s": round(capacity, 2),
            "running": _RUNNING,
            "queued": _QUEUED,
            "spare": arguments.spare,
            "service_ms": _STEP_MS * _TOKENS,
            "deadline_s": arguments.deadline,
            "points": points,
            "mixes": mixes,
            "mix_of_peak": round(mixes[1]["goodput"] / peak, 3),
            "light_p95_ratio": round(beside / alone, 2) if alone and beside else None,
        },
    )


async def _measure(
    arguments: argparse.Namespace,
) -> tuple[float, list[dict[str, Any]], list[dict[str, Any]]]:
    environment = {**_ENVIRONMENT, "SPECREJ_ORCHESTRATOR_SPARE_RUNNING": str(arguments.spare)}
    async with (
        Stack(environment=environment) as stack,
        open_channel(stack.orchestrator_address, retries=False) as channel,
        Client(stack.orchestrator_address, retries=Retries(attempts=1)) as client,
    ):
        await _closed_loop(channel, 2.0)  # warms up
        capacity = await _closed_loop(channel, arguments.seconds / 2)
        points = []
        for seed, load in enumerate(arguments.loads):
            times_s = [*_times_s(load * capacity, seed, arguments.seconds)]
            probes = asyncio.create_task(_probe_health(client, arguments.seconds))
            arrivals = await send_open_loop(
                lambda _, due: _send(channel, due, arguments.deadline), times_s
            )
            summary = _summary(arrivals, times_s, await probes, arguments.seconds)
            points.append({"load": load, **summary})
            await _wait_until_idle(client)
        mixes = []
        for loads in (_LIGHT, _LIGHT | _HEAVY):
            mixes.append(await _mixed(channel, capacity, loads, arguments))
            await _wait_until_idle(client)
    return capacity, points, mixes


def _times_s(per_second: float, seed: int | str, seconds: float) -> Iterator[float]:
    return itertools.takewhile(lambda at_s: at_s < seconds, poisson(per_second, seed))


async def _mixed(
    channel: grpc.aio.Channel,
    capacity: float,
    loads: Mapping[str, float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Tenants at the same time, each with a load in multiples of the capacity."""
    seconds = arguments.seconds
    times = sorted(
        (at_s, tenant)
        for tenant, load in loads.items()
        for at_s in _times_s(load * capacity, tenant, seconds)
    )
    arrivals = await send_open_loop(
        lambda index, due: _send(channel, due, arguments.deadline, times[index][1]),
        (at_s for at_s, _ in times),
    )
    light = [a for a, (_, tenant) in zip(arrivals, times, strict=True) if tenant in _LIGHT]
    # Of all requests: a refusal must not improve it.
    took_s = Counter(a.seconds if a.code == "OK" else math.inf for a in light)
    return {
        "loads": dict(loads),
        "goodput": _goodput(arrivals, [at_s for at_s, _ in times], seconds),
        "light_arrivals": len(light),
        "light_codes": dict(sorted(Counter(arrival.code for arrival in light).items())),
        "light_p95_ms": _ms(percentile(took_s, 0.95)),
    }


def _goodput(arrivals: Sequence[Arrival], times_s: Sequence[float], seconds: float) -> float:
    """Answers per second from the first arrival to the last answer, or to the end of the arrivals:
    what is queued at that end is answered after it."""
    answered = [
        at_s + a.seconds for a, at_s in zip(arrivals, times_s, strict=True) if a.code == "OK"
    ]
    return round(len(answered) / max([seconds, *answered]), 2)


async def _closed_loop(channel: grpc.aio.Channel, seconds: float) -> float:
    """Answers per second with one client per permit, each without a pause between requests."""
    started = time.perf_counter()
    answers = 0

    async def client() -> None:
        nonlocal answers
        while time.perf_counter() - started < seconds:
            arrival = await _send(channel, time.perf_counter(), 10.0)
            answers += arrival.code == "OK"

    await asyncio.gather(*(client() for _ in range(_RUNNING)))
    return answers / (time.perf_counter() - started)


async def _send(
    channel: grpc.aio.Channel, due: float, deadline_s: float, tenant: str = ""
) -> Arrival:
    stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    message = build_request(
        "How much is too much?",
        n=4,
        max_tokens=_TOKENS,
        ignore_eos=True,
        schedule=Schedule("tokens", tokens=(_TOKENS // 2,)),
        cache=CacheControl.BYPASS,
    )
    late_s = time.perf_counter() - due
    code, has_retry_info = "OK", False
    try:
        metadata = ((TENANT_METADATA, tenant),) if tenant else ()
        await stub.Generate(message, timeout=max(0.001, deadline_s - late_s), metadata=metadata)
    except grpc.aio.AioRpcError as error:
        call: Any = error
        status = rpc_status.from_call(call)
        details = status.details if status else ()
        code = error.code().name
        has_retry_info = any(d.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for d in details)
    return Arrival(code, time.perf_counter() - due, late_s, has_retry_info)


async def _probe_health(client: Client, seconds: float) -> list[float]:
    """Seconds of each health check; infinite for one that failed or did not reply SERVING."""
    ends = time.perf_counter() + seconds
    took_s = []
    while (started := time.perf_counter()) < ends:
        is_serving = await client.is_serving(timeout_s=_PROBE_TIMEOUT_S)
        took_s.append(time.perf_counter() - started if is_serving else math.inf)
        await asyncio.sleep(_PROBE_EVERY_S)
    return took_s


async def _wait_until_idle(client: Client) -> None:
    async with asyncio.timeout(30):
        # Another process's state has no event.
        while (service := await client.describe()).running or service.queued:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _summary(
    arrivals: Sequence[Arrival],
    times_s: Sequence[float],
    health_s: Sequence[float],
    seconds: float,
) -> dict[str, Any]:
    answered = [arrival.seconds for arrival in arrivals if arrival.code == "OK"]
    refused = [arrival for arrival in arrivals if arrival.code == "RESOURCE_EXHAUSTED"]
    num_late = sum(arrival.late_s > LATE_S for arrival in arrivals)
    return {
        "arrivals": len(arrivals),
        "offered": round(len(arrivals) / seconds, 2),
        "goodput": _goodput(arrivals, times_s, seconds),
        "codes": dict(sorted(Counter(arrival.code for arrival in arrivals).items())),
        "missed": round(num_late / max(1, len(arrivals)), 4),
        "answer_ms": _percentiles_ms(answered),
        "refusal_ms": _percentiles_ms([arrival.seconds for arrival in refused]),
        "refusals_with_retry_info": sum(arrival.has_retry_info for arrival in refused),
        "health_ms": _percentiles_ms(health_s),
        "health_failed": health_s.count(math.inf),
    }


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None] | None:
    """None without a measurement."""
    shares, counts = {"p50": 0.5, "p99": 0.99, "max": 1.0}, Counter(seconds)
    return {name: _ms(percentile(counts, of)) for name, of in shares.items()} if counts else None


def _ms(seconds: float) -> float | None:
    """None for what is not finite, which JSON has no number for."""
    return round(seconds * 1e3, 1) if math.isfinite(seconds) else None


def _row(point: dict[str, Any]) -> Sequence[object]:
    def both(name: str) -> str:
        values = point[name]
        return f"{values['p50']:.0f}, {values['p99']:.0f}" if values else ""

    return (
        f"{point['load']:g}x",
        f"{point['offered']:.1f}",
        f"{point['goodput']:.1f}",
        f"{point['of_peak']:.0%}",
        both("answer_ms"),
        point["codes"].get("RESOURCE_EXHAUSTED", 0),
        point["refusals_with_retry_info"],
        both("refusal_ms"),
        f"{point['missed']:.1%}",
        _health(point),
    )


def _health(point: dict[str, Any]) -> str:
    if failed := point["health_failed"]:
        return f"{failed} failed"
    return f"{point['health_ms']['max']:.0f}" if point["health_ms"] else ""


if __name__ == "__main__":
    main()
