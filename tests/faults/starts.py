"""Start and stop of one service: dependencies absent, SIGTERM during a request."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from functools import partial

from deploy.local.stack import Ports
from tests.faults.case import Case, case
from tests.faults.proxy import HOST
from tests.faults.world import Call, World, until_health
from tests.programs import outcome_of

_STOP_S = 10.0
# A request of two seconds, and one longer than all bounds here.
_SHORT_TOKENS, _ENDLESS_TOKENS = 400, 4000


async def sigterm_in_flight(world: World) -> list[str]:
    """Running requests are answered, new ones are refused, then the process ends."""
    async with world.another("orchestrator", GRACE_S="8") as (address, process):
        running = Call(address, stream=True, max_tokens=_SHORT_TOKENS)
        await running.begin()
        process.send_signal(signal.SIGTERM)
        # For a moment after NOT_SERVING, calls on their way are still accepted.
        await until_health(address, "UNAVAILABLE")
        refused = await Call(address, timeout_s=2).outcome()
        code = await asyncio.wait_for(process.wait(), 8 + _STOP_S)
        return [(await running.outcome()).code, refused.code, f"exit {code}"]


async def sigterm_beyond_grace(world: World) -> list[str]:
    """A request longer than the grace period ends with a status, and the process ends."""
    async with world.another("orchestrator", GRACE_S="1") as (address, process):
        running = Call(address, stream=True, max_tokens=_ENDLESS_TOKENS)
        await running.begin()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 2 * _STOP_S)
        seconds = time.monotonic() - began
        assert seconds < 1 + _STOP_S, f"took {seconds:.1f} s"
        return [(await running.outcome()).label, f"exit {code}"]


async def model_fails_to_load(world: World) -> list[str]:
    """The generator prints the reason and ends; the orchestrator waits and serves later."""
    port = str(Ports.free().generator)
    async with world.another("orchestrator", "NOT_SERVING", GENERATOR_ADDRESS=f"{HOST}:{port}") as (
        address,
        _,
    ):
        command = (sys.executable, "-m", "generator_service", "--port", "0", "--model", "/nowhere")
        broken = await outcome_of(*command, bound_s=20)
        assert "/nowhere" in broken.stderr.splitlines()[-1], broken.stderr[-300:]
        refused = await Call(address, timeout_s=5).outcome()
        async with world.another("generator", PORT=port):
            await until_health(address, "SERVING")
            answered = await Call(address).outcome()
        return [f"exit {broken.returncode}", refused.code, answered.code]


_ENDED = ("UNAVAILABLE", "exit 0")
_case = partial(case, limit_s=60)

CASES: tuple[Case, ...] = (
    _case("starts/sigterm-in-flight", sigterm_in_flight, "OK", *_ENDED),
    _case("starts/sigterm-beyond-grace", sigterm_beyond_grace, *_ENDED),
    _case("starts/dependencies-absent", model_fails_to_load, "exit 1", "UNAVAILABLE", "OK"),
)
