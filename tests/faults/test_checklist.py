"""The suite itself: every fault has a case, and references to other tests exist."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.faults.case import Case, Play, examine, here
from tests.faults.checklist import CASES, NUM_FAULTS
from tests.faults.proxy import Proxy, proxy
from tests.faults.world import NotRecovered, World

ROOT = Path(__file__).parents[2]
ELSEWHERE = [case for case in CASES if case.elsewhere]


def test_every_fault_has_a_case() -> None:
    """Guards against a missing case."""
    assert Counter(item.split("/")[0] for item in {case.item for case in CASES}) == NUM_FAULTS
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert sum(map(bool, (case.play, case.elsewhere, case.not_here))) == 1, case.name
        assert bool(case.play) == bool(case.expected), case.name
        assert not any("UNKNOWN" in accepted for accepted in case.expected), case.name


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: case.name)
def test_referenced_tests_exist(case: Case) -> None:
    """Guards against a case without a test after a rename."""
    path, _, name = case.elsewhere.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


async def hang(_: World) -> list[str]:
    await asyncio.Event().wait()
    return []


async def fail(_: World) -> list[str]:
    raise AssertionError("the wrong answer")


async def succeed(_: World) -> list[str]:
    return ["OK", "OK", "UNKNOWN"]


@pytest.mark.parametrize(
    ("play", "expected", "wrong", "outcome", "problem"),
    [
        (succeed, ("OK x 2", "UNKNOWN"), "3 slots", "OK x 2, UNKNOWN", "does not recover: 3 slots"),
        (succeed, ("OK x 3",), "", "OK x 2, UNKNOWN", "not accepted: 2: UNKNOWN"),
        (succeed, ("OK", "OK|UNKNOWN", "OK"), "", "OK x 2, UNKNOWN", "not accepted: 2: UNKNOWN"),
        (succeed, ("OK|UNKNOWN x 2",), "", "OK x 2, UNKNOWN", "3 calls, not 2"),
        (hang, ("OK",), "", "HANGS", "not over within 0.01 s"),
        (fail, ("OK",), "", "WRONG", "AssertionError: the wrong answer"),
    ],
)
async def test_a_failure_is_a_problem(
    play: Play, expected: tuple[str, ...], wrong: str, outcome: str, problem: str
) -> None:
    """Guards against a suite that reports a failed case as passed."""
    case = here("x/y", play, *expected, limit_s=0.01)
    world = AsyncMock(World)
    world.settle.side_effect = [NotRecovered(wrong) if wrong else 0.0]
    result = await examine(case, world)
    assert (result.outcome, result.problem) == (outcome, problem)
    assert (result.recovery_s is None) == bool(wrong)


# The proxy


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(100):
            writer.write(piece)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _through(run: Proxy, sent: bytes = b"hello", bound_s: float = 10) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(bound_s):
            return await reader.read(100)
    except ConnectionResetError:  # which may overtake bytes sent before it
        return b""
    finally:
        writer.transport.abort()


async def test_proxy_applies_and_removes_faults() -> None:
    """Forward, hold, cut, refuse, and forward again."""
    echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with echo, proxy(echo.sockets[0].getsockname()[1]) as run:
        assert await _through(run) == b"hello"
        run.replies.shut()
        with pytest.raises(TimeoutError):
            await _through(run, bound_s=0.5)
        assert run.replies.held.is_set()
        await run.heal()
        run.replies.cut_after = 2
        assert await _through(run) in (b"he", b"")
        await run.heal()
        run.hold_replies_after(b"marker")
        assert await _through(run) == b"hello"
        with pytest.raises(TimeoutError):
            await _through(run, b"a marker", bound_s=0.5)
        run.refuse()
        with pytest.raises(ConnectionError):
            await _through(run)
        await run.heal()
        assert await _through(run) == b"hello"
