"""Start child processes, wait until they are ready, restart those that end, stop them all.

Children log to files, receive no terminal signals (on Ctrl-C the parent stops them in order) and
end with their parent, even if it is killed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_POLL_S = 0.1
_TAIL_LINES = 15
_LONG_S = 10.0
_TIME = len("2030-12-31 23:59:59,999 ")


class ProcessError(Exception):
    """A child could not be started."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command (an absolute path and arguments), and whether its process is ready."""

    name: str
    arguments: tuple[str, ...]
    is_ready: Callable[[], Awaitable[bool]]
    environment: Mapping[str, str] = field(default_factory=dict)


# A generator may fetch its model first: as long as the startup probes in Kubernetes.
START_S = 1800.0


class Processes:
    """Children, started together; leaving the context stops the last of `programs` first.

    `grace_s` is how long each may take to end on SIGTERM before SIGKILL; a second cancellation
    while stopping kills at once. `report` receives what a user should know, such as why a start
    takes long.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        log_dir: Path,
        *,
        start_timeout_s: float = START_S,
        grace_s: float = 15.0,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._running: dict[str, Process] = {}
        self.log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._report = report

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._running.items()}

    async def __aenter__(self) -> Self:
        # Not a TaskGroup: one that fails leaves its task marked as cancelled (Python 3.11), and
        # Ctrl-C would no longer be a KeyboardInterrupt.
        starting = [asyncio.create_task(self._start(one)) for one in self._programs.values()]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            try:
                await asyncio.gather(*starting, return_exceptions=True)
            finally:
                await self._stop_all()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stop_all()

    async def restart(self, name: str) -> None:
        """Stop one child, if it still runs, and start it again.

        Raises:
            ProcessError: it ended, or was not ready in time.
        """
        await self._stop(self._running[name])
        await self._start(self._programs[name])

    def log_tail(self, name: str) -> str:
        """The last lines that a child wrote, indented."""
        lines = self._log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (empty)"

    def log_tails(self) -> str:
        """The last lines that each child wrote."""
        return "\n".join(f"{name}:\n{self.log_tail(name)}" for name in self._running)

    async def keep_alive(self, *, delay_s: float = 1.0) -> None:
        """Restart children that end, after a delay; runs until cancelled."""

        async def keep(program: Program) -> None:
            while True:
                code = await self._running[program.name].wait()
                self._report(f"{program.name} {_how(code)}; restarting it in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                try:
                    await self._start(program)
                    self._report(f"{program.name} is back")
                except (ProcessError, OSError) as error:
                    self._report(str(error))

        async with asyncio.TaskGroup() as group:
            for program in self._programs.values():
                group.create_task(keep(program))

    async def _start(self, program: Program) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        # Others may not read it.
        with os.fdopen(os.open(self._log(program.name), flags, 0o600), "ab") as log:
            process = self._running[program.name] = await asyncio.create_subprocess_exec(
                *dying_with_parent(program.arguments),
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env={**os.environ, **program.environment},
                process_group=0,
            )
        ended = asyncio.ensure_future(process.wait())
        ready = asyncio.ensure_future(_poll(program.is_ready))
        telling = asyncio.ensure_future(self._tell(program.name))
        try:
            await asyncio.wait(
                {ended, ready}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done() or not ready.done():
                late = f"was not ready within {self._start_timeout_s:g} s"
                problem = _how(ended.result()) if ended.done() else late
                tail = self.log_tail(program.name)
                raise ProcessError(f"{program.name} {problem}; the end of its log:\n{tail}")
            ready.result()
        finally:
            for waiting in (ended, ready, telling):
                waiting.cancel()

    async def _tell(self, name: str) -> None:
        """Report what a child that is not ready for long logs beside INFO, until cancelled."""
        told = None
        while True:
            await asyncio.sleep(_LONG_S)
            text = self.log_tail(name).splitlines()[-1].strip()
            if " INFO " not in text and text[_TIME:] != told:
                told = text[_TIME:]
                self._report(f"waiting for {name}: {text}")

    async def _stop_all(self) -> None:
        try:
            for name in reversed(self._programs):
                if name in self._running:
                    await self._stop(self._running[name])
        finally:
            for process in self._running.values():
                _signal(process, signal.SIGKILL)
            for process in self._running.values():
                await process.wait()

    async def _stop(self, process: Process) -> None:
        _signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._grace_s)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()

    def _log(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"


async def _poll(is_ready: Callable[[], Awaitable[bool]]) -> None:
    while not await is_ready():  # noqa: ASYNC110 - another process's state has no event
        await asyncio.sleep(_POLL_S)


def dying_with_parent(arguments: Sequence[str]) -> Sequence[str]:
    """The command with which the kernel kills a program when its parent ends; Linux only.

    setpriv (util-linux) calls prctl and executes the program, which keeps the process id. A
    function between fork and exec could deadlock on locks of this process's other threads.
    """
    if setpriv := shutil.which("setpriv"):
        return (setpriv, "--pdeathsig", "KILL", *arguments)
    return arguments


def _signal(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


async def run_python(arguments: Sequence[str], address: str) -> int:
    """Run Python with `arguments` on the orchestrator at `address`; returns its exit code."""
    # Ctrl-C reaches the program, too, which ends by itself.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent((sys.executable, *arguments)),
        env={**os.environ, "SPECREJ_ADDRESS": address},
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
