"""Mixed load for minutes, and whether anything grows: `make soak ARGS="--minutes 10"`.

10 % of the requests are cancelled, 5 % are bad, 2 % of the clients die: their connection is reset
under an open stream, and now and then a client's whole process is killed. Every few seconds all
that could leak is counted. `--leak` is the positive control: the requests ask for a reward that
keeps every text, and the soak must fail. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

_CLIENTS = 6
_CANCELLED, _BAD, _DYING = 0.10, 0.05, 0.02
_KILL_EVERY_S = 30.0
# Growth that is nobody's concern, per hour, and in the whole measurement. A process that grows by
# less in memory lives for weeks between two deployments. A leak tied to requests, of which a client
# makes tens of thousands per hour, is beyond all of these at once.
BOUNDS: Mapping[str, float] = {"MiB": 16.0, "fds": 3.0, "threads": 3.0}
# A code that a call ends with for the first time makes a histogram of 20 series.
STEPS: Mapping[str, float] = {"MiB": 0.5, "fds": 2.0, "threads": 2.0, "series": 100.0}
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
        """Of every kind, after the warm-up."""
        return {name: slope(self.seconds, values) for name, values in self.values.items()}


def main() -> None:
    """Soak, print a table and a JSON object; ends with 1 if something grows."""
    arguments = _arguments()
    codes, series, settled = asyncio.run(_soak(arguments))
    slopes = series.slopes()
    growing = [name for name, found in slopes.items() if not _is_flat(name, found)]
    odd = sorted(set(codes) - set(_ANSWERS))
    _print_table(series, slopes)
    report = {
        "minutes": arguments.minutes,
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
        "cores": len(os.sched_getaffinity(0)),
    }
    if arguments.report:
        arguments.report.write_text(json.dumps(report) + "\n")
    print(json.dumps(report))
    sys.exit(bool(growing or odd or settled != "yes"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between measurements")
    parser.add_argument("--leak", action="store_true", help="positive control: must fail")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    return parser.parse_args()


async def _soak(arguments: argparse.Namespace) -> tuple[Counter[str], Series, str]:
    """How the calls ended, what was measured, and whether all was free afterwards."""
    until = time.monotonic() + arguments.minutes * 60
    codes: Counter[str] = Counter()
    async with world() as running, proxy(running.stack.ports.orchestrator) as dying:
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                client = _Client(running, dying, codes, number, leak=arguments.leak)
                group.create_task(client.run(until))
            group.create_task(_kill_clients(running, until))
            measuring = group.create_task(_measure(running, until, arguments.every))
        try:
            await running.settle()
            settled = "yes"
        except NotRecovered as error:
            settled = str(error)
    return codes, measuring.result(), settled


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

    async def run(self, until: float) -> None:
        """Until the time has come."""
        while time.monotonic() < until:
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


async def _kill_clients(running: World, until: float) -> None:
    """A process with open streams, killed, every half minute."""
    while (left := until - time.monotonic()) > 0:
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
        await asyncio.sleep(min(_KILL_EVERY_S, left))


async def _measure(running: World, until: float, every_s: float) -> Series:
    series, began = Series(), time.monotonic()
    async with redis_client(running) as redis:
        while time.monotonic() < until:
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
    return found.is_flat(BOUNDS.get(unit, 0.0), STEPS.get(unit, _STEP))


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
