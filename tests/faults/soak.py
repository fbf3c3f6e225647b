"""Mixed load for minutes, and whether anything grows: `make soak ARGS="--minutes 10"`.

10 % of the requests are cancelled, 5 % are bad, 2 % of the clients die: their connection is reset
under an open stream, and now and then a client's whole process is killed. Every few seconds all
that could leak is counted.

What is bounded and fills up is no leak: the journal's 256 requests, the cache's thirty answers, a
series per status. So nothing counts before 4 minutes and 5,000 requests are over. The services run
without the small caches that malloc has for every thread: those fill for an hour, to some 100 KiB
per thread at most, and look like a leak of 30 bytes per request. What is leaked does not change.

The memory of a process is flat if zero lies in the 95 % interval of its floor's slope, or it has
grown by 128 KiB at most, which malloc asks for at a time; and if the whole interval lies below
4 MiB per hour: of 200,000 requests, 20 bytes each.

`--leak` is the positive control: the requests ask for a reward that keeps every text, and the soak
must fail. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table

from specrej.contracts import CacheControl
from tests.faults.proxy import HOST, Proxy, proxy
from tests.faults.redis_faults import redis_client
from tests.faults.slopes import Slope, slope
from tests.faults.world import SERVICES, Call, NotRecovered, World, world
from tests.telemetry.observed import num_series

_CANCELLED, _BAD, _DYING = 0.10, 0.05, 0.02
_KILL_EVERY_S = 30.0
_WARM_UP_PER_MINUTE = 1250  # requests
_WITHOUT_THREADS_CACHES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
# Growth per hour that the interval must exclude.
BOUNDS: Mapping[str, float] = {"MiB": 4.0}
# Growth in the whole measurement that shows no trend: malloc asks the kernel for 128 KiB at a time,
# a connection more is there or not at the end, and a code that a call ends with for the first time
# makes a histogram of 20 series.
STEPS: Mapping[str, float] = {"MiB": 0.13, "fds": 2.0, "threads": 2.0, "series": 100.0}
_STEP = 0.5  # of all else, which is counted in whole numbers
_ANSWERS = ("OK", "CANCELLED", "INVALID_ARGUMENT", "UNAVAILABLE")


@dataclass(slots=True)
class Series:
    """All measurements: when, and of each kind its values."""

    seconds: list[float] = field(default_factory=list)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, second: float, sample: Mapping[str, float]) -> None:
        """One measurement of everything."""
        self.seconds.append(second)
        for name, value in sample.items():
            self.values[name].append(value)

    def slopes(self) -> dict[str, Slope]:
        """Of every kind."""
        return {name: slope(self.seconds, values) for name, values in self.values.items()}


def main() -> None:
    """Soak, print a table and a JSON object; ends with 1 if something grows."""
    arguments = _arguments()
    codes, series, settled = asyncio.run(_soak(arguments))
    requests = sum(codes.values())
    slopes = series.slopes()
    growing = [name for name, found in slopes.items() if not _is_flat(name, found)]
    odd = sorted(set(codes) - set(_ANSWERS))
    _print_table(series, slopes)
    report = {
        "minutes": arguments.minutes,
        "warm_up_minutes": arguments.warm_up,
        "clients": arguments.clients,
        "requests": requests,
        "leak": arguments.leak,
        "flat": not growing,
        "growing": growing,
        "settled": settled,
        "odd_codes": odd,
        "codes": dict(codes),
        "samples": len(series.seconds),
        "slopes_per_hour": {
            name: {key: round(value, 3) + 0.0 for key, value in asdict(found).items()}
            for name, found in slopes.items()
        },
        "bytes_per_request": {
            name: round(found.rise * (1 << 20) / max(1, requests), 1) + 0.0
            for name, found in slopes.items()
            if name.endswith(" MiB")
        },
        "cores": len(os.sched_getaffinity(0)),
    }
    if arguments.report:
        arguments.report.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    sys.exit(bool(growing or odd or settled != "yes"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="to measure for")
    parser.add_argument(
        "--warm-up", type=float, default=4.0, help="minutes before that, at 1,250 requests each"
    )
    parser.add_argument("--clients", type=int, default=6, help="that ask at the same time")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between measurements")
    parser.add_argument("--leak", action="store_true", help="positive control: must fail")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    return parser.parse_args()


async def _soak(arguments: argparse.Namespace) -> tuple[Counter[str], Series, str]:
    """How the calls ended, what was measured, and whether all was free afterwards."""
    codes: Counter[str] = Counter()
    over = asyncio.Event()
    async with (
        world(_WITHOUT_THREADS_CACHES) as running,
        proxy(running.stack.ports.orchestrator) as dying,
    ):
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.clients):
                client = _Client(running, dying, codes, number, leak=arguments.leak)
                group.create_task(client.run(over))
            group.create_task(_kill_clients(running, over))
            await _warm_up(arguments.warm_up, codes)
            series = await _measure(running, arguments.minutes * 60, arguments.every)
            over.set()
        try:
            await running.settle()
            settled = "yes"
        except NotRecovered as error:
            settled = str(error)
    return codes, series, settled


async def _warm_up(minutes: float, codes: Counter[str]) -> None:
    """So long, and as many requests as go with it: what fills up does so by requests."""
    until = time.monotonic() + minutes * 60
    needed = minutes * _WARM_UP_PER_MINUTE
    while time.monotonic() < until or sum(codes.values()) < needed:  # noqa: ASYNC110  # a count
        await asyncio.sleep(0.5)
    codes.clear()


class _Client:
    """One request after the other, each as chance has it."""

    def __init__(
        self, running: World, dying: Proxy, codes: Counter[str], number: int, *, leak: bool
    ) -> None:
        self._world = running
        self._dying = dying
        self._codes = codes
        self._random = random.Random(number)
        self._rewards = {"leaky": 1.0} if leak else {"toy": 1.0}

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over."""
        while not over.is_set():
            self._codes[await self._request()] += 1

    async def _request(self) -> str:
        kind, stream = self._random.random(), self._random.random() < 0.5
        options: dict[str, Any] = {
            "stream": stream,
            # Thirty different requests, so that the cache is full after the warm-up.
            "seed": self._random.randrange(10),
            "max_tokens": self._random.choice((8, 16, 32)),
            "rewards": self._rewards,
            "cache": self._random.choice((CacheControl.USE, CacheControl.BYPASS)),
        }
        if kind < _DYING:
            return await self._die(options)
        if kind < _DYING + _BAD:
            options["n"] = -1
        call = self._world.call(**options)
        if _DYING + _BAD <= kind < _DYING + _BAD + _CANCELLED:
            await asyncio.sleep(self._random.uniform(0, 0.1))
            call.cancel()
        return (await call.outcome()).code

    async def _die(self, options: Mapping[str, Any]) -> str:
        call = Call(f"{HOST}:{self._dying.port}", **options)
        await asyncio.sleep(self._random.uniform(0.01, 0.1))
        self._dying.cut()
        return (await call.outcome()).code


async def _kill_clients(running: World, over: asyncio.Event) -> None:
    """A process with open streams, killed, every half minute."""
    while not over.is_set():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.faults.streams"),
            *(running.stack.orchestrator_address, "2"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout
        with suppress(TimeoutError):
            await asyncio.wait_for(process.stdout.readline(), 20)
        process.kill()
        await process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _KILL_EVERY_S)


async def _measure(running: World, for_s: float, every_s: float) -> Series:
    series, began = Series(), time.monotonic()
    async with redis_client(running) as redis:
        while time.monotonic() - began < for_s:
            with suppress(grpc.aio.AioRpcError):  # a sample less
                series.add(time.monotonic() - began, await _sample(running, redis))
            await asyncio.sleep(every_s)
    return series


async def _sample(running: World, redis: Any) -> dict[str, float]:
    generator = await running.generator()
    sample = {
        "sessions": float(generator.sessions),
        "slots": float(generator.slots.owned),
        "redis keys": float(await redis.dbsize()),
    }
    for name in running.stack.processes:
        usage = running.usage(name)
        sample[f"{name} MiB"] = usage.resident_mib
        sample[f"{name} fds"] = float(usage.fds)
        sample[f"{name} threads"] = float(usage.threads)
    for name in SERVICES:
        port = getattr(running.stack.ports, f"metrics_{name}")
        sample[f"{name} series"] = float(await num_series(port))
    return sample


def _is_flat(name: str, found: Slope) -> bool:
    unit = name.split()[-1]
    return found.is_flat(BOUNDS.get(unit, math.inf), STEPS.get(unit, _STEP))


def _print_table(series: Series, slopes: Mapping[str, Slope]) -> None:
    table = Table("what", "mean", "last", "per hour", "95 % interval", "in all", "")
    for name, found in slopes.items():
        values: Sequence[float] = series.values[name]
        table.add_row(
            name,
            f"{sum(values) / len(values):.1f}",
            f"{values[-1]:.1f}",
            f"{found.per_hour:+.1f}",
            f"{found.low:+.1f} .. {found.high:+.1f}",
            f"{found.rise:+.1f}",
            "flat" if _is_flat(name, found) else "[red]grows",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
