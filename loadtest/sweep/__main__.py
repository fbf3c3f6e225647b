"""Latency against N: `make latency-vs-n`, or `python -m loadtest.sweep --help`.

Measures Speculative Rejection and Best-of-N at every N, with one request at a time, at a fixed rate
and at saturation, and writes latency_vs_n.json, .csv and .html; the last line on stdout is one JSON
object. Every request is kept in latency_vs_n.jsonl as soon as its block is over: stop it at any
time and start it again, with the same options, to go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.sweep import words
from loadtest.sweep.driving import SLOTS, Driver
from loadtest.sweep.journal import Journal, Kept
from loadtest.sweep.machine import describe_machine, describe_service
from loadtest.sweep.options import build_parser, settings_of
from loadtest.sweep.page import write_page
from loadtest.sweep.plan import Block, Condition, Costs, block_s, calibration_ns, plan
from loadtest.sweep.results import Results, collate, write_csv, write_json
from loadtest.sweep.settings import ALGORITHMS, Settings
from loadtest.sweep.table import print_table
from specrej import Client
from specrej.credentials import credentials_from
from specrej.errors import SpecrejError
from specrej.processes import ProcessError
from specrej.stack import Stack

_NAME = "latency_vs_n"
_IDENTITY = ("model", "device", "reward")  # what must be the same when a sweep goes on
_WATCHED_N = 64  # whose slots over time are shown, or the next below it


class SweepError(Exception):
    """The sweep cannot begin, or go on; says why."""


def main() -> None:
    """Measure what is missing, then report all of it."""
    parser = build_parser(__doc__)
    arguments = parser.parse_args()
    try:
        settings = settings_of(arguments)
        results = asyncio.run(_sweep(settings, arguments))
    except (SweepError, ProcessError, SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"latency-vs-n: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command goes on from here\n")
    print_table(results)
    print(_plain(words.claim(results)))
    print(json.dumps(_last_line(results, arguments.out)))


async def _sweep(settings: Settings, arguments: argparse.Namespace) -> Results:
    journal = Journal(arguments.out / f"{_NAME}.jsonl")
    kept = None if arguments.fresh else journal.read()
    if not arguments.report:
        if kept and Settings.from_json(kept.head["settings"]) != settings:
            raise SweepError(
                f"{arguments.out} holds a sweep with other settings: another --out, or --fresh"
            )
        if kept is None or _missing(kept):
            async with _client(settings) as client:
                await _complete(client, settings, journal, kept)
    return _write(_known(journal.read()), arguments.out)


def _missing(kept: Kept) -> bool:
    return any(key not in kept.blocks for key in (SLOTS, *(each.key for each in _blocks(kept))))


async def _complete(
    client: Client, settings: Settings, journal: Journal, kept: Kept | None
) -> None:
    """Measure what is not kept yet."""
    service = await client.describe()
    if max(settings.ns) > service.generator.max_candidates:
        raise SweepError(f"the service takes {service.generator.max_candidates} candidates at most")
    said = describe_service(service)
    if kept is None:
        await _begin(Driver(client, settings), settings, journal, said)
    elif any(kept.head["service"][name] != said[name] for name in _IDENTITY):
        raise SweepError("another service answers than the one that the sweep began with")
    await _measure(Driver(client, settings), settings, journal)


@asynccontextmanager
async def _client(settings: Settings) -> AsyncIterator[Client]:
    """Of the service at the address, or of one of our own."""
    if settings.address:
        credentials = credentials_from(os.environ)
        async with Client(settings.address, timeout_s=settings.timeout_s, **credentials) as client:
            yield client
        return
    _say("starting the services")
    async with (
        Stack() as stack,
        Client(stack.orchestrator_address, timeout_s=settings.timeout_s) as client,
    ):
        yield client


async def _begin(
    driver: Driver, settings: Settings, journal: Journal, service: dict[str, str]
) -> None:
    """Measure costs, plan, and start the journal."""
    costs = await _calibrated(driver, settings)
    journal.begin(
        {
            "settings": settings.to_json(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": describe_machine(),
            "service": service,
            "command": "python -m loadtest.sweep " + " ".join(sys.argv[1:]),
            "costs_s": costs.to_json(),
            "plan": [block.to_json() for block in plan(settings, costs)],
        }
    )


async def _calibrated(driver: Driver, settings: Settings) -> Costs:
    """What a request costs at some N, each after one that warms up."""
    seconds: dict[Any, dict[int, float]] = {}
    for algorithm in ALGORITHMS:
        for n in calibration_ns(settings.ns):
            requests, _ = await driver.run(Block(0, Condition.ALONE, algorithm, n, 2))
            _check(requests[-1].code)
            seconds.setdefault(algorithm, {})[n] = requests[-1].seconds
            _say(f"cost of {algorithm.value} at N={n}: {requests[-1].seconds:.2f} s")
    return Costs(seconds)


async def _measure(driver: Driver, settings: Settings, journal: Journal) -> None:
    """Block by block, with the time that is left."""
    kept = _known(journal.read())
    blocks, costs = _blocks(kept), Costs.from_json(kept.head["costs_s"])
    left = [block for block in blocks if block.key not in kept.blocks]
    expected = {block.key: block_s(block, settings, costs) for block in left}
    _say(f"{len(left)} of {len(blocks)} blocks to do, about {_minutes(sum(expected.values()))}")
    spent_s = planned_s = 0.0
    for number, block in enumerate(left, start=len(blocks) - len(left) + 1):
        began = time.perf_counter()
        requests, end = await driver.run(block)
        if not any(request.answered for request in requests):
            _check(requests[0].code)
        journal.add(requests, end)
        spent_s += time.perf_counter() - began
        planned_s += expected.pop(block.key)
        # As much slower, or faster, as it has been until now.
        rest_s = sum(expected.values()) * spent_s / planned_s
        _say(f"[{number}/{len(blocks)}] {_line(block, requests)}; {_minutes(rest_s)} left")
    if SLOTS not in kept.blocks:
        watched = max((n for n in settings.ns if n <= _WATCHED_N), default=min(settings.ns))
        journal.add(*await driver.watch_slots(watched))


def _line(block: Block, requests: list[Any]) -> str:
    slowest = max(request.seconds for request in requests)
    return (
        f"repeat {block.repeat + 1}, {block.condition.value}, {block.algorithm.value}, "
        f"N={block.n}: {len(requests)} requests, {slowest:.1f} s at most"
    )


def _check(code: str) -> None:
    """Raises SweepError for what no later block would do better."""
    if code not in ("OK", "GAVE_UP", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"):
        raise SweepError(f"the service answers {code}")


def _known(kept: Kept | None) -> Kept:
    if kept is None:
        raise SweepError("nothing was measured yet")
    return kept


def _blocks(kept: Kept) -> list[Block]:
    return [Block.from_json(each) for each in kept.head["plan"]]


def _write(kept: Kept, out: Path) -> Results:
    results = collate(kept, _blocks(kept))
    write_json(results, out / f"{_NAME}.json")
    write_csv(results, out / f"{_NAME}.csv")
    write_page(results, out / f"{_NAME}.html")
    return results


def _last_line(results: Results, out: Path) -> dict[str, Any]:
    found = words.claimed(results)
    return {
        "report": str(out / f"{_NAME}.html"),
        "requests": results.num_requests,
        "blocks": results.num_blocks,
        "whole": results.is_whole,
        "claim": None
        if found is None
        else {
            "n": found.n,
            "best_of_n": found.best_of_n,
            "latency_ratio": round(found.latency.value, 4),
            "verdict": found.verdict,
        },
    }


def _plain(text: str) -> str:
    return text.replace("<b>", "").replace("</b>", "")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
