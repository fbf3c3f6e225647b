"""A rolling restart of everything, one process at a time, under load: `make rolling`.

Two orchestrators, two generators, two reward services; clients with the published retry policy ask
all the time. A request that fails is one too many. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.rejection import PROMPTS
from specrej import Client
from specrej.client import Options
from specrej.contracts import CacheControl
from specrej.errors import SpecrejError
from specrej.stack import Stack

# Deterministic words instead of models: seconds instead of minutes.
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=10",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}


@dataclass(slots=True)
class Phase:
    """What came of the requests that ended while one process was started again, and after."""

    restarted: str
    seconds: float = 0.0
    answered: int = 0
    degraded: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks for what; each asks again as soon as it is answered."""

    clients: int
    n: int
    max_tokens: int
    settle: int = 3  # requests to be answered between two restarts


def main() -> None:
    """Restart everything once; exit code 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toys", action="store_true", help="no models")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--new", type=int, default=48)
    arguments = parser.parse_args()
    load = Load(arguments.clients, arguments.n, arguments.new)
    phases = asyncio.run(rolling(load, TOYS if arguments.toys else {}))
    _print(phases)
    failed = sum(len(each.failures) for each in phases)
    result = {"failed": failed, "load": asdict(load), "phases": [asdict(each) for each in phases]}
    print(json.dumps(result | describe_machine()))
    sys.exit(1 if failed else 0)


async def rolling(load: Load, environment: dict[str, str]) -> list[Phase]:
    """A phase for each process, and one of rest before and after."""
    told = {"SPECREJ_GENERATOR_THREADS": "1", "SPECREJ_REWARD_THREADS": "1", **environment}
    stack = Stack(environment=told, orchestrators=2, generators=2, reward_services=2, grace_s=60)
    phases = [Phase("")]
    async with stack:
        target = f"ipv4:{stack.orchestrator_addresses}"
        asking = [
            asyncio.ensure_future(_ask(target, load, number, lambda: phases[-1]))
            for number in range(load.clients)
        ]
        await _settled(phases, load)
        for name in [name for name in stack.processes if name != "redis"]:
            phases.append(Phase(name))
            began = time.monotonic()
            await stack.restart(name)
            phases[-1].seconds = time.monotonic() - began
            await _settled(phases, load)
        phases.append(Phase(""))
        await _settled(phases, load)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    return phases


async def _ask(target: str, load: Load, client: int, phase: Callable[[], Phase]) -> None:
    async with Client(target, timeout_s=120) as service:
        for number in itertools.count():
            options = Options(
                n=load.n,
                max_tokens=load.max_tokens,
                seed=1000 * client + number,
                ignore_eos=True,
                cache=CacheControl.BYPASS,
            )
            prompt = PROMPTS[(client + number) % len(PROMPTS)]
            try:
                generation = await service.generate(prompt, **options)
            except SpecrejError as error:
                phase().failures.append(f"{type(error).__name__}: {error}")
            else:
                phase().answered += 1
                phase().degraded += generation.degraded


async def _settled(phases: list[Phase], load: Load) -> None:
    """Every client has been answered some times since the phase began."""
    wanted = phases[-1].answered + load.settle * load.clients
    await _until(lambda: phases[-1].answered >= wanted or bool(phases[-1].failures))


async def _until(condition: Callable[[], bool], bound_s: float = 600.0) -> None:
    async with asyncio.timeout(bound_s):
        while not condition():  # noqa: ASYNC110  # counted by other tasks
            await asyncio.sleep(0.05)


def _print(phases: list[Phase]) -> None:
    table = Table(title="rolling restart under load")
    for heading in ("started again", "seconds", "answered", "degraded", "failed"):
        table.add_column(heading)
    for each in phases:
        counts = map(str, (each.answered, each.degraded, len(each.failures)))
        table.add_row(each.restarted or "nothing", f"{each.seconds:.1f}", *counts)
    console = Console(width=100)
    console.print(table)
    for each in phases:
        for failure in each.failures:
            console.print(f"{each.restarted}: {failure}")


if __name__ == "__main__":
    main()
