"""Each process killed, stopped and starved; rewards, steps and clients that fail."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from typing import Any

from tests.faults import phases
from tests.faults.case import Case, Play
from tests.faults.phases import Phase, held_at
from tests.faults.world import LEASE_S, SERVICES, Outcome, World, until_read

_DEADLINE_S = 5.0  # longer than a phase takes to be reached
_CALL_S = 60.0  # a slow machine needs 20 s
_START_S = 120.0  # of a case in which a process starts

_PHASES = {
    "opening": phases.OPENING,
    "first-round": phases.FIRST_ROUND,
    "scoring": phases.SCORING,
    "pruning": phases.PRUNING,
    "second-round": phases.SECOND_ROUND,
}


async def kill(name: str, phase: Phase, world: World, **options: Any) -> list[str]:
    """Kill a process while a request is at a phase."""
    async with held_at(phase, world, stream=True, timeout_s=_CALL_S, **options) as call:
        world.kill(name)
        for proxy in world.proxies.values():
            await proxy.heal()
        outcome = await call.outcome()
    await world.stack.restart(name)
    return [outcome.label]


async def stop_backend(name: str, phase: Phase, world: World) -> list[str]:
    """Stop a backend until its lease has expired, then resume it."""
    async with held_at(phase, world, timeout_s=_DEADLINE_S) as call:
        world.signal(name, signal.SIGSTOP)
        await asyncio.gather(*(proxy.heal() for proxy in world.proxies.values()))
        outcome = await call.outcome()
        await asyncio.sleep(LEASE_S)  # this case waits for the lease itself
    world.signal(name, signal.SIGCONT)
    return [outcome.label]


async def stop_orchestrator(world: World) -> list[str]:
    """While the orchestrator is stopped, the generator's lease frees its session; then the request
    starts again."""
    async with held_at(phases.SCORING, world, timeout_s=_CALL_S) as call:
        world.signal("orchestrator", signal.SIGSTOP)
        await until_read(world.generator, lambda g: not (g.sessions or g.slots.owned))
        await world.heal()  # resumes it
        return [(await call.outcome()).label]


async def starve(name: str, world: World) -> list[str]:
    """A process that gets a tenth of its processor time answers late, and no differently."""
    options: dict[str, Any] = {"max_tokens": 24, "timeout_s": _CALL_S}
    alone = await world.generate(**options)
    call, process = world.call(**options), world.process(name)
    while not call.is_over:
        process.suspend()
        await asyncio.sleep(0.09)
        process.resume()
        await asyncio.sleep(0.01)
    outcome = await call.outcome()
    assert _candidates(outcome) == _candidates(alone)
    return [outcome.label]


def _candidates(outcome: Outcome) -> Any:
    return outcome.generation and outcome.generation.candidates


async def bad_reward(name: str, world: World) -> list[str]:
    """Send a unary and a streaming request with a reward that misbehaves."""
    calls = [world.call(stream=stream, rewards={name: 1.0}) for stream in (False, True)]
    outcomes = [await call.outcome() for call in calls]
    for error in (outcome.error for outcome in outcomes if outcome.error):
        assert "secret" not in (error.details() or ""), "an internal error text reached the client"
    return [outcome.label for outcome in outcomes]


async def dead_client(world: World) -> list[str]:
    """Kill a client process with 16 open streams."""
    process = await open_streams(world, 16)
    process.kill()
    return [signal.Signals(-await process.wait()).name]


async def stopped_client(world: World) -> list[str]:
    """Stop a client process: its stream must end by its deadline, without its reads."""
    process = await open_streams(world, 1, "--long")
    process.send_signal(signal.SIGSTOP)
    try:
        await until_read(
            world.service,
            lambda service: not (service.running or service.queued or service.generator.sessions),
            bound_s=8,
        )
    finally:
        process.kill()
        await process.wait()
    return ["freed while the client was stopped"]


async def open_streams(world: World, number: int, *flags: str) -> asyncio.subprocess.Process:
    """Start a client process with this number of open streams."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.streams"),
        *(world.stack.orchestrator_address, str(number), *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert await process.stdout.readline() == b"open\n"
    return process


_STOPPED: dict[str, tuple[Play, str]] = {
    "generator": (partial(stop_backend, "generator", phases.SECOND_ROUND), "DEADLINE_EXCEEDED"),
    "reward": (partial(stop_backend, "reward", phases.SCORING), "DEADLINE_EXCEEDED"),
    "orchestrator": (stop_orchestrator, "OK"),
}
# A request that allows a degraded answer, by the process that is killed.
_DEGRADED: dict[str, Play] = {
    "reward": partial(kill, "reward", phases.SCORING, allow_degraded=True),
    "generator": partial(kill, "generator", phases.PRUNING, allow_degraded=True, ignore_eos=False),
}

CASES: tuple[Case, ...] = (
    *(
        Case(
            f"kill/{name}/{point}",
            partial(kill, name, phase),
            "UNAVAILABLE",
            limit_s=_START_S,
            fast=(name, point) == ("generator", "second-round"),
        )
        for name in SERVICES
        for point, phase in _PHASES.items()
    ),
    *(Case(f"stop/{name}", play, code) for name, (play, code) in _STOPPED.items()),
    *(Case(f"starve/{name}", partial(starve, name), "OK", limit_s=_START_S) for name in SERVICES),
    *(Case(f"reward/{name}", partial(bad_reward, name), "INTERNAL") for name in ("nan", "exiting")),
    *(
        Case(f"degraded/{name}-killed", play, "OK degraded", limit_s=_START_S)
        for name, play in _DEGRADED.items()
    ),
    Case("client/killed", dead_client, "SIGKILL", fast=True),
    Case("client/stops-reading", stopped_client, "freed while the client was stopped"),
)
