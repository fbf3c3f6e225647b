"""What telemetry costs: `python -m benchmarks.telemetry`.

Two whole services of real processes on the embedded models: one tells nothing, the other sends
traces and metrics to a collector, a process of its own that throws them away, and is asked for its
metrics between blocks. The same requests, same seeds, go to one and the other in turns, in blocks
of some at once; which is first changes from pair to pair. The last line on stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import grpc.aio
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.rejection import PROMPTS
from specrej import Client
from specrej.client import Options
from specrej.contracts import CacheControl
from specrej.stack import Stack

_HOST = "127.0.0.1"
_SERVICES = ("orchestrator", "generator", "reward")
_TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}
_SIGNALS = ("trace.v1.TraceService", "metrics.v1.MetricsService")


@dataclass(slots=True)
class Side:
    """A service, and what was measured of its blocks."""

    stack: Stack
    client: Client
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms_per_token: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Of all its processes so far."""
        times = (psutil.Process(pid).cpu_times() for pid in self.stack.processes.values())
        return float(sum(each.user + each.system for each in times))


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    if arguments.collect:
        asyncio.run(_collect())
        return
    result = asyncio.run(_measure(arguments))
    table = Table("telemetry", "tokens/s (median)", "CPU ms per token (median)")
    for name in ("off", "on"):
        measured = result[name]
        table.add_row(
            name,
            f"{statistics.median(measured['tokens_per_s']):.1f}",
            f"{statistics.median(measured['cpu_ms_per_token']):.3f}",
        )
    Console(width=100).print(table)
    low, high = result["ratio_interval"]
    print(f"throughput on / off {result['ratio']:.4f} (95 % interval {low:.4f} .. {high:.4f})")
    print(f"the collector was sent {result['collected']}")
    print(json.dumps({**result, **vars(arguments), **describe_machine()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=16, help="candidates")
    parser.add_argument("--new", type=int, default=64, help="new tokens per candidate")
    parser.add_argument("--at-once", type=int, default=4, help="requests of a block")
    parser.add_argument("--pairs", type=int, default=20, help="blocks of each side")
    parser.add_argument("--toys", action="store_true", help="no models: to try this file")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as undo:
        endpoint, collector = await undo.enter_async_context(_collector())
        told = {f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": endpoint for name in _SERVICES}
        silent = {f"SPECREJ_{name.upper()}_METRICS_PORT": "0" for name in _SERVICES}
        sides = {
            "off": await undo.enter_async_context(_side(arguments, silent)),
            # Metrics are sent every five seconds, where the usual is a minute.
            "on": await undo.enter_async_context(
                _side(arguments, {**told, "OTEL_METRIC_EXPORT_INTERVAL": "5000"})
            ),
        }
        for number in range(arguments.pairs + 1):
            order = ["off", "on"] if number % 2 else ["on", "off"]
            for name in order:
                await _block(arguments, sides[name], number, counts=number > 0)
            await asyncio.to_thread(_scrape, sides["on"].stack)
    said, _ = await collector.communicate()
    measured = {
        name: {
            "tokens_per_s": [round(value, 2) for value in side.tokens_per_s],
            "cpu_ms_per_token": [round(value, 4) for value in side.cpu_ms_per_token],
        }
        for name, side in sides.items()
    }
    return {**measured, **_compared(sides["on"], sides["off"]), "collected": json.loads(said)}


def _compared(on: Side, off: Side) -> dict[str, Any]:
    """Ratios of neighbours; the interval is that of their mean."""
    ratios = _ratios(on.tokens_per_s, off.tokens_per_s)
    mean = statistics.fmean(ratios)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    cpu = statistics.median(_ratios(on.cpu_ms_per_token, off.cpu_ms_per_token))
    return {
        "ratio": round(mean, 4),
        "ratio_interval": [round(mean - 1.96 * error, 4), round(mean + 1.96 * error, 4)],
        "cpu_ratio": round(cpu, 4),
    }


def _ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [this / that for this, that in zip(these, those, strict=True)]


@asynccontextmanager
async def _side(arguments: argparse.Namespace, told: dict[str, str]) -> AsyncIterator[Side]:
    models = _TOYS if arguments.toys else {"SPECREJ_GENERATOR_KV_SLOTS": "40000"}
    async with (
        Stack(environment={**models, **told}) as stack,
        Client(stack.orchestrator_address, timeout_s=600) as client,
    ):
        yield Side(stack, client)


async def _block(arguments: argparse.Namespace, side: Side, number: int, *, counts: bool) -> None:
    """Some requests at once."""
    cpu_s, began = side.cpu_s(), time.perf_counter()
    answers = await asyncio.gather(
        *(
            side.client.generate(
                PROMPTS[index % len(PROMPTS)],
                **Options(
                    n=arguments.n,
                    max_tokens=arguments.new,
                    seed=number * arguments.at_once + index,
                    ignore_eos=True,
                    cache=CacheControl.BYPASS,
                ),
            )
            for index in range(arguments.at_once)
        )
    )
    seconds, cpu_s = time.perf_counter() - began, side.cpu_s() - cpu_s
    tokens = sum(answer.usage.generated_tokens for answer in answers)
    if counts:  # the first one warms up
        side.tokens_per_s.append(tokens / seconds)
        side.cpu_ms_per_token.append(cpu_s * 1e3 / tokens)


def _scrape(stack: Stack) -> None:
    for name in _SERVICES:
        port = getattr(stack.ports, f"metrics_{name}")
        with urlopen(f"http://{_HOST}:{port}/metrics", timeout=10) as answer:
            assert answer.read()


@asynccontextmanager
async def _collector() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its endpoint and its process, which ends, and says what it was sent, with the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.telemetry", "--collect"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdin
    try:
        yield (await process.stdout.readline()).decode().strip(), process
    finally:
        process.stdin.close()


async def _collect() -> None:
    """Take everything, look at nothing, until stdin ends; then say how much it was."""
    taken = dict.fromkeys((*_SIGNALS, "bytes"), 0)
    server = grpc.aio.server()
    for signal in _SIGNALS:

        async def take(request: bytes, context: Any, signal: str = signal) -> bytes:
            taken[signal] += 1
            taken["bytes"] += len(request)
            return b""  # an empty answer of any kind

        handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(take)}
        service = f"opentelemetry.proto.collector.{signal}"
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port(f"{_HOST}:0")
    await server.start()
    print(f"http://{_HOST}:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
