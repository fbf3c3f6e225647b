"""The cost of telemetry: `make bench-telemetry`.

Two stacks of real processes on the embedded models: "off" exports nothing; "on" sends traces and
metrics to a collector in this process, and its metrics are scraped between blocks. The same
requests with the same seeds go to both, in blocks of concurrent requests; the stack that goes first
alternates.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.harness import (
    PROMPTS,
    TOYS,
    full_length,
    medians,
    parse_arguments,
    report,
    rounded,
    running,
)
from deploy.local.stack import Stack
from experiments.studies.statistics import mean
from specrej import Client

_HOST = "127.0.0.1"
_SERVICES = ("orchestrator", "generator", "reward")
_SIGNALS = ("trace.v1.TraceService", "metrics.v1.MetricsService")


@dataclass(slots=True)
class MeasuredStack:
    stack: Stack
    client: Client
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms_per_token: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU seconds of all processes since their start."""
        times = [psutil.Process(pid).cpu_times() for pid in self.stack.processes.values()]
        return float(sum(process.user + process.system for process in times))


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        n=(16, "candidates"),
        new=(64, "new tokens per candidate"),
        at_once=(4, "requests of a block"),
        pairs=(20, "blocks of each stack"),
        toys=(False, "toys instead of models, to try this benchmark"),
    )
    with _collector() as (endpoint, collected):
        sides = asyncio.run(_measure(arguments, endpoint))
    ratios = _ratios(sides["on"], sides["off"])
    columns = {
        name: {
            "tokens_per_s": rounded(side.tokens_per_s, 2),
            "cpu_ms_per_token": rounded(side.cpu_ms_per_token, 4),
        }
        for name, side in sides.items()
    }
    report(
        f"N={arguments.n}, {arguments.new} new tokens, {arguments.at_once} requests at once",
        ("telemetry", "tokens/s (median)", "CPU ms per token (median)"),
        [
            (name, *(f"{median:.3f}" for median in medians(values).values()))
            for name, values in columns.items()
        ],
        {**columns, **ratios, "collected": collected, **vars(arguments)},
        notes=(
            f"throughput on / off {ratios['ratio']} (95 % interval {ratios['ratio_interval']})",
            f"requests and bytes at the collector: {collected}",
        ),
    )


async def _measure(arguments: argparse.Namespace, endpoint: str) -> dict[str, MeasuredStack]:
    environments = {
        "off": {f"SPECREJ_{name.upper()}_METRICS_PORT": "0" for name in _SERVICES},
        "on": {
            **{f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": endpoint for name in _SERVICES},
            "OTEL_METRIC_EXPORT_INTERVAL": "5000",  # milliseconds; the default is a minute
        },
    }
    models = TOYS if arguments.toys else {"SPECREJ_GENERATOR_KV_SLOTS": "40000"}
    async with AsyncExitStack() as stack:
        sides = {
            name: MeasuredStack(*await stack.enter_async_context(running(models | environment)))
            for name, environment in environments.items()
        }
        for number in range(arguments.pairs + 1):  # the first pair warms up
            for name in ("off", "on") if number % 2 else ("on", "off"):
                await _block(arguments, sides[name], number, counts=number > 0)
            await asyncio.to_thread(_scrape, sides["on"].stack)
    return sides


async def _block(
    arguments: argparse.Namespace, side: MeasuredStack, number: int, *, counts: bool
) -> None:
    """Send concurrent requests; add the measurements if the block counts."""
    cpu_s, started = side.cpu_s(), time.perf_counter()
    answers = await asyncio.gather(
        *(
            side.client.generate(
                PROMPTS[index % len(PROMPTS)],
                **full_length(arguments.n, arguments.new, number * arguments.at_once + index),
            )
            for index in range(arguments.at_once)
        )
    )
    seconds, cpu_s = time.perf_counter() - started, side.cpu_s() - cpu_s
    tokens = sum(answer.usage.generated_tokens for answer in answers)
    if counts:
        side.tokens_per_s.append(tokens / seconds)
        side.cpu_ms_per_token.append(cpu_s * 1e3 / tokens)


def _ratios(on: MeasuredStack, off: MeasuredStack) -> dict[str, Any]:
    """Ratios of neighbouring blocks; the interval is of their mean, null for fewer than four."""
    ratios = _quotients(on.tokens_per_s, off.tokens_per_s)
    ratio = mean(np.array(ratios))
    edges = ratio.low, ratio.high
    cpu_ratio = statistics.median(_quotients(on.cpu_ms_per_token, off.cpu_ms_per_token))
    return {
        "ratio": round(ratio.value, 4),
        "ratio_interval": [None if math.isnan(edge) else round(edge, 4) for edge in edges],
        "cpu_ratio": round(cpu_ratio, 4),
    }


def _quotients(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _scrape(stack: Stack) -> None:
    for url in stack.metrics_urls:
        with urlopen(url, timeout=10) as response:
            assert response.read()


@contextmanager
def _collector() -> Iterator[tuple[str, dict[str, int]]]:
    """A collector's endpoint, and how many requests of each kind and bytes it received."""
    received = dict.fromkeys((*_SIGNALS, "bytes"), 0)
    server = grpc.server(ThreadPoolExecutor(2))
    for signal in _SIGNALS:

        def export(request: bytes, context: Any, signal: str = signal) -> bytes:
            received[signal] += 1
            received["bytes"] += len(request)
            return b""  # an empty message of any type

        handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        service = f"opentelemetry.proto.collector.{signal}"
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port(f"{_HOST}:0")
    server.start()
    try:
        yield f"http://{_HOST}:{port}", received
    finally:
        server.stop(0)


if __name__ == "__main__":
    main()
