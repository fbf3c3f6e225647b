"""Faults: processes killed and stopped, rewards, steps and clients that fail."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from typing import Any

from tests.faults import phases
from tests.faults.case import Case, Play, elsewhere, here, not_here
from tests.faults.phases import Phase, held_at
from tests.faults.rogue import OVER_GRPC, OVER_HTTP
from tests.faults.world import FAILING_SEED, LEASE_S, World, until

# The advice to try again; a lesser answer is only for those who ask for it.
FAILED = ("UNAVAILABLE",)
_LESSER = ("OK degraded",)
_STOPPED_S = 1.5

KILLED_AT = {
    "before-first-token": phases.OPENING,
    "mid-round": phases.SECOND_ROUND,
    "mid-scoring": phases.SCORING,
    "before-first-prune": phases.FIRST_ROUND,
}


async def kill(name: str, phase: Phase, world: World, **options: Any) -> list[str]:
    """One process dies while a request is at a point of its life."""
    async with held_at(phase, world, stream=True, **options) as call:
        world.kill(name)
        for each in world.proxies.values():
            await each.heal()
        outcome = await call.outcome()
    await world.stack.restart(name)
    return [outcome.label]


async def stop_backend(name: str, phase: Phase, world: World) -> list[str]:
    """A backend is stopped until after its lease, and goes on."""
    async with held_at(phase, world, timeout_s=_STOPPED_S) as call:
        world.signal(name, signal.SIGSTOP)
        await asyncio.gather(*(each.heal() for each in world.proxies.values()))
        outcome = await call.outcome()
        await asyncio.sleep(LEASE_S)  # the lease itself is what this case waits for
    world.signal(name, signal.SIGCONT)
    return [outcome.label]


async def stop_orchestrator(world: World) -> list[str]:
    """While the orchestrator stands still, the generator's lease frees what it held."""
    async with held_at(phases.SCORING, world, timeout_s=6) as call:
        world.signal("orchestrator", signal.SIGSTOP)
        await until(lambda: _is_free(world))
        await world.heal()  # goes on
        return [(await call.outcome()).label]


async def _is_free(world: World) -> bool:
    description = await world.generator()
    return not (description.sessions or description.slots.owned)


# Rewards, the generator's steps, collectors, clients.


async def bad_reward(name: str, world: World, *, lenient: bool = False) -> list[str]:
    """A reward that does something else than score."""
    options = {"rewards": {name: 1.0}, "allow_degraded": lenient}
    outcomes = [await world.ask(stream=stream, **options) for stream in (False, True)]
    for error in (outcome.error for outcome in outcomes if outcome.error):
        assert "secret" not in (error.details() or ""), "a bug's text left the process"
    return [outcome.label for outcome in outcomes]


async def out_of_time(world: World) -> list[str]:
    """The best there is when the time is nearly over, for who wants that."""
    return [(await world.ask(max_tokens=2000, timeout_s=1.5, allow_degraded=True)).label]


async def failing_step(world: World) -> list[str]:
    """A forward pass raises in one session of two: only its own request fails, opaquely."""
    healthy = world.call(max_tokens=40)
    failed = await world.ask(seed=FAILING_SEED, max_tokens=40)
    assert failed.error
    assert "toy" not in (failed.error.details() or ""), "a bug's text left the process"
    return [failed.label, (await healthy.outcome()).label]


async def dead_client(world: World) -> list[str]:
    """A client's process is killed while 16 of its streams are open."""
    process = await _streams(world, 16)
    process.kill()
    await process.wait()
    return [str(signal.Signals(-(process.returncode or 0)).name)]


async def deaf_client(world: World) -> list[str]:
    """A client's process is stopped: its stream must end by its deadline, not by its reading."""
    process = await _streams(world, 1, "--long")
    process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: _is_idle(world), 8)
    finally:
        process.kill()
        await process.wait()
    return ["freed while the client was stopped"]


async def _is_idle(world: World) -> bool:
    service = await world.service()
    return not (service.running or service.queued or service.generator.sessions)


async def _streams(world: World, number: int, *flags: str) -> asyncio.subprocess.Process:
    """A process with so many streams under way."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.streams"),
        *(world.stack.orchestrator_address, str(number), *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert await process.stdout.readline() == b"open\n"
    return process


def _reward_cases() -> tuple[Case, ...]:
    invalid = dict.fromkeys(("nan", "inf", "too_few", "too_many", "raising", "exiting"), "INTERNAL")
    outcomes = {**invalid, "exhausted": "RESOURCE_EXHAUSTED", "slow": "OK"}
    return tuple(
        here(
            f"faults/reward-{name.replace('_', '-')}",
            partial(bad_reward, name),
            code,
            fast=name != "exiting",
        )
        for name, code in outcomes.items()
    )


def _far_cases() -> tuple[Case, ...]:
    """A reward behind another service, which is not ours and answers what it likes."""
    items = {"too_few": "too-few", "too_many": "too-many", "wrong_ids": "wrong-ids"}
    ways = (("grpc", tuple(OVER_GRPC)), ("http", tuple(OVER_HTTP)))
    return tuple(
        here(
            f"faults/reward-{items.get(what, 'nonsense')}/over-{way}-{what.replace('_', '-')}",
            partial(bad_reward, f"{way}_{what}"),
            "INTERNAL",
            fast=what == "wrong_ids",
        )
        for way, names in ways
        for what in names
    )


def _lenient_cases() -> tuple[Case, ...]:
    """What stands in, where the request allows it: likelihood, an answer that is complete."""
    plays: dict[str, Play] = {
        "reward-killed": partial(kill, "reward", phases.SCORING, allow_degraded=True),
        "generator-killed": partial(
            kill, "generator", phases.PRUNING, allow_degraded=True, ignore_eos=False
        ),
        "reward-nan": partial(bad_reward, "nan", lenient=True),
        "reward-exhausted": partial(bad_reward, "exhausted", lenient=True),
        "deadline": out_of_time,
    }
    return tuple(
        here(f"faults/degraded/{name}", play, *_LESSER, fast=name == "reward-nan")
        for name, play in plays.items()
    )


CASES: tuple[Case, ...] = (
    *(
        here(
            f"faults/kill-{name}/{point}",
            partial(kill, name, phase),
            *FAILED,
            fast=point == "mid-round",
        )
        for name in ("generator", "reward", "orchestrator")
        for point, phase in KILLED_AT.items()
    ),
    here(
        "faults/stop-generator",
        partial(stop_backend, "generator", phases.SECOND_ROUND),
        *("DEADLINE_EXCEEDED", *FAILED),
    ),
    here(
        "faults/stop-reward",
        partial(stop_backend, "reward", phases.SCORING),
        *("DEADLINE_EXCEEDED", *FAILED),
    ),
    here(
        "faults/stop-orchestrator",
        stop_orchestrator,
        *("DEADLINE_EXCEEDED", *FAILED),
    ),
    *_reward_cases(),
    *_lenient_cases(),
    *_far_cases(),
    not_here(
        "faults/reward-wrong-ids/of-candidates",
        "cannot happen: scores are positional on the wire, one per candidate sent",
    ),
    here("faults/step-raises", failing_step, "INTERNAL", "OK", fast=True),
    elsewhere(
        "faults/out-of-memory/in-a-step",
        "tests/generator_service/test_engine.py::test_memory_that_cannot_be_had_ends_one_session",
    ),
    not_here(
        "faults/out-of-memory/killed-by-the-kernel",
        "is a SIGKILL, see faults/kill-generator; its killer cannot be told whom to choose here",
    ),
    elsewhere(
        "faults/engine-thread-dies/not-by-a-bug-between-steps",
        "tests/generator_service/test_engine.py::test_a_bug_between_steps_does_not_end_the_thread",
    ),
    elsewhere(
        "faults/engine-thread-dies/of-a-reward",
        "tests/reward_service/test_worker.py::test_when_the_thread_ends_nobody_waits_for_it",
    ),
    here("faults/client-killed", dead_client, "SIGKILL", fast=True),
    here("faults/client-stops-reading", deaf_client, "freed while the client was stopped"),
)
