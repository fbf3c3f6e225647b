"""Faults of a real engine: out of memory in the middle of a request, a thread that ends or hangs.

The engine runs a tiny model of random weights with comparatively large keys and values, in a
separate world. The invariant is checked there, with that world's reference answer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import psutil  # type: ignore[import-untyped]

from deploy.local.stack import Stack
from specrej.contracts import Schedule
from specrej.server.serving import LIVENESS
from tests.faults.case import Case, case
from tests.faults.world import World, until, world
from tests.serving import health_of

# What breaks `broken_engine`.
ENDS, HANGS = signal.SIGUSR1, signal.SIGUSR2

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


class _BreakableStack(Stack):
    """A stack whose generator a signal can break."""

    modules: ClassVar = {**Stack.modules, "generator": "tests.faults.broken_engine"}


@asynccontextmanager
async def engine_world(**environment: str) -> AsyncIterator[World]:
    """Start a world with a real engine."""
    async with AsyncExitStack() as undo:
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="specrej-")))
        await asyncio.to_thread(_save_model, folder)
        variables = {
            "SPECREJ_GENERATOR_MODEL": str(folder),
            "SPECREJ_GENERATOR_KV_SLOTS": "100000",
            "SPECREJ_GENERATOR_THREADS": "1",
            **environment,
        }
        yield await undo.enter_async_context(world(variables, _BreakableStack))


def _save_model(folder: Path) -> None:
    # Imports torch; the cases of `make test` need no model.
    from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model

    sizes = {
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": 4,
        "max_position_embeddings": _CONTEXT,
    }
    save_language_model(folder, make_config("llama", None, **sizes), make_tokenizer(None))


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
    the latest, and liveness fails; a new process serves again."""
    async with engine_world(SPECREJ_GENERATOR_STUCK_S=str(_STUCK_S)) as running:
        call = running.call(**_LONG, timeout_s=3 if number is HANGS else 60)
        await running.until_generator(lambda g: g.slots.owned > 0, bound_s=_START_S)
        running.signal("generator", number)
        outcome = await call.outcome()
        late = await running.generate(timeout_s=5)

        async def is_dead() -> bool:  # or has ended by itself
            alive = await health_of(running.addresses["generator"], LIVENESS)
            return alive in ("NOT_SERVING", "UNAVAILABLE")

        await until(is_dead, bound_s=_START_S)
        await running.stack.restart("generator")
        await running.settle()
        return [outcome.label, late.label]


_LOST = "DEADLINE_EXCEEDED|UNAVAILABLE"
_case = partial(case, limit_s=_LIMIT_S)

CASES: tuple[Case, ...] = (
    _case("engine/out-of-memory", out_of_memory, "INTERNAL", "OK"),
    _case("engine/thread-ends", partial(thread_breaks, ENDS), "UNAVAILABLE x 2"),
    _case("engine/step-hangs", partial(thread_breaks, HANGS), f"{_LOST} x 2"),
)
