"""Children: started, watched, stopped; none outlives its parent. The children here are trivial."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from psutil import pid_exists  # type: ignore[import-untyped]

from deploy.local import processes
from deploy.local.processes import ProcessError, Processes, Program

# Writes a file when it is ready, and on SIGTERM adds its name to a list.
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
from deploy.local.processes import Processes
from tests.deploy.test_processes import program
async def main():
    async with Processes([program(Path(sys.argv[1]), "child")], Path(sys.argv[1])) as children:
        print(children.processes["child"], flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def program(directory: Path, name: str, code: str = POLITE) -> Program:
    ready = directory / f"{name}.ready"

    async def is_ready() -> bool:
        return ready.exists()

    arguments = (sys.executable, "-c", code, str(ready), str(directory / "stopped"), name)
    return Program(name, arguments, is_ready)


def children(
    directory: Path,
    *programs: Program,
    grace_s: float = 20.0,
    report: Callable[[str], None] = lambda _: None,
) -> Processes:
    return Processes(programs, directory, start_timeout_s=20, grace_s=grace_s, report=report)


def all_dead(pids: Sequence[int]) -> bool:
    return not any(pid_exists(pid) for pid in pids)


async def test_children_start_log_and_stop_in_reverse(tmp_path: Path) -> None:
    """Guards against backends that go away under a draining orchestrator."""
    programs = [program(tmp_path, name) for name in ("a", "b", "c")]
    async with children(tmp_path, *programs) as running:
        pids = running.processes
        assert sorted(pids) == ["a", "b", "c"] and all(map(pid_exists, pids.values()))
        assert running.log_tail("a") == "  hello from a"
    assert all_dead(list(pids.values()))
    assert (tmp_path / "stopped").read_text() == "c b a "
    log = tmp_path / "a.log"
    assert (log.read_text(), stat.S_IMODE(log.stat().st_mode)) == ("hello from a\n", 0o600)


async def test_error_of_an_early_end_has_the_log(tmp_path: Path) -> None:
    """Guards against waiting out the start timeout, and against an error without its reason."""
    running = children(tmp_path, program(tmp_path, "a"), program(tmp_path, "b", BROKEN))
    with pytest.raises(ProcessError, match=r"b ended with code 3.*\n  no such model"):
        async with running:
            pytest.fail("entered")
    assert all_dead(list(running.processes.values())), "the healthy child has to go too"
    task = asyncio.current_task()
    assert task and not task.cancelling(), "Ctrl-C would not be a KeyboardInterrupt"


async def test_a_child_that_is_never_ready_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a start that hangs for ever, or long without a word."""
    monkeypatch.setattr(processes, "_LONG_S", 0.05)
    told: list[str] = []
    silent = Program("silent", program(tmp_path, "silent").arguments, asyncio.Event().wait)
    running = Processes([silent], tmp_path, start_timeout_s=0.2, report=told.append)
    with pytest.raises(ProcessError, match=r"silent was not ready within 0\.2 s"):
        async with running:
            pytest.fail("entered")
    assert all_dead(list(running.processes.values()))
    assert [line for line in told if line.startswith("waiting for silent: ")]


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_hanging_child_is_killed_after_its_grace(tmp_path: Path, is_stopped: bool) -> None:
    """Guards against a stop that waits for ever: for a child that ignores SIGTERM, or that no
    SIGTERM reaches because of a SIGSTOP. The stop happens although the body fails."""
    child = program(tmp_path, "a", POLITE if is_stopped else DEAF)
    with pytest.raises(LookupError):
        async with children(tmp_path, child, grace_s=0.2) as running:
            pids = list(running.processes.values())
            if is_stopped:
                os.kill(pids[0], signal.SIGSTOP)
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
    pids = list(running.processes.values())
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.2)
    assert not done, "the grace is being waited for"
    task.cancel()
    await asyncio.wait({task}, timeout=20)
    assert task.cancelled() and all_dead(pids)


async def test_an_ended_child_is_restarted(tmp_path: Path) -> None:
    """Guards against a stack with a process that has ended, and against a restart without a report.
    No signal of the terminal reaches the child."""
    reports: asyncio.Queue[str] = asyncio.Queue()
    child = program(tmp_path, "a")
    async with children(tmp_path, child, report=reports.put_nowait) as running:
        keeping = asyncio.ensure_future(running.keep_alive(delay_s=0.01))
        for _ in range(2):
            old = running.processes["a"]
            assert os.getpgid(old) != os.getpgrp()
            os.kill(old, signal.SIGKILL)
            for text in ("a was ended by SIGKILL; restarting it", "a is back"):
                assert (await asyncio.wait_for(reports.get(), 20)).startswith(text)
            assert running.processes["a"] != old and not pid_exists(old)
            assert pid_exists(running.processes["a"])
        keeping.cancel()
        await asyncio.wait({keeping})


PARENT_OF_A_PROGRAM = """
import asyncio, sys
from deploy.local.processes import run_python
child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
asyncio.run(run_python(("-c", child), ""))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's prctl")
@pytest.mark.parametrize("script", [PARENT, PARENT_OF_A_PROGRAM])
async def test_children_die_with_a_killed_parent(tmp_path: Path, script: str) -> None:
    """Guards against ports and memory held by orphans after a kill -9 of the parent."""
    root = Path(__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path)), cwd=root, stdout=asyncio.subprocess.PIPE
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
    assert not (tmp_path / "stopped").exists(), "killed without SIGTERM"
