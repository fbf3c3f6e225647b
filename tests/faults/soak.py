"""Mixed load for minutes, and a check that nothing grows: `make soak ARGS="--minutes 10"`.

10 % of the requests are cancelled, 5 % are invalid, 2 % of the clients die: their connection is
reset during a stream, and at times a whole client process is killed. Resources are counted every
two seconds.

Bounded stores that fill up are no leak: thirty cached answers, one series per status, at most 16
connections to Redis. Measurement therefore starts after 4 minutes and 5,000 requests, once files,
threads and series have had no new maximum for a minute, or after 4 more minutes. The services run
without malloc's caches per thread, which fill for an hour to some 100 KiB each, and with one arena,
because free memory of several arenas grows in steps of a MiB. Leaks are unaffected.

What grows is the minimum: temporary use disappears in it, leaks remain. That of a process's memory
in the last quarter of the measurement may be above that in the first by 4 MiB per hour, which is 20
bytes for each of 200,000 requests, and by 128 KiB, malloc's increment; other counts may not rise.
Slots and sessions must be zero once the load has ended: while requests run, so does their minimum.

One leak is known, and does not count: grpc.aio 1.85.1 never frees the array of a failed or
abandoned batch, 80 bytes for each of its operations and malloc's header
(github.com/grpc/grpc/issues/43360). By mallinfo2, in an orchestrator of toys, that is 0 bytes per
call that its client reads to the end and 150 to 240 per call that its client cancels.

`--leak` is the positive control: a reward keeps every text, and the soak must fail. The last line
on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from specrej.contracts import CacheControl
from tests.endpoints import scrape
from tests.faults.processes import open_streams
from tests.faults.proxy import HOST, Proxy, proxy
from tests.faults.redis_faults import redis_client
from tests.faults.world import SERVICES, Call, NotRecovered, World, world

_CANCELLED, _BAD, _DYING = 0.10, 0.05, 0.02
_EVERY_S = 2.0
_KILL_EVERY_S = 30.0
_WARM_UP_PER_MINUTE = 1250  # requests
_STABLE_S = 60.0  # without a new maximum of files, threads and series
_STABLE_WITHIN_S = 240.0
_PLAIN_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}
# Maximum of grpc's leak per call that its client ended early.
KNOWN_LEAK_BYTES = 3 * 96
MOST_MIB_PER_HOUR = 4.0
# Growth that is none: malloc's increment of 128 KiB, one more connection at the end, and the 20
# histogram series of a status code that occurs for the first time. No other count may grow.
_STEPS: Mapping[str, float] = {"MiB": 0.13, "fds": 2.0, "threads": 2.0, "series": 100.0}
_ANSWERS = ("OK", "CANCELLED", "INVALID_ARGUMENT", "UNAVAILABLE")


@dataclass(slots=True)
class Soak:
    """Status codes of calls, how many their clients ended early, and all measurements."""

    codes: Counter[str] = field(default_factory=Counter)
    early: int = 0
    seconds: list[float] = field(default_factory=list)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    settled: str = "yes"  # or the violation of the invariant

    def growth(self) -> dict[str, float]:
        """By how much each kind has grown; the services' memory without the known leak."""
        grown = {}
        for name, values in self.values.items():
            quarter = max(1, len(values) // 4)
            grown[name] = min(values[-quarter:]) - min(values[:quarter])
        for name in (f"{service} MiB" for service in SERVICES):
            # Between the quarters.
            grown[name] -= 0.75 * KNOWN_LEAK_BYTES * self.early / (1 << 20)
        return grown

    def growing(self) -> list[str]:
        """The kinds that grow by more than their bounds."""
        hours = (self.seconds[-1] - self.seconds[0]) / 3600
        bounds = {**_STEPS, "MiB": _STEPS["MiB"] + MOST_MIB_PER_HOUR * hours}
        return [
            name
            for name, grown in self.growth().items()
            if grown > bounds.get(name.split()[-1], 0.0)
        ]


def main() -> None:
    """Soak, print a JSON object; exit with 1 if anything grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the measurement")
    parser.add_argument(
        "--warm-up", type=float, default=4.0, help="minutes before that, at 1,250 requests each"
    )
    parser.add_argument("--clients", type=int, default=6, help="concurrent clients")
    parser.add_argument("--leak", action="store_true", help="positive control: must fail")
    arguments = parser.parse_args()
    soak = asyncio.run(_soak(arguments))
    growing = soak.growing()
    odd = sorted({*soak.codes} - {*_ANSWERS})
    report = {
        **vars(arguments),
        "flat": not growing,
        "growing": growing,
        "settled": soak.settled,
        "ended_early": soak.early,
        "odd_codes": odd,
        "codes": dict(soak.codes),
        "growth": {name: round(grown, 3) for name, grown in soak.growth().items()},
    }
    print(json.dumps(report))
    sys.exit(bool(growing or odd or soak.settled != "yes"))


async def _soak(arguments: argparse.Namespace) -> Soak:
    soak, over = Soak(), asyncio.Event()
    reward = "leaky" if arguments.leak else "toy"
    async with world(_PLAIN_MALLOC) as running, proxy(running.stack.ports.orchestrator) as dying:
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.clients):
                chance = random.Random(number)
                group.create_task(_send_requests(running, dying, soak, over, chance, reward))
            group.create_task(_kill_clients(running, over))
            await _warm_up(arguments.warm_up, soak.codes)
            await _until_stable(running)
            soak.codes.clear()
            soak.early = 0
            await _measure(running, soak, arguments.minutes * 60)
            over.set()
        try:
            await running.settle()
        except NotRecovered as error:
            soak.settled = str(error)
    return soak


async def _warm_up(minutes: float, codes: Counter[str]) -> None:
    """Wait for the minutes and for a proportional number of requests, which fill bounded stores."""
    until = time.monotonic() + minutes * 60
    needed = minutes * _WARM_UP_PER_MINUTE
    while time.monotonic() < until or sum(codes.values()) < needed:  # noqa: ASYNC110  # a count
        await asyncio.sleep(0.5)


async def _until_stable(running: World) -> None:
    """Wait until files, threads and series have had no new maximum for a minute."""
    began = stable_since = time.monotonic()
    most: dict[str, float] = {}
    while (now := time.monotonic()) - began < _STABLE_WITHIN_S and now - stable_since < _STABLE_S:
        counts = await _series(running)
        for name in running.stack.processes:
            process = running.process(name)
            counts |= {f"{name} fds": process.num_fds(), f"{name} threads": process.num_threads()}
        if any(count > most.get(name, 0.0) for name, count in counts.items()):
            stable_since = now
        most = {name: max(count, most.get(name, 0.0)) for name, count in counts.items()}
        await asyncio.sleep(1)


async def _send_requests(
    running: World,
    dying: Proxy,
    soak: Soak,
    over: asyncio.Event,
    chance: random.Random,
    reward: str,
) -> None:
    """Send random requests one after the other until the soak is over."""
    while not over.is_set():
        kind = chance.random()
        options: dict[str, Any] = {
            "stream": chance.random() < 0.5,
            # Thirty different requests, so that the cache is full after the warm-up.
            "seed": chance.randrange(10),
            "max_tokens": chance.choice((8, 16, 32)),
            "rewards": {reward: 1.0},
            "cache": chance.choice((CacheControl.USE, CacheControl.BYPASS)),
        }
        if _DYING <= kind < _DYING + _BAD:
            options["n"] = -1
        dies, is_cancelled = kind < _DYING, 0 <= kind - _DYING - _BAD < _CANCELLED
        call = Call(f"{HOST}:{dying.port}", **options) if dies else running.call(**options)
        if dies or is_cancelled:
            await asyncio.sleep(chance.uniform(0.01 * dies, 0.1))
            (dying.cut if dies else call.cancel)()
        code = (await call.outcome()).code
        soak.codes[code] += 1
        soak.early += (dies or is_cancelled) and code != "OK"


async def _kill_clients(running: World, over: asyncio.Event) -> None:
    """Kill a client process with open streams every half minute."""
    while not over.is_set():
        process = await open_streams(running, 2)
        process.kill()
        await process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _KILL_EVERY_S)


async def _measure(running: World, soak: Soak, for_s: float) -> None:
    began = time.monotonic()
    async with redis_client(running) as redis:
        while time.monotonic() - began < for_s:
            soak.seconds.append(time.monotonic() - began)
            for name, value in (await _sample(running, redis)).items():
                soak.values[name].append(value)
            await asyncio.sleep(_EVERY_S)


async def _sample(running: World, redis: Any) -> dict[str, float]:
    sample = {"redis keys": float(await redis.dbsize())}
    for name in running.stack.processes:
        process = running.process(name)
        sample[f"{name} MiB"] = process.memory_info().rss / (1 << 20)
        sample[f"{name} fds"] = float(process.num_fds())
        sample[f"{name} threads"] = float(process.num_threads())
    return sample | await _series(running)


async def _series(running: World) -> dict[str, float]:
    """Return the number of metric series of each service."""
    counts = {}
    for name, url in zip(SERVICES, running.stack.metrics_urls, strict=True):
        values = (await scrape([url])).values
        counts[f"{name} series"] = float(sum(map(len, values.values())))
    return counts


if __name__ == "__main__":
    main()
