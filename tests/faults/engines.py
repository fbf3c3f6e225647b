"""A real engine without memory in the middle of a request.

The engine runs a tiny model of random weights with comparatively large keys and values, in a
separate world. The invariant is checked there, with that world's reference answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil  # type: ignore[import-untyped]

from specrej.contracts import Schedule
from tests.faults.case import Case, case
from tests.faults.world import World, world

_LIMIT_S = 180.0
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
    async with AsyncExitStack() as undo:
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="specrej-")))
        await asyncio.to_thread(_save_model, folder)
        variables = {
            "SPECREJ_GENERATOR_MODEL": str(folder),
            "SPECREJ_GENERATOR_KV_SLOTS": "100000",
            "SPECREJ_GENERATOR_THREADS": "1",
        }
        running = await undo.enter_async_context(world(variables))
        process = running.process("generator")
        most = process.memory_info().vms + _ROOM_MIB * _MIB
        hard = process.rlimit(psutil.RLIMIT_AS)[1]
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


CASES: tuple[Case, ...] = (
    case("engine/out-of-memory", out_of_memory, "INTERNAL", "OK", limit_s=_LIMIT_S),
)
