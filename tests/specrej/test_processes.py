"""Children: started, watched, stopped; none outlives its parent. The children here are trivial."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specrej.processes import ProcessError, Processes, Program

# Tells that it is up by writing a file, and on SIGTERM adds its name to a list.
POLITE = """
import pathlib, signal, sys
ready, stopped, name = sys.argv[1:]
def stop(*_):
    with open(stopped, "a") as file: file.write(name + " ")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("hello from", name, flush=True)
pathlib.Path(ready).touch()
while True: signal.pause()
"""
DEAF = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
while True: signal.pause()
"""
BROKEN = "import sys; print('no such model'); sys.exit(3)"
PARENT = """
import asyncio, sys
from pathlib import Path
from specrej.processes import Processes
from tests.specrej.test_processes import program
async def main():
    async with Processes([program(Path(sys.argv[1]), "child")], Path(sys.argv[1])) as children:
        print(children.pids["child"], flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def program(directory: Path, name: str, code: str = POLITE) -> Program:
    ready = directory / f"{name}.ready"

    async def is_ready() -> bool:
        return ready.exists()

    arguments = (sys.executable, "-c", code, str(ready), str(directory / "stopped"), name)
    return Program(name, arguments, is_ready)


def children(directory: Path, *programs: Program, grace_s: float = 20.0) -> Processes:
    return Processes(programs, directory, start_timeout_s=20, grace_s=grace_s)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_dead(pids: Sequence[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


async def test_children_start_log_and_stop_in_reverse(tmp_path: Path) -> None:
    """Guards against backends that go away under a draining orchestrator."""
    programs = [program(tmp_path, name) for name in ("a", "b", "c")]
    async with children(tmp_path, *programs) as running:
        pids = running.pids
        assert sorted(pids) == ["a", "b", "c"] and all(map(is_alive, pids.values()))
        assert running.log_tail("a") == "  hello from a"
    assert all_dead(list(pids.values()))
    assert (tmp_path / "stopped").read_text() == "c b a "
    assert (tmp_path / "a.log").read_text() == "hello from a\n"


async def test_a_child_that_ends_early_is_told_with_its_log(tmp_path: Path) -> None:
    """Guards against waiting out the start timeout, and against an error without its reason."""
    running = children(tmp_path, program(tmp_path, "a"), program(tmp_path, "b", BROKEN))
    with pytest.raises(ProcessError, match=r"b ended with code 3.*\n  no such model"):
        async with running:
            pytest.fail("entered")
    assert all_dead(list(running.pids.values())), "the healthy child has to go too"


async def test_a_child_that_never_answers_is_told(tmp_path: Path) -> None:
    """Guards against a start that hangs for ever."""
    silent = Program("silent", program(tmp_path, "silent").arguments, asyncio.Event().wait)
    running = Processes([silent], tmp_path, start_timeout_s=0.2)
    with pytest.raises(ProcessError, match=r"silent was not ready within 0\.2 s"):
        async with running:
            pytest.fail("entered")
    assert all_dead(list(running.pids.values()))


async def test_a_deaf_child_is_killed_after_its_grace(tmp_path: Path) -> None:
    """Guards against a stop that waits for ever for a hanging child."""
    async with children(tmp_path, program(tmp_path, "deaf", DEAF), grace_s=0.2) as running:
        pids = list(running.pids.values())
    assert all_dead(pids)


async def test_a_stopped_child_is_killed_after_its_grace(tmp_path: Path) -> None:
    """Guards against a SIGSTOPped child, which no SIGTERM reaches."""
    async with children(tmp_path, program(tmp_path, "a"), grace_s=0.2) as running:
        pid = running.pids["a"]
        os.kill(pid, signal.SIGSTOP)
    assert all_dead([pid])


async def test_children_stop_when_the_body_fails(tmp_path: Path) -> None:
    """Guards against a stack that a failing test leaves behind."""
    with pytest.raises(LookupError):
        async with children(tmp_path, program(tmp_path, "a")) as running:
            pids = list(running.pids.values())
            raise LookupError
    assert all_dead(pids)


async def test_a_second_cancellation_kills_at_once(tmp_path: Path) -> None:
    """Guards against a second Ctrl-C that leaves children behind, or waits for their grace."""
    running = children(tmp_path, program(tmp_path, "deaf", DEAF), grace_s=1000)
    entered = asyncio.Event()

    async def run() -> None:
        async with running:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(run())
    await asyncio.wait_for(entered.wait(), 20)
    pids = list(running.pids.values())
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.2)
    assert not done, "the grace is being waited for"
    task.cancel()
    await asyncio.wait({task}, timeout=20)
    assert task.cancelled() and all_dead(pids)


async def test_restart_replaces_the_process(tmp_path: Path) -> None:
    """Guards against a restart that leaves the old process beside the new one."""
    async with children(tmp_path, program(tmp_path, "a")) as running:
        old = running.pids["a"]
        await running.restart("a")
        assert running.pids["a"] != old and not is_alive(old) and is_alive(running.pids["a"])


async def test_restart_of_a_killed_child(tmp_path: Path) -> None:
    """Guards the fault tests' own tool: kill -9, then restart."""
    async with children(tmp_path, program(tmp_path, "a")) as running:
        os.kill(running.pids["a"], signal.SIGKILL)
        await running.restart("a")
        assert is_alive(running.pids["a"])


async def test_what_dies_is_started_again(tmp_path: Path) -> None:
    """Guards against a stack that stays half dead, or comes back without saying so."""
    reports: asyncio.Queue[str] = asyncio.Queue()
    async with children(tmp_path, program(tmp_path, "a")) as running:
        keeping = asyncio.ensure_future(running.keep_alive(reports.put_nowait, first_delay_s=0.01))
        for _ in range(2):
            old = running.pids["a"]
            os.kill(old, signal.SIGKILL)
            died = await asyncio.wait_for(reports.get(), 20)
            assert died.startswith("a was ended by SIGKILL; starting it again")
            assert await asyncio.wait_for(reports.get(), 20) == "a is back"
            assert running.pids["a"] != old and is_alive(running.pids["a"])
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_what_is_stuck_is_started_again(tmp_path: Path) -> None:
    """Guards against a stack with a process that runs, and does nothing any more."""
    reports: asyncio.Queue[str] = asyncio.Queue()
    stuck: set[int] = set()

    async def is_stuck() -> bool:
        return running.pids["a"] in stuck

    async with children(tmp_path, replace(program(tmp_path, "a"), is_stuck=is_stuck)) as running:
        keeping = asyncio.ensure_future(running.keep_alive(reports.put_nowait, first_delay_s=0.01))
        old = running.pids["a"]
        stuck.add(old)
        told = [await asyncio.wait_for(reports.get(), 20) for _ in range(3)]
        assert told[0] == "a is stuck; stopping it"
        assert told[1].startswith("a ended with code 0; starting it again")
        assert told[2] == "a is back"
        assert running.pids["a"] != old and not is_alive(old)
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_the_terminal_does_not_signal_children(tmp_path: Path) -> None:
    """Guards against Ctrl-C ending the backends before the orchestrator has drained."""
    async with children(tmp_path, program(tmp_path, "a")) as running:
        assert os.getpgid(running.pids["a"]) != os.getpgrp()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
async def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    """Guards against ports and memory held by orphans after a kill -9 of the parent."""
    root = Path(__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)), cwd=root, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(await asyncio.wait_for(parent.stdout.readline(), 30)))
    try:
        parent.kill()
        await parent.wait()
        # A process id's descriptor is readable once the process has ended.
        readable, _, _ = await asyncio.to_thread(select.select, [child], [], [], 20)
        assert readable
    finally:
        os.close(child)
    assert not (tmp_path / "stopped").exists(), "killed, not asked"
