"""Faults: killed and stopped processes, failing rewards, steps and clients."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from typing import Any

from tests.faults import phases
from tests.faults.case import Case, Play, here
from tests.faults.phases import Phase, held_at
from tests.faults.world import FAILING_SEED, LEASE_S, World

_DEADLINE_S = 5.0  # longer than a phase takes to be reached
_CALL_S = 60.0  # a slow machine needs 20 s

KILLED_AT = {
    "before-first-token": phases.OPENING,
    "mid-round": phases.SECOND_ROUND,
    "mid-scoring": phases.SCORING,
    "before-first-prune": phases.FIRST_ROUND,
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
    """While the orchestrator is stopped, the generator's lease frees its session."""
    async with held_at(phases.SCORING, world, timeout_s=_CALL_S) as call:
        world.signal("orchestrator", signal.SIGSTOP)
        await world.until_free()
        await world.heal()  # resumes it
        return [(await call.outcome()).label]


async def bad_reward(name: str, world: World, *, allow_degraded: bool = False) -> list[str]:
    """Send a unary and a streaming request with a reward that misbehaves."""
    options = {"rewards": {name: 1.0}, "allow_degraded": allow_degraded}
    outcomes = [await world.generate(stream=stream, **options) for stream in (False, True)]
    for error in (outcome.error for outcome in outcomes if outcome.error):
        assert "secret" not in (error.details() or ""), "an internal error text reached the client"
    return [outcome.label for outcome in outcomes]


async def out_of_time(world: World) -> list[str]:
    """The time ends; the request allows a degraded answer."""
    return [(await world.generate(max_tokens=2000, timeout_s=1.5, allow_degraded=True)).label]


async def failing_step(world: World) -> list[str]:
    """A forward pass raises in one session of two: only that request fails, with an opaque text."""
    healthy = world.call(max_tokens=40)
    failed = await world.generate(seed=FAILING_SEED, max_tokens=40)
    assert failed.error
    assert "toy" not in (failed.error.details() or ""), "an internal error text reached the client"
    return [failed.label, (await healthy.outcome()).label]


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
        await world.until_service(
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


_BAD_REWARDS = {
    **dict.fromkeys(("nan", "too_few", "raising", "exiting"), "INTERNAL"),
    "exhausted": "RESOURCE_EXHAUSTED",
    "slow": "OK",
}
# Requests that allow degraded answers, and how many they are.
_DEGRADED: dict[str, tuple[Play, int]] = {
    "reward-killed": (partial(kill, "reward", phases.SCORING, allow_degraded=True), 1),
    "generator-killed": (
        partial(kill, "generator", phases.PRUNING, allow_degraded=True, ignore_eos=False),
        1,
    ),
    "reward-nan": (partial(bad_reward, "nan", allow_degraded=True), 2),
    "reward-exhausted": (partial(bad_reward, "exhausted", allow_degraded=True), 2),
    "deadline": (out_of_time, 1),
}
_STOPPED: dict[str, tuple[Play, str]] = {
    "generator": (partial(stop_backend, "generator", phases.SECOND_ROUND), "DEADLINE_EXCEEDED"),
    "reward": (partial(stop_backend, "reward", phases.SCORING), "DEADLINE_EXCEEDED"),
    "orchestrator": (stop_orchestrator, "UNAVAILABLE"),
}
_RUN = "orchestrator/test_run.py::test_invalid_scores_are_refused"
_OVER_GRPC = (
    "orchestrator/backends/test_remote.py::test_the_answer_to_another_command_is_an_internal_error"
)
_OVER_HTTP = "reward_service/test_remote_http.py::test_bad_answer_is_the_error_that_it_stands_for"
_THREAD = (
    "generator_service/test_engine_thread.py::test_a_bug_between_steps_does_not_end_the_thread"
)
_WORKER = "reward_service/test_worker.py::test_when_the_thread_ends_all_calls_are_unavailable"
# Tests of the same faults over real connections, or of the process's own thread.
_ELSEWHERE = {
    "reward-inf": _RUN,
    "reward-too-many": _RUN,
    "reward-wrong-ids/over-grpc": _OVER_GRPC,
    "reward-wrong-ids/over-http": _OVER_HTTP,
    "reward-nonsense": _OVER_HTTP,
    "engine-thread-dies/not-by-a-bug-between-steps": _THREAD,
    "engine-thread-dies/of-a-reward": _WORKER,
}

CASES: tuple[Case, ...] = (
    *(
        here(
            f"faults/kill-{name}/{point}",
            partial(kill, name, phase),
            "UNAVAILABLE",
            limit_s=120,  # a process starts
            fast=point == "mid-round",
        )
        for name in ("generator", "reward", "orchestrator")
        for point, phase in KILLED_AT.items()
    ),
    *(here(f"faults/stop-{name}", play, code) for name, (play, code) in _STOPPED.items()),
    *(
        here(
            f"faults/reward-{name.replace('_', '-')}",
            partial(bad_reward, name),
            f"{code} x 2",
            fast=name != "exiting",
        )
        for name, code in _BAD_REWARDS.items()
    ),
    *(
        here(f"faults/degraded/{name}", play, f"OK degraded x {n}", fast=name == "reward-nan")
        for name, (play, n) in _DEGRADED.items()
    ),
    here("faults/step-raises", failing_step, "INTERNAL", "OK", fast=True),
    here("faults/client-killed", dead_client, "SIGKILL", fast=True),
    here("faults/client-stops-reading", stopped_client, "freed while the client was stopped"),
    *(Case(f"faults/{name}", elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
    Case(
        "faults/reward-wrong-ids/of-candidates",
        not_here="cannot happen: scores are positional on the wire, one per candidate sent",
    ),
    Case(
        "faults/out-of-memory/killed-by-the-kernel",
        not_here="is a SIGKILL, see faults/kill-generator; the kernel chooses the process",
    ),
)
