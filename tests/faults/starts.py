"""Start and stop: any order, dependencies absent, SIGTERM at every moment, bad collectors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from deploy.local.stack import Ports, Stack
from tests.faults.case import Case, case
from tests.faults.proxy import HOST
from tests.faults.world import SERVICES, Call, World, until
from tests.programs import outcome_of
from tests.serving import health_of

_START_S = 20.0
_STOP_S = 10.0
_GRACE_S = 8.0
# A request of two seconds, and one longer than all bounds here.
_SHORT, _ENDLESS = {"max_tokens": 400}, {"max_tokens": 4000}


class Trio:
    """The three services as processes on fixed ports, without cache and supervision."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ports = Ports.free()
        self.addresses = {name: f"{HOST}:{getattr(ports, name)}" for name in SERVICES}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._environment = {
            "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
            "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
            "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": self.addresses["generator"],
            "SPECREJ_ORCHESTRATOR_REWARD_ADDRESS": self.addresses["reward"],
            **{f"SPECREJ_{name.upper()}_PORT": str(getattr(ports, name)) for name in SERVICES},
            **{f"SPECREJ_{name.upper()}_GRACE_S": str(_GRACE_S) for name in SERVICES},
            **environment,
        }

    async def start(self, *names: str) -> None:
        """Start services, each once the one before it listens."""
        for name in names:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", Stack.modules[name]),
                env={**os.environ, **self._environment},
                stderr=asyncio.subprocess.DEVNULL,
            )
            await self.until_health(name, "SERVING", "NOT_SERVING")

    async def until_health(self, name: str, *accepted: str) -> None:
        """Wait until the health of a service is one of these."""

        async def is_accepted() -> bool:
            return await health_of(self.addresses[name]) in accepted

        await until(is_accepted, bound_s=_START_S)

    async def until_serving(self) -> None:
        """Wait until the health of all started services is SERVING."""
        for name in self.processes:
            await self.until_health(name, "SERVING")

    def call(self, **options: Any) -> Call:
        """Start a request."""
        return Call(self.addresses["orchestrator"], **options)

    async def running_call(self, **options: Any) -> Call:
        """Wait until all services serve and a new request runs."""
        await self.until_serving()
        call = self.call(**options, stream=True)
        await call.begin()
        return call

    async def terminate(self, name: str) -> tuple[str, float]:
        """Send SIGTERM; return exit code and seconds until the end."""
        process, began = self.processes[name], time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), _STOP_S + _GRACE_S)
        return f"exit {code}", time.monotonic() - began


@asynccontextmanager
async def trio(*names: str, **environment: str) -> AsyncIterator[Trio]:
    """Start services and wait until they listen; all of them end with the context."""
    three = Trio(environment)
    try:
        await three.start(*names)
        yield three
    finally:
        for process in three.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def any_order(_: World) -> list[str]:
    """Started in another order, services connect; idle ones end with exit code 0."""
    names = ("reward", "orchestrator", "generator")
    async with trio(*names) as three:
        await three.until_serving()
        code = (await three.call().outcome()).code
        return [code, *[(await three.terminate(name))[0] for name in names]]


async def sigterm_in_flight(_: World) -> list[str]:
    """Running requests are answered, new ones are refused, then the process ends."""
    async with trio(*SERVICES) as three:
        running = await three.running_call(**_SHORT)
        ending = asyncio.ensure_future(three.terminate("orchestrator"))
        # For a moment after NOT_SERVING, calls on their way are still accepted.
        await three.until_health("orchestrator", "UNAVAILABLE")
        refused = await three.call(timeout_s=2).outcome()
        code, _seconds = await ending
        return [(await running.outcome()).code, refused.code, code]


async def sigterm_beyond_grace(_: World) -> list[str]:
    """A request longer than the grace period ends with a status, and the process ends."""
    async with trio(*SERVICES, SPECREJ_ORCHESTRATOR_GRACE_S="1") as three:
        running = await three.running_call(**_ENDLESS)
        code, seconds = await three.terminate("orchestrator")
        assert seconds < 1 + _STOP_S, f"took {seconds:.1f} s"
        return [(await running.outcome()).label, code]


async def model_fails_to_load(_: World) -> list[str]:
    """The generator prints the reason and ends; the orchestrator waits and serves later."""
    async with trio("orchestrator", "reward") as three:
        command = (sys.executable, "-m", "generator_service", "--port", "0", "--model", "/nowhere")
        broken = await outcome_of(*command, bound_s=_START_S)
        assert "/nowhere" in broken.stderr.splitlines()[-1], broken.stderr[-300:]
        refused = await three.call(timeout_s=5).outcome()
        assert await health_of(three.addresses["orchestrator"]) == "NOT_SERVING"
        await three.start("generator")
        await three.until_serving()
        answered = await three.call().outcome()
        return [f"exit {broken.returncode}", refused.code, answered.code]


_ENDED = ("UNAVAILABLE", "exit 0")
_case = partial(case, limit_s=60)

CASES: tuple[Case, ...] = (
    _case("starts/any-order", any_order, "OK", "exit 0 x 3"),
    _case("starts/sigterm-in-flight", sigterm_in_flight, "OK", *_ENDED),
    _case("starts/sigterm-beyond-grace", sigterm_beyond_grace, *_ENDED),
    _case("starts/dependencies-absent", model_fails_to_load, "exit 1", "UNAVAILABLE", "OK"),
)
