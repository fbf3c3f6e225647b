"""The engine's thread: it continues after bugs, and completes every command when it ends."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from generator_service.engine.commands import OpenCommand, Step
from generator_service.engine.engine import Engine
from generator_service.engine.generator import Frontend
from generator_service.engine.thread import EngineThread
from specrej.contracts import PLAIN, GeneratorDescription, Prompt, SessionSpec, SlotGauge
from specrej.contracts.errors import InternalError, Unavailable
from specrej.threads import ended
from tests.generator_service.stepping import ENDLESS, MODEL, PROMPT
from tests.serving import turns, until

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND_S = 60.0
COMMAND = OpenCommand(PROMPT, 2, ENDLESS, 8)
# Two candidates of it fill an engine of LARGE_SLOTS.
LARGE = OpenCommand(PROMPT, 2, replace(ENDLESS, max_tokens=4000), 4000)
LARGE_SLOTS = 17 + 2 * 4000


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    """Afterwards the thread still works, and no slot is owned."""
    thread = EngineThread(Engine(MODEL, 5000))
    thread.start()
    yield thread
    run_to_the_end(thread)
    thread.stop()
    thread.engine.check_integrity()
    assert thread.engine.ledger.owned == 0


def opened(thread: EngineThread, command: OpenCommand = COMMAND) -> int:
    session_id, future = thread.open(command)
    assert future.result(BOUND_S).n == command.n
    return session_id


def run_to_the_end(thread: EngineThread) -> None:
    session_id = opened(thread)
    assert thread.extend(session_id, 24).result(BOUND_S).num_tokens == 24
    assert thread.close(session_id).result(BOUND_S) == 17


def test_a_bug_between_steps_does_not_end_the_thread(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against callers that wait for ever, also when closing a session fails."""
    session_id = opened(thread)
    monkeypatch.setattr(thread.engine, "_make_room", lambda session: 1 // 0)
    monkeypatch.setattr(thread.engine.prompts, "release", lambda node: 1 // 0)
    with pytest.raises(InternalError):
        thread.extend(session_id, 24).result(BOUND_S)
    monkeypatch.undo()


def test_stopping_fails_open_waiting_and_later_sessions() -> None:
    thread = EngineThread(Engine(MODEL, LARGE_SLOTS))
    thread.start()
    session_id = opened(thread, LARGE)
    _, waiting = thread.open(LARGE)
    growing = thread.extend(session_id, 4000)
    thread.stop()
    later = (thread.open(COMMAND)[1], thread.extend(session_id, 8))
    for future in (growing, waiting, *later):
        with pytest.raises(Unavailable):
            future.result(BOUND_S)
    assert thread.close(session_id).result(BOUND_S) == 0
    assert thread.heartbeat_s() == 0
    assert thread.engine.ledger.owned == 0


def test_when_the_thread_ends_by_itself_all_commands_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against callers that wait for ever: growing, waiting and late ones."""
    at_work, sent = threading.Event(), threading.Event()

    def leave(step: Step) -> None:
        if step.rows:
            at_work.set()
            assert sent.wait(BOUND_S)
            raise SystemExit

    thread = EngineThread(Engine(MODEL, LARGE_SLOTS, on_step=leave))
    assert thread.heartbeat_s() == math.inf  # it has not started
    thread.start()
    session_id, waiting = opened(thread, LARGE), thread.open(LARGE)[1]
    growing = thread.extend(session_id, 4000)
    assert at_work.wait(BOUND_S)
    assert 0 < thread.heartbeat_s() < math.inf
    unread = thread.prune(session_id, [])
    sent.set()
    with pytest.raises(Unavailable):
        growing.result(BOUND_S)
    later = (thread.open(LARGE)[1], thread.extend(session_id, 8), thread.prune(session_id, []))
    for future in (waiting, unread, *later):
        with pytest.raises(Unavailable):
            future.result(BOUND_S)
    assert thread.close(session_id).result(BOUND_S) == 0
    assert thread.heartbeat_s() == math.inf
    engine = thread.engine
    assert (engine.ledger.owned, len(engine.sessions), len(engine.queue)) == (0, 0, 0)
    assert "the engine's thread ends" in caplog.text


PLACES = ["open", "_admit", "extend", "_schedule", "_make_room", "step", "prune", "close"]


@pytest.mark.parametrize("place", [*PLACES, "check_integrity"])
async def test_the_heartbeat_ages_wherever_the_thread_hangs(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a thread that hangs between two steps in a process that seems alive."""
    engine, reached, released = Engine(MODEL, 5000), threading.Event(), threading.Event()
    owner: Any = engine.queue if place == "_admit" else engine
    method = getattr(owner, place)

    def hang(*arguments: Any) -> Any:
        reached.set()
        released.wait()
        return method(*arguments)

    monkeypatch.setattr(owner, place, hang)
    thread = EngineThread(engine)
    thread.start()

    async def session() -> None:
        session_id, opened = thread.open(COMMAND)
        await asyncio.wrap_future(opened)
        await asyncio.wrap_future(thread.extend(session_id, 8))
        await asyncio.wrap_future(thread.prune(session_id, [0]))
        await asyncio.wrap_future(thread.close(session_id))

    running = asyncio.ensure_future(session())
    await until(lambda: reached.is_set() and thread.heartbeat_s() > 0.05)
    released.set()
    await running
    await until(lambda: thread.heartbeat_s() == 0)
    thread.stop()


GRAMMARS = SimpleNamespace(is_supported=False, special_ids={})


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_the_heartbeat_ages_while_a_prompt_is_tokenized(is_cancelled: bool) -> None:
    """Guards templates and tokenizers, which work outside of the engine's thread, and tenants whose
    callers leave: their next long prompt is read after the one before."""
    released, read = threading.Event(), list[Prompt]()
    text: Any = SimpleNamespace(
        read=lambda prompt: (read.append(prompt) or (released.wait() and PROMPT), PLAIN),
        stop_texts=lambda stop: None,
        answers=lambda sampling: None,
        grammars=lambda vocabulary: GRAMMARS,
        longest_token=lambda: 0,
        tool_format="",
        marks={},
    )
    card = GeneratorDescription("tiny", "", 256, 8, 97, 8, "cpu", SlotGauge(0, 0, 0))
    frontend = Frontend(text, card)
    spec = SessionSpec(Prompt(text="x" * 100_000), 2, ENDLESS, 4)
    running = asyncio.ensure_future(frontend.command(spec))
    await until(lambda: frontend.heartbeat_s() > 0.05)
    if is_cancelled:
        await ended(running)
        running = asyncio.ensure_future(frontend.command(spec))
        await turns(500)
    num_read = len(read)
    released.set()
    assert num_read == 1
    assert (await running).prompt_ids == PROMPT
    assert frontend.heartbeat_s() == 0
