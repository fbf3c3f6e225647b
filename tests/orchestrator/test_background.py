"""Large messages: converted in threads, which no tenant occupies alone."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from orchestrator.background import converted, in_thread
from specrej import contracts as c
from specrej.security import Caller, set_caller
from tests.orchestrator.caching import BOUND_S, generation
from tests.serving import turns, until


async def test_no_tenant_takes_all_threads() -> None:
    """Guards against a tenant whose large answers delay those of all others."""
    gate, began = threading.Event(), list[str]()

    def work(tenant: str) -> str:
        began.append(tenant)
        assert tenant != "greedy" or gate.wait(BOUND_S)
        return tenant

    async def call(tenant: str) -> str:
        set_caller(Caller(tenant))
        return await in_thread(work, tenant)

    greedy = [asyncio.create_task(call("greedy")) for _ in range(20)]
    await until(lambda: bool(began))
    assert await asyncio.create_task(call("other")) == "other"
    greedy[0].cancel()
    await turns()
    assert began == ["greedy", "other"], "a cancelled call holds its thread"
    gate.set()
    done = await asyncio.gather(*greedy, return_exceptions=True)
    assert done[1:] == ["greedy"] * 19


_TRACED = c.CandidateTrace(1, 0.5, c.Fate.KEPT)
_SMALL, _LARGE = (
    replace(generation(), rounds=(replace(generation().rounds[0], candidates=(_TRACED,) * count),))
    for count in (10, 5000)
)
_TOKENS = replace(_SMALL, candidates=(replace(_SMALL.best, token_ids=(7,) * 5000),))
_TEXT = replace(_SMALL, candidates=(replace(_SMALL.best, text="x" * 100_000),))
_RECORD = c.RequestRecord(
    "id", 0.0, c.Selection(), 1, rounds=(c.RecordedRound(0.0, _LARGE.rounds[0]),)
)


@pytest.mark.parametrize(
    ("value", "in_thread"),
    [
        (c.Finished(_SMALL), False),
        (c.Finished(_LARGE), True),
        (_LARGE, True),
        (c.Finished(_TOKENS), True),
        (c.Finished(_TEXT), True),
        (c.RoundCompleted(_SMALL.rounds[0], (), "", (c.CandidateText(1, "x" * 100_000),)), True),
        (c.RoundCompleted(_LARGE.rounds[0], (), ""), True),
        (_RECORD, True),
        (b"x" * 4096, False),
        (b"x" * 8192, True),
    ],
)
async def test_large_values_are_converted_in_threads(value: object, in_thread: bool) -> None:
    """Guards against a reply whose conversion delays health checks and all other calls."""
    thread = await converted(lambda _: threading.get_ident(), value)
    assert (thread != threading.get_ident()) == in_thread
