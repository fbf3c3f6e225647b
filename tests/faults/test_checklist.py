"""The suite itself: nothing on the list is missing, nothing says it is covered where it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.case import Case, Result, examine, here
from tests.faults.checklist import CASES, CHECKLIST
from tests.faults.proxy import Proxy, proxy
from tests.faults.world import NotRecovered, World

ROOT = Path(__file__).parents[2]
ELSEWHERE = [case for case in CASES if case.elsewhere]


def test_every_item_has_a_case_and_every_case_an_item() -> None:
    """Guards against a case that goes missing in silence."""
    assert len(set(CHECKLIST)) == len(CHECKLIST)
    assert {case.item for case in CASES} == set(CHECKLIST)


def test_every_case_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert sum(map(bool, (case.play, case.elsewhere, case.not_here))) == 1, case.name
        assert bool(case.play) == bool(case.accepted), case.name


def test_unknown_is_never_right() -> None:
    assert not [case.name for case in CASES if "UNKNOWN" in case.accepted]


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: case.name)
def test_what_is_covered_elsewhere_is_there(case: Case) -> None:
    """Guards against a test that was renamed, and a case that then nobody covers."""
    path, _, name = case.elsewhere.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


class Unharmed:
    """A world in which nothing can go wrong, but for what a test tells it."""

    def __init__(self, wrong: str = "") -> None:
        self._wrong = wrong

    async def heal(self) -> None:
        """Nothing to heal."""

    async def settle(self) -> float:
        """At once, or never."""
        if self._wrong:
            raise NotRecovered(self._wrong)
        return 0.0


async def examined(case: Case, wrong: str = "") -> Result:
    return await examine(case, Unharmed(wrong))  # type: ignore[arg-type]


async def test_a_code_that_is_not_right_is_told() -> None:
    async def play(_: World) -> list[str]:
        return ["OK", "UNKNOWN"]

    result = await examined(here("x/y", play, "OK"))
    assert (result.outcome, result.problem) == ("OK, UNKNOWN", "not accepted: UNKNOWN")


async def test_a_case_that_hangs_is_told() -> None:
    async def play(_: World) -> list[str]:
        await asyncio.Event().wait()
        return []

    assert (await examined(here("x/y", play, "OK", limit_s=0.01))).outcome == "HANGS"


async def test_a_case_that_finds_something_wrong_is_told() -> None:
    async def play(_: World) -> list[str]:
        raise AssertionError("the wrong answer")

    assert "the wrong answer" in (await examined(here("x/y", play, "OK"))).problem


async def test_what_is_left_behind_fails_a_case() -> None:
    async def play(_: World) -> list[str]:
        return ["OK"]

    result = await examined(here("x/y", play, "OK"), "3 slots")
    assert result.problem == "does not recover: 3 slots"
    assert result.recovery_s is None


# The proxy: a test with a fault that is none proves nothing.


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(100):
            writer.write(piece)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _through(run: Proxy, sent: bytes = b"hello") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(0.2):
            return await reader.read(100)
    except ConnectionResetError:  # which may overtake what was sent before it
        return b""
    finally:
        writer.transport.abort()


async def test_the_proxy_does_as_it_is_told() -> None:
    """Passes, holds, cuts, answers itself, refuses, and passes again."""
    echo = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with echo, proxy(echo.sockets[0].getsockname()[1]) as run:
        assert await _through(run) == b"hello"
        run.replies.shut()
        with pytest.raises(TimeoutError):
            await _through(run)
        assert run.replies.held.is_set()
        await run.heal()
        run.replies.cut_after = 2
        assert await _through(run) in (b"he", b"")
        await run.heal()
        run.answer = b"-NO\r\n"
        assert await _through(run) == b"-NO\r\n"
        await run.heal()
        run.hold_replies_after(b"marker")
        assert await _through(run) == b"hello"
        with pytest.raises(TimeoutError):
            await _through(run, b"a marker")
        run.refuse()
        with pytest.raises(ConnectionError):
            await _through(run)
        await run.heal()
        assert await _through(run) == b"hello"
