"""Background tasks: one per key, bounded, cancelled when closed."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from dataclasses import replace

import pytest

from orchestrator.background import BackgroundTasks, in_thread, packed
from specrej.contracts import (
    CandidateText,
    CandidateTrace,
    Fate,
    Finished,
    RecordedRound,
    RequestRecord,
    RoundCompleted,
    Selection,
)
from specrej.contracts.errors import Unavailable
from specrej.security import Caller, set_caller
from tests.orchestrator.caching import generation
from tests.orchestrator.held_runs import BOUND_S, HeldRuns
from tests.serving import turns, until


async def test_one_task_per_key_and_a_limit() -> None:
    """Guards against a refresh per hit of a popular answer, and against too many at once."""
    tasks, runs = BackgroundTasks("testing", limit=3), HeldRuns[None]()
    for _ in range(5):
        for key in "abcdef":
            tasks.start(key, runs.run)
    await until(lambda: runs.running == 3)
    assert tasks.num_running == 3
    runs.end(None)
    await until(lambda: not tasks.num_running)
    assert len(runs.steps) == 3


async def test_a_key_rests() -> None:
    """Guards against an answer that stays stale, and is made again after every hit."""
    tasks, runs = BackgroundTasks("testing", rest_s=0.2), HeldRuns[None]()
    tasks.start("a", runs.run)
    await until(lambda: runs.running == 1)
    runs.end(None)
    await until(lambda: not tasks.num_running)
    tasks.start("a", runs.run)
    tasks.start("b", runs.run)
    await until(lambda: runs.running == 1)
    assert tasks.num_running == 1
    runs.end(None)

    def starts_again() -> bool:
        tasks.start("a", runs.run)
        return runs.running == 1

    await until(starts_again)
    runs.end(None)


@pytest.mark.parametrize("error", [Unavailable("down"), TimeoutError(), ValueError("a bug")])
async def test_a_failure_is_logged_and_frees_the_key(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against "Task exception was never retrieved", and a key that is never run again."""
    caplog.set_level(logging.INFO, "orchestrator.background")
    tasks, runs = BackgroundTasks("testing"), HeldRuns[None]()
    for failures in (1, 2):
        tasks.start("a", runs.run)
        await until(lambda: runs.running == 1)
        runs.end(error)
        await until(lambda: not tasks.num_running)
        assert caplog.text.count("testing failed") == failures


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


async def test_a_task_has_a_deadline() -> None:
    """Guards against a hanging backend that occupies a place for ever."""
    tasks, runs = BackgroundTasks("testing", deadline_s=0.01), HeldRuns[None]()
    tasks.start("a", runs.run)
    await until(lambda: not tasks.num_running)
    assert (len(runs.steps), runs.running) == (1, 0)


async def test_closing_cancels_all_tasks_and_starts_no_more() -> None:
    """Guards against tasks that outlive the service."""
    tasks, runs = BackgroundTasks("testing"), HeldRuns[None]()
    for key in "abc":
        tasks.start(key, runs.run)
    await until(lambda: runs.running == 3)
    async with asyncio.timeout(5):
        await tasks.aclose()
    assert (runs.running, tasks.num_running) == (0, 0)
    tasks.start("a", runs.run)
    assert tasks.num_running == 0
    await tasks.aclose()


async def test_a_task_does_not_inherit_the_requests_context() -> None:
    """Guards against a request's deadline, span or tenant in the background."""
    owner = contextvars.ContextVar("owner", default="none")
    owner.set("the request")
    owners: list[str] = []

    async def record() -> None:
        owners.append(owner.get())

    BackgroundTasks("testing").start("a", record)
    await until(lambda: owners == ["none"])


_TRACED = CandidateTrace(1, 0.5, Fate.KEPT)
_SMALL, _LARGE = (
    replace(generation(), rounds=(replace(generation().rounds[0], candidates=(_TRACED,) * count),))
    for count in (10, 5000)
)
_TOKENS = replace(_SMALL, candidates=(replace(_SMALL.best, token_ids=(7,) * 5000),))
_TEXT = replace(_SMALL, candidates=(replace(_SMALL.best, text="x" * 100_000),))
_RECORD = RequestRecord("id", 0.0, Selection(), 1, rounds=(RecordedRound(0.0, _LARGE.rounds[0]),))


@pytest.mark.parametrize(
    ("value", "in_thread"),
    [
        (Finished(_SMALL), False),
        (Finished(_LARGE), True),
        (Finished(_TOKENS), True),
        (Finished(_TEXT), True),
        (RoundCompleted(_SMALL.rounds[0], (), "", (CandidateText(1, "x" * 100_000),)), True),
        (RoundCompleted(_LARGE.rounds[0], (), ""), True),
        (_RECORD, True),
    ],
)
async def test_large_messages_are_packed_off_the_event_loop(value: object, in_thread: bool) -> None:
    """Guards against a reply whose packing delays health checks and all other calls."""
    thread = await packed(lambda _: threading.get_ident(), value)
    assert (thread != threading.get_ident()) == in_thread
