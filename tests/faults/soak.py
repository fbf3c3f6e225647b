"""Mixed load for minutes, and whether anything grows: `make soak ARGS="--minutes 10"`.

10 % of the requests are cancelled, 5 % are bad, 2 % of the clients die: their connection is reset
under an open stream, and now and then a client's whole process is killed. Every few seconds all
that could leak is counted.

What is bounded and fills up is no leak: the journal's 256 requests, the cache's thirty answers, a
series per status, the connections to Redis, of which there are as many as were ever needed at once
and never more than 16. So nothing counts before 4 minutes and 5,000 requests are over, nor before
files and series had no new maximum for a minute, unless that takes 4 minutes more. The services run
without the small caches that malloc has for every thread, which fill for an hour to some 100 KiB
each, and with one arena for all threads: what their own ones have free grows by a MiB at a time
while what is in use stays the same. What is leaked does not change.

The memory of a process is flat if zero lies in the 95 % interval of its floor's slope, or it has
grown by 128 KiB at most, which malloc asks for at a time; and if the whole interval lies below
4 MiB per hour: of 200,000 requests, 20 bytes each.

One leak is known and none of ours: grpc.aio never frees the array of a batch, 80 bytes and malloc's
header, that fails or that nobody awaits any more (github.com/grpc/grpc/issues/43360; in 1.85.1):
one for most calls that are cancelled. It counts as growth like any other. `growing_besides` says
what would still grow if each call that its client ended early had cost two of them, and no more.

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
from tests.faults.world import SERVICES, Call, NotRecovered, Outcome, World, world
from tests.telemetry.observed import num_series

_CANCELLED, _BAD, _DYING = 0.10, 0.05, 0.02
_KILL_EVERY_S = 30.0
_WARM_UP_PER_MINUTE = 1250  # requests
_STILL_S = 60.0  # without a new maximum of what fills up
_STILL_WITHIN_S = 240.0
_PLAIN_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
# Of grpc's arrays for batches, at most, per call that its client ended early.
KNOWN_LEAK_BYTES = 2 * 96
# Growth per hour that the interval must exclude.
BOUNDS: Mapping[str, float] = {"MiB": 4.0}
# Growth in the whole measurement that shows no trend: malloc asks the kernel for 128 KiB at a time,
# a connection more is there or not at the end, and a code that a call ends with for the first time
# makes a histogram of 20 series.
STEPS: Mapping[str, float] = {"MiB": 0.13, "fds": 2.0, "threads": 2.0, "series": 100.0}
_STEP = 0.5  # of all else, which is counted in whole numbers
_MAX_DETAILS = 10
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


@dataclass(slots=True)
class Ends:
    """How calls ended; `early`: by their clients, who cancelled or died."""

    codes: Counter[str] = field(default_factory=Counter)
    early: int = 0
    odd_details: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, *, cut: bool) -> None:
        """One that ended; `cut`: its client wanted it to."""
        self.codes[outcome.code] += 1
        self.early += cut and outcome.code != "OK"
        if outcome.code not in _ANSWERS and outcome.error and len(self.odd_details) < _MAX_DETAILS:
            self.odd_details.append(f"{outcome.code}: {outcome.error.details()}")

    def clear(self) -> None:
        """Nothing of the warm-up counts."""
        self.codes.clear()
        self.odd_details.clear()
        self.early = 0


def main() -> None:
    """Soak, print a table and a JSON object; ends with 1 if something grows."""
    arguments = _arguments()
    ends, series, settled = asyncio.run(_soak(arguments))
    codes, requests = ends.codes, sum(ends.codes.values())
    slopes = series.slopes()
    growing = [name for name, found in slopes.items() if not _is_flat(name, found)]
    known_mib = KNOWN_LEAK_BYTES * ends.early / (1 << 20)
    besides = [name for name in growing if not _is_flat(name, _besides(name, series, known_mib))]
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
        "growing_besides": besides,
        "ended_early": ends.early,
        "settled": settled,
        "odd_codes": odd,
        "odd_details": ends.odd_details,
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


async def _soak(arguments: argparse.Namespace) -> tuple[Ends, Series, str]:
    """How the calls ended, what was measured, and whether all was free afterwards."""
    ends = Ends()
    over = asyncio.Event()
    async with (
        world(_PLAIN_MALLOC) as running,
        proxy(running.stack.ports.orchestrator) as dying,
    ):
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.clients):
                client = _Client(running, dying, ends, number, leak=arguments.leak)
                group.create_task(client.run(over))
            group.create_task(_kill_clients(running, over))
            await _warm_up(arguments.warm_up, ends.codes)
            await _until_still(running)
            ends.clear()
            series = await _measure(running, arguments.minutes * 60, arguments.every)
            over.set()
        try:
            await running.settle()
            settled = "yes"
        except NotRecovered as error:
            settled = str(error)
    return ends, series, settled


async def _warm_up(minutes: float, codes: Counter[str]) -> None:
    """So long, and as many requests as go with it: what fills up does so by requests."""
    until = time.monotonic() + minutes * 60
    needed = minutes * _WARM_UP_PER_MINUTE
    while time.monotonic() < until or sum(codes.values()) < needed:  # noqa: ASYNC110  # a count
        await asyncio.sleep(0.5)


async def _until_still(running: World) -> None:
    """Whatever fills up with the most that is ever there at once has been full for a while."""
    began = still_since = time.monotonic()
    most: dict[str, float] = {}
    while (now := time.monotonic()) - began < _STILL_WITHIN_S and now - still_since < _STILL_S:
        counts = {name: float(running.usage(name).fds) for name in running.stack.processes}
        counts |= await _series(running)
        if any(count > most.get(name, 0.0) for name, count in counts.items()):
            still_since = now
        most = {name: max(count, most.get(name, 0.0)) for name, count in counts.items()}
        await asyncio.sleep(1)


class _Client:
    """One request after the other, each as chance has it."""

    def __init__(
        self, running: World, dying: Proxy, ends: Ends, number: int, *, leak: bool
    ) -> None:
        self._world = running
        self._dying = dying
        self._ends = ends
        self._random = random.Random(number)
        self._rewards = {"leaky": 1.0} if leak else {"toy": 1.0}

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over."""
        while not over.is_set():
            await self._request()

    async def _request(self) -> None:
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
            await self._die(options)
            return
        if kind < _DYING + _BAD:
            options["n"] = -1
        call = self._world.call(**options)
        if cancelled := _DYING + _BAD <= kind < _DYING + _BAD + _CANCELLED:
            await asyncio.sleep(self._random.uniform(0, 0.1))
            call.cancel()
        self._ends.add(await call.outcome(), cut=cancelled)

    async def _die(self, options: Mapping[str, Any]) -> None:
        call = Call(f"{HOST}:{self._dying.port}", **options)
        await asyncio.sleep(self._random.uniform(0.01, 0.1))
        self._dying.cut()
        self._ends.add(await call.outcome(), cut=True)


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
    return sample | await _series(running)


async def _series(running: World) -> dict[str, float]:
    ports = {name: getattr(running.stack.ports, f"metrics_{name}") for name in SERVICES}
    return {f"{name} series": float(await num_series(port)) for name, port in ports.items()}


def _is_flat(name: str, found: Slope) -> bool:
    unit = name.split()[-1]
    return found.is_flat(BOUNDS.get(unit, math.inf), STEPS.get(unit, _STEP))


def _besides(name: str, series: Series, known_mib: float) -> Slope:
    """A kind's slope without the known leak, which is one of memory, where grpc runs."""
    found = slope(series.seconds, series.values[name])
    if name not in {f"{service} MiB" for service in SERVICES}:
        return found
    return found.without(known_mib, series.seconds[-1] - series.seconds[0])


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
