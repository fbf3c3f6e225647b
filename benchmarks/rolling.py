"""A rolling restart of the services (not of Redis) under load: `make rolling`.

Two orchestrators, two generators and two reward services run and restart one at a time; clients
with the published retry policy send requests without a pause. Exits with 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from benchmarks.harness import PROMPTS, TOYS, full_length, parse_arguments, report
from deploy.local.stack import Stack
from specrej import Client
from specrej.contracts.errors import SpecrejError

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Phase:
    """Requests that ended during and after the restart of one process; "" restarts none."""

    restarted: str
    seconds: float = 0.0  # of the restart
    answered: int = 0
    degraded: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent; each client sends its next request when it has an answer."""

    clients: int
    n: int
    max_tokens: int
    settle: int = 3  # requests per client between two restarts


def main() -> None:
    """Restart everything once and report."""
    arguments = parse_arguments(
        __doc__,
        toys=(False, "toys instead of models"),
        clients=(3, "clients"),
        n=(16, "candidates"),
        new=(48, "new tokens per candidate"),
    )
    load = Load(arguments.clients, arguments.n, arguments.new)
    phases = asyncio.run(rolling(load, TOYS if arguments.toys else {}))
    failures = [(phase.restarted, text) for phase in phases for text in phase.failures]
    report(
        "rolling restart under load",
        ("restarted", "seconds", "answered", "degraded", "failed"),
        [
            (p.restarted or "-", f"{p.seconds:.1f}", p.answered, p.degraded, len(p.failures))
            for p in phases
        ],
        {
            "failed": len(failures),
            "load": asdict(load),
            "phases": [asdict(phase) for phase in phases],
        },
        notes=[f"{restarted}: {text}" for restarted, text in failures],
    )
    sys.exit(1 if failures else 0)


async def rolling(load: Load, environment: dict[str, str]) -> list[Phase]:
    """One phase per process, and one without a restart before and after."""
    threads = {"SPECREJ_GENERATOR_THREADS": "1", "SPECREJ_REWARD_THREADS": "1"}
    stack = Stack(
        environment={**threads, **environment},
        orchestrators=2,
        generators=2,
        reward_services=2,
        grace_s=60,
    )
    phases = [Phase("")]
    async with stack:
        target = f"ipv4:{stack.orchestrator_addresses}"
        clients = [
            asyncio.ensure_future(_send(target, load, number, lambda: phases[-1]))
            for number in range(load.clients)
        ]
        await _settled(phases[-1], load)
        for name in [name for name in stack.processes if name != "redis"]:
            phases.append(Phase(name))
            started = time.monotonic()
            await stack.restart(name)
            phases[-1].seconds = time.monotonic() - started
            await _settled(phases[-1], load)
        phases.append(Phase(""))
        await _settled(phases[-1], load)
        for task in clients:
            task.cancel()
        for end in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(end, Exception):
                phases[-1].failures.append(f"a client ended: {end!r}")
    return phases


async def _send(target: str, load: Load, number: int, phase: Callable[[], Phase]) -> None:
    """Requests without end; each counts in the phase in which it ends."""
    async with Client(target, timeout_s=120) as client:
        for index in itertools.count():
            options = full_length(load.n, load.max_tokens, seed=1000 * number + index)
            try:
                answer = await client.generate(PROMPTS[(number + index) % len(PROMPTS)], **options)
            except SpecrejError as error:
                phase().failures.append(f"{type(error).__name__}: {error}")
            else:
                phase().answered += 1
                phase().degraded += answer.degraded


async def _settled(phase: Phase, load: Load) -> None:
    """Wait for some more answers per client, or a failure."""
    goal = phase.answered + load.settle * load.clients
    async with asyncio.timeout(_TIMEOUT_S):
        while phase.answered < goal and not phase.failures:  # noqa: ASYNC110  # other tasks count
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
