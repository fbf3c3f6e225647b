"""Faults of a real engine: out of memory in the middle of a request, a thread that ends or hangs.

The engine runs a tiny model of random weights with comparatively large keys and values, in a
separate world. The invariant is checked there, with that world's reference answer.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]

from deploy.local.stack import Stack
from specrej.contracts import Schedule
from tests.faults.breaks import ENDS, HANGS
from tests.faults.case import Case, here
from tests.faults.world import World, until, world

_START_S = 60.0
_LIMIT_S = 180.0
_STUCK_S = 1.0
_MIB = 1 << 20
# 8 KiB of keys and values per token.
_LAYERS, _WIDTH = 4, 256
_CONTEXT = 4096
# Sixteen steps are cheap; the room for the rest of 32 survivors, 300 MiB, is not available.
_STARVING: Mapping[str, Any] = {
    "n": 64,
    "max_tokens": 1200,
    "schedule": Schedule("tokens", tokens=(16,)),
}
_ROOM_MIB = 120
_LONG: Mapping[str, Any] = {"n": 4, "max_tokens": 2000}


class BreakableStack(Stack):
    """A stack whose generator a signal can break."""

    modules: ClassVar = {**Stack.modules, "generator": "tests.faults.broken_engine"}


@asynccontextmanager
async def engine_world(
    make_stack: type[Stack] = BreakableStack, **environment: str
) -> AsyncIterator[World]:
    """Start a world with a real engine; processes that end or hang are restarted."""
    async with AsyncExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="specrej-")))
        await asyncio.to_thread(_save_model, directory)
        variables = {
            "SPECREJ_GENERATOR_MODEL": str(directory),
            "SPECREJ_GENERATOR_KV_SLOTS": "100000",
            "SPECREJ_GENERATOR_THREADS": "1",
            **environment,
        }
        running = await undo.enter_async_context(world(variables, make_stack))
        keeping = asyncio.ensure_future(running.stack.keep_alive(lambda _: None))
        try:
            yield running
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})


@asynccontextmanager
async def reader_world(
    make_stack: type[Stack] = BreakableStack, **environment: str
) -> AsyncIterator[World]:
    """The same with one reward, "reader", of a tiny model."""
    from tests.reward_service.tiny import save_language_model  # imports torch

    with tempfile.TemporaryDirectory(prefix="specrej-") as directory:
        save_language_model(Path(directory))
        rewards = [{"name": "reader", "kind": "likelihood", "directory": directory}]
        environment["SPECREJ_REWARD_REWARDS"] = json.dumps(rewards)
        async with engine_world(make_stack, **environment) as running:
            yield running


def _save_model(directory: Path) -> None:
    # Imports torch; the cases of `make test` need no model.
    from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model

    sizes = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": 4,
        "max_position_embeddings": _CONTEXT,
    }
    save_language_model(directory, make_config("llama", None, **sizes), make_tokenizer(None))


async def out_of_memory(_: World) -> list[str]:
    """Without memory for its next round a session fails, and another session does not."""
    async with engine_world() as running:
        process = running.process("generator")
        most = process.memory_info().vms + _ROOM_MIB * _MIB
        _, hard = process.rlimit(psutil.RLIMIT_AS)
        process.rlimit(psutil.RLIMIT_AS, (most, hard))
        try:
            neighbour = running.call(n=2, max_tokens=200, timeout_s=60)
            failed = await running.generate(**_STARVING, stream=True, timeout_s=60)
            answered = await neighbour.outcome()
        finally:
            process.rlimit(psutil.RLIMIT_AS, (hard, hard))
        await running.settle()
        assert running.stack.processes["generator"] == process.pid, "the generator was restarted"
        return [failed.label, answered.label]


async def thread_breaks(number: signal.Signals, _: World) -> list[str]:
    """The engine's thread ends silently, or a step never ends: calls fail, by their deadlines at
    the latest, health fails, and the process is replaced."""
    async with engine_world(SPECREJ_GENERATOR_STUCK_S=str(_STUCK_S)) as running:
        before = running.stack.processes["generator"]
        call = running.call(**_LONG, timeout_s=3 if number is HANGS else 60)
        await running.until_generator(lambda g: g.slots.owned > 0, bound_s=_START_S)
        running.signal("generator", number)
        outcome = await call.outcome()
        late = await running.generate(timeout_s=5)
        await until_replaced(running, "generator", before)
        return [outcome.label, late.label]


async def until_replaced(running: World, name: str, before: int) -> None:
    """Wait until another process than `before` serves, and the invariant holds."""

    async def is_new() -> bool:
        is_other = running.stack.processes[name] != before
        return is_other and await running.health(name) == "SERVING"

    await until(is_new, bound_s=_START_S)
    await running.settle()


CASES: tuple[Case, ...] = (
    here("faults/out-of-memory/at-a-round", out_of_memory, "INTERNAL", "OK", limit_s=_LIMIT_S),
    here(
        "faults/engine-thread-dies/ends",
        partial(thread_breaks, ENDS),
        "UNAVAILABLE x 2",
        limit_s=_LIMIT_S,
    ),
    here(
        "faults/engine-thread-dies/hangs",
        partial(thread_breaks, HANGS),
        "DEADLINE_EXCEEDED|UNAVAILABLE x 2",
        limit_s=_LIMIT_S,
    ),
)
