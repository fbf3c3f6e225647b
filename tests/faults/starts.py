"""Start and stop: any order, dependencies absent, SIGTERM at every moment, bad collectors."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.channel import open_channel
from specrej.stack import Ports
from tests.faults.case import Case, here
from tests.faults.proxy import HOST
from tests.faults.world import Call, World, until, world
from tests.orchestrator.services import dead_port

_MODULES = {
    "orchestrator": "orchestrator",
    "generator": "generator_service",
    "reward": "reward_service",
}
_TOY_REWARD = '[{"name": "toy", "kind": "toy"}]'
_SLOW_TO_LOAD = (
    '[{"name": "slow", "kind": "function", "function": "tests.faults.slow_import:score"}]'
)
_START_S = 20.0
_STOP_S = 10.0
_GRACE_S = 8.0
# A request that runs for two seconds, and one that outlasts everybody's patience.
_SHORT, _ENDLESS = {"max_tokens": 400}, {"max_tokens": 4000}


class Trio:
    """The three services as bare processes on fixed ports; no cache, nobody who restarts them."""

    def __init__(
        self,
        undo: AsyncExitStack,
        environment: Mapping[str, str],
        modules: Mapping[str, str] = _MODULES,
    ) -> None:
        self.ports = Ports.free()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._undo = undo
        self._environment = environment
        self._modules = modules

    def address(self, name: str) -> str:
        """Where a service listens."""
        return f"{HOST}:{getattr(self.ports, name)}"

    async def start(self, *names: str) -> None:
        """Start services, one after the other, each once the one before it listens."""
        for name in names:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._modules[name]),
                env={**os.environ, **self._settings(), **self._environment},
                stderr=asyncio.subprocess.DEVNULL,
            )
            self.processes[name] = process
            self._undo.push_async_callback(_end, process)
            await until(partial(self._listens, name), _START_S)

    async def serving(self, *names: str) -> None:
        """Wait until services say that they serve."""
        for name in names:
            await until(partial(self._says, name, "SERVING"), _START_S)

    async def health(self, name: str) -> str:
        """SERVING, NOT_SERVING, or "" if nobody answers."""
        async with open_channel(self.address(name), retries=False) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.aio.AioRpcError:
                return ""
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def call(self, **options: Any) -> Call:
        """Begin a request."""
        return Call(self.address("orchestrator"), **options)

    async def terminate(self, name: str, *, times: int = 1) -> tuple[int, float]:
        """SIGTERM; exit code and seconds."""
        process, began = self.processes[name], time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), _STOP_S + _GRACE_S)
        return code, time.monotonic() - began

    async def _listens(self, name: str) -> bool:
        return bool(await self.health(name))

    async def _says(self, name: str, health: str) -> bool:
        return await self.health(name) == health

    def _settings(self) -> dict[str, str]:
        return {
            "SPECREJ_GENERATOR_PORT": str(self.ports.generator),
            "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
            "SPECREJ_REWARD_PORT": str(self.ports.reward),
            "SPECREJ_REWARD_REWARDS": _TOY_REWARD,
            "SPECREJ_ORCHESTRATOR_PORT": str(self.ports.orchestrator),
            "SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS": self.address("generator"),
            "SPECREJ_ORCHESTRATOR_REWARD_ADDRESS": self.address("reward"),
            **{f"SPECREJ_{name.upper()}_GRACE_S": str(_GRACE_S) for name in _MODULES},
        }


@asynccontextmanager
async def trio(*names: str, **environment: str) -> AsyncIterator[Trio]:
    """Some or all of the services, listening; all that are started end with the context."""
    async with AsyncExitStack() as undo:
        three = Trio(undo, environment)
        await three.start(*names)
        yield three


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def in_order(names: Sequence[str], _: World) -> list[str]:
    """Started in some order, they find each other."""
    async with trio(*names) as three:
        await three.serving(*names)
        return [(await three.call().outcome()).code]


async def without_dependencies(_: World) -> list[str]:
    """The orchestrator alone: not ready, says so, and does not end."""
    async with trio("orchestrator") as three:
        outcome = await three.call(timeout_s=5).outcome()
        assert await three.health("orchestrator") == "NOT_SERVING"
        assert three.processes["orchestrator"].returncode is None, "it ended"
        return [outcome.code]


async def sigterm_idle(_: World) -> list[str]:
    """All end by themselves, with 0."""
    names = tuple(_MODULES)
    async with trio(*names) as three:
        await three.serving(*names)
        return [f"exit {(await three.terminate(name))[0]}" for name in names]


async def sigterm_in_flight(_: World) -> list[str]:
    """What runs is answered, new requests are refused, then it ends."""
    async with trio(*_MODULES) as three:
        await three.serving(*_MODULES)
        running = three.call(**_SHORT, stream=True)
        await until(partial(_has_begun, running))
        ending = asyncio.ensure_future(three.terminate("orchestrator"))
        await until(partial(_does_not_serve, three))
        refused = await three.call(timeout_s=2).outcome()
        code, _seconds = await ending
        return [(await running.outcome()).code, refused.code, f"exit {code}"]


async def _has_begun(call: Call) -> bool:
    return bool(call.events)


async def _does_not_serve(three: Trio) -> bool:
    return await three.health("orchestrator") != "SERVING"


async def sigterm_longer_than_grace(name: str, _: World) -> list[str]:
    """What outlasts the grace is ended with a status, and the process ends."""
    async with trio(*_MODULES, **{f"SPECREJ_{name.upper()}_GRACE_S": "1"}) as three:
        await three.serving(*_MODULES)
        running = three.call(**_ENDLESS, stream=True)
        await until(partial(_has_begun, running))
        code, seconds = await three.terminate(name)
        assert seconds < 1 + _STOP_S, f"took {seconds:.1f} s"
        return [(await running.outcome()).label, f"exit {code}"]


async def sigterm_twice(_: World) -> list[str]:
    """A second signal ends the drain at once."""
    async with trio(*_MODULES) as three:
        await three.serving(*_MODULES)
        running = three.call(**_ENDLESS, stream=True)
        await until(partial(_has_begun, running))
        ending = asyncio.ensure_future(three.terminate("orchestrator"))
        await until(partial(_does_not_serve, three))
        three.processes["orchestrator"].send_signal(signal.SIGTERM)
        code, seconds = await ending
        assert seconds < _GRACE_S / 2, f"took {seconds:.1f} s"
        return [(await running.outcome()).label, f"exit {code}"]


async def sigterm_during_load(name: str, _: World) -> list[str]:
    """A service that is told to stop before it could serve ends well, and at once."""
    async with AsyncExitStack() as undo:
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="specrej-"))
        await asyncio.to_thread(Path(directory, "config.json").touch)
        told = {
            "SPECREJ_REWARD_REWARDS": _SLOW_TO_LOAD,
            "SPECREJ_GENERATOR_MODEL": directory,
        }
        three = Trio(undo, told, {**_MODULES, "generator": "tests.faults.slow_load"})
        await three.start(name)
        assert await three.health(name) == "NOT_SERVING"
        code, seconds = await three.terminate(name)
        assert seconds < _STOP_S, f"took {seconds:.1f} s"
        return [f"exit {code}"]


async def no_child_left(_: World) -> list[str]:
    """Another stack comes and goes; the check after every case counts this process's children."""
    async with world() as other:
        await other.settle()
    return ["gone"]


async def model_fails_to_load(_: World) -> list[str]:
    """The generator says so and ends; who depends on it waits, and serves once it is there."""
    async with trio("orchestrator", "reward") as three:
        broken = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "generator_service", "--port", "0", "--model", "/nowhere"),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(_START_S):
            _stdout, errors = await broken.communicate()
        assert b"/nowhere" in errors.splitlines()[-1], errors[-300:]
        assert await three.health("orchestrator") == "NOT_SERVING"
        await three.start("generator")
        await three.serving("orchestrator")
        return [f"exit {broken.returncode}", (await three.call().outcome()).code]


async def collector(hangs: bool, _: World) -> list[str]:
    """Traces that nobody takes: requests are answered all the same, and the stop has a bound."""
    async with AsyncExitStack() as undo:
        if hangs:
            port = await undo.enter_async_context(_silent_server())
        else:
            port = undo.enter_context(dead_port())
        endpoint = f"http://{HOST}:{port}"
        told = {f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": endpoint for name in _MODULES}
        three = await undo.enter_async_context(trio(*_MODULES, **told))
        await three.serving(*_MODULES)
        outcome = await three.call().outcome()
        ends = [await three.terminate(name) for name in _MODULES]
        return [outcome.code, *(f"exit {code}" for code, _ in ends)]


@asynccontextmanager
async def _silent_server() -> AsyncIterator[int]:
    """Takes connections and whatever they send, and never says a word."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


_ORDERS = {
    "orchestrator-first": ("orchestrator", "reward", "generator"),
    "orchestrator-last": ("generator", "reward", "orchestrator"),
    "orchestrator-between": ("reward", "orchestrator", "generator"),
}
_ENDED = ("UNAVAILABLE", "exit 0")

CASES: tuple[Case, ...] = (
    *(
        here(f"starts/any-order/{name}", partial(in_order, names), "OK", limit_s=60)
        for name, names in _ORDERS.items()
    ),
    here("starts/dependencies-absent", without_dependencies, "UNAVAILABLE"),
    here("starts/sigterm-idle", sigterm_idle, "exit 0", limit_s=60),
    here("starts/sigterm-in-flight", sigterm_in_flight, "OK", "UNAVAILABLE", "exit 0", limit_s=60),
    *(
        here(
            f"starts/sigterm-longer-than-grace/{name}",
            partial(sigterm_longer_than_grace, name),
            *_ENDED,
            limit_s=60,
        )
        for name in ("orchestrator", "generator")
    ),
    here("starts/sigterm-twice", sigterm_twice, *_ENDED, limit_s=60),
    *(
        here(
            f"starts/sigterm-during-load/{name}",
            partial(sigterm_during_load, name),
            "exit 0",
            limit_s=60,
        )
        for name in ("reward", "generator")
    ),
    here("starts/no-child-left", no_child_left, "gone", limit_s=60),
    here("faults/model-fails-to-load", model_fails_to_load, "exit 1", "OK", limit_s=60),
    here("faults/collector-down", partial(collector, False), "OK", "exit 0", limit_s=90),
    here("faults/collector-hanging", partial(collector, True), "OK", "exit 0", limit_s=90),
)
