"""What happens beyond capacity, open loop: `python -m benchmarks.overload docs/overload.svg`.

Requests arrive as they please (Poisson), at 0.5 to 4 times what the service can answer, and nobody
waits for an answer before asking again. All processes are real; the generator is the toy, whose
steps take a fixed time, so that capacity is the orchestrator's permits and not this machine's
processor. Every time is measured from the moment a request should have been sent. Clients never
retry. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import matplotlib as mpl
import numpy as np
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from specrej import Client
from specrej.channel import open_channel
from specrej.client import build_request
from specrej.contracts import CacheControl, Schedule
from specrej.stack import Stack
from specrej.v1 import orchestrator_pb2_grpc

_RUNNING, _QUEUED = 4, 8
_STEP_MS, _TOKENS = 10, 20
_LATE_S = 0.05  # an arrival sent later than that counts as missed
_PROBE_EVERY_S = 0.25
_DETAILS = "grpc-status-details-bin"
_ENVIRONMENT = {
    "SPECREJ_GENERATOR_MODEL": f"toy:step_ms={_STEP_MS}",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
    "SPECREJ_ORCHESTRATOR_MAX_RUNNING": str(_RUNNING),
    "SPECREJ_ORCHESTRATOR_MAX_QUEUED": str(_QUEUED),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: how it ended, how long after it should have been sent, and how late it was."""

    code: str
    seconds: float
    late_s: float
    has_retry_info: bool


def main() -> None:
    """Sweep, draw, print a table and a JSON object."""
    arguments = _arguments()
    capacity, points = asyncio.run(_sweep(arguments))
    peak = max(point["goodput"] for point in points)
    for point in points:
        point["of_peak"] = round(point["goodput"] / peak, 3)
    _print_table(capacity, points)
    if arguments.picture:
        _draw(arguments.picture, capacity, points)
    result = {
        "capacity_per_s": round(capacity, 2),
        "running": _RUNNING,
        "queued": _QUEUED,
        "service_ms": _STEP_MS * _TOKENS,
        "deadline_s": arguments.deadline,
        "points": points,
        **describe_machine(),
    }
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, nargs="?", help="SVG file to write")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1, 1.5, 2, 4])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds; later is no answer")
    return parser.parse_args()


async def _sweep(arguments: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    async with (
        Stack(environment=_ENVIRONMENT) as stack,
        open_channel(stack.orchestrator_address, retries=False) as channel,
    ):
        await _closed_loop(channel, 2.0)  # warms up
        capacity = await _closed_loop(channel, arguments.seconds / 2)
        points = []
        for number, load in enumerate(arguments.loads):
            arrivals, health_s = await _offer(
                channel, load * capacity, arguments.seconds, arguments.deadline, number
            )
            points.append({"load": load, **_summary(arrivals, health_s, arguments.seconds)})
            await _drained(stack)
    return capacity, points


async def _closed_loop(channel: grpc.aio.Channel, seconds: float) -> float:
    """Answers per second to as many clients as there are permits, each asking again at once."""
    began = time.monotonic()
    answers = 0

    async def client() -> None:
        nonlocal answers
        while time.monotonic() - began < seconds:
            arrival = await _ask(channel, time.monotonic(), 10.0)
            answers += arrival.code == "OK"

    await asyncio.gather(*(client() for _ in range(_RUNNING)))
    return answers / (time.monotonic() - began)


async def _offer(
    channel: grpc.aio.Channel, per_second: float, seconds: float, deadline_s: float, seed: int
) -> tuple[list[Arrival], list[float]]:
    """All arrivals of a while, and how long health checks took meanwhile."""
    drawn, at, tasks = random.Random(seed), time.monotonic(), []
    probing = asyncio.create_task(_probe_health(channel, at + seconds))
    ends = at + seconds
    while (at := at + drawn.expovariate(per_second)) < ends:
        # The clock that counts is the schedule's, however late this loop wakes up.
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        tasks.append(asyncio.create_task(_ask(channel, at, deadline_s)))
    return list(await asyncio.gather(*tasks)), await probing


async def _ask(channel: grpc.aio.Channel, due: float, deadline_s: float) -> Arrival:
    stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    message = build_request(
        "How much is too much?",
        n=4,
        max_tokens=_TOKENS,
        ignore_eos=True,
        schedule=Schedule("tokens", (_TOKENS // 2,)),
        cache=CacheControl.BYPASS,
    )
    late_s = time.monotonic() - due
    code, has_retry_info = "OK", False
    try:
        await stub.Generate(message, timeout=max(0.001, deadline_s - late_s))
    except grpc.aio.AioRpcError as error:
        code, has_retry_info = error.code().name, _has_retry_info(error)
    return Arrival(code, time.monotonic() - due, late_s, has_retry_info)


def _has_retry_info(error: grpc.aio.AioRpcError) -> bool:
    details = dict(error.trailing_metadata() or ()).get(_DETAILS)
    if not isinstance(details, bytes):
        return False
    info = error_details_pb2.RetryInfo()
    return any(detail.Unpack(info) for detail in status_pb2.Status.FromString(details).details)


async def _probe_health(channel: grpc.aio.Channel, ends: float) -> list[float]:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    took_s = []
    while (began := time.monotonic()) < ends:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        took_s.append(time.monotonic() - began)
        await asyncio.sleep(_PROBE_EVERY_S)
    return took_s


async def _drained(stack: Stack) -> None:
    async with Client(stack.orchestrator_address) as client, asyncio.timeout(30):
        # Another process's state has no event.
        while (service := await client.describe()).running or service.queued:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _summary(
    arrivals: Sequence[Arrival], health_s: Sequence[float], seconds: float
) -> dict[str, Any]:
    answered = [a.seconds for a in arrivals if a.code == "OK"]
    refused = [a for a in arrivals if a.code == "RESOURCE_EXHAUSTED"]
    codes = {code: sum(a.code == code for a in arrivals) for code in {a.code for a in arrivals}}
    return {
        "arrivals": len(arrivals),
        "offered": round(len(arrivals) / seconds, 2),
        "goodput": round(len(answered) / seconds, 2),
        "codes": dict(sorted(codes.items())),
        "missed": round(sum(a.late_s > _LATE_S for a in arrivals) / max(1, len(arrivals)), 4),
        "answer_ms": _percentiles(answered),
        "refusal_ms": _percentiles([a.seconds for a in refused]),
        "refusals_with_retry_info": sum(a.has_retry_info for a in refused),
        "health_ms": _percentiles(health_s),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds; None where nothing was measured."""
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds) * 1e3, [50, 99, 100])
    return dict(zip(("p50", "p99", "max"), (round(float(v), 1) for v in values), strict=True))


def _print_table(capacity: float, points: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"capacity {capacity:.1f} answers per second")
    headings = (
        *("load", "offered/s", "goodput/s", "of peak", "answer p50, p99 ms"),
        *("refused", "with RetryInfo", "refusal p50, p99 ms", "missed", "health max ms"),
    )
    for heading in headings:
        table.add_column(heading)
    for point in points:
        refused = point["codes"].get("RESOURCE_EXHAUSTED", 0)
        table.add_row(
            f"{point['load']:g}x",
            f"{point['offered']:.1f}",
            f"{point['goodput']:.1f}",
            f"{point['of_peak']:.0%}",
            _two(point["answer_ms"]),
            str(refused),
            str(point["refusals_with_retry_info"]),
            _two(point["refusal_ms"]),
            f"{point['missed']:.1%}",
            f"{point['health_ms']['max']:.0f}" if point["health_ms"] else "",
        )
    Console(width=150).print(table)


def _two(percentiles: dict[str, float] | None) -> str:
    return f"{percentiles['p50']:.0f}, {percentiles['p99']:.0f}" if percentiles else ""


def _draw(picture: Path, capacity: float, points: Sequence[dict[str, Any]]) -> None:
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"})
    figure = Figure(figsize=(8, 5), layout="constrained")
    goodput, refusals = figure.subplots(2, 1, sharex=True)
    loads = [point["load"] for point in points]
    goodput.plot(loads, [p["offered"] for p in points], color="lightgray", label="offered")
    goodput.plot(loads, [p["goodput"] for p in points], marker="o", label="answered in time")
    goodput.axhline(capacity, color="tab:red", linestyle="--", linewidth=1, label="capacity")
    goodput.set(ylabel="requests per second", ylim=(0, 2 * capacity))
    goodput.legend(loc="upper left")
    told = [point for point in points if point["refusal_ms"]]
    for name in ("p50", "p99"):
        values = [point["refusal_ms"][name] for point in told]
        refusals.plot([point["load"] for point in told], values, marker="o", label=name)
    refusals.axhline(50, color="tab:red", linestyle="--", linewidth=1, label="promised at p99")
    refusals.set(ylabel="refusal, ms", xlabel="offered load / capacity", ylim=(0, None))
    refusals.legend(loc="upper left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
