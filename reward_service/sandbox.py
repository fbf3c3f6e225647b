"""Runs Python programs that nobody has read, each in a process that can reach nothing.

The process has its own user, process, network, mount, IPC and UTS namespaces; sees the
interpreter's files and the system's libraries, read-only, and an empty folder in memory; has a
filter of system calls and limits of time, memory, files and output; starts no other process; and
ends when this one does. What runs in it is `reward_service.sandboxed`.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from reward_service import sandboxed
from reward_service.specs import UnitTestsSpec

Way = Literal["namespaces", "none"]

# What a job reports: how far it came, then one for each test that passed.
STARTED, TESTS_COMPILED, COMPILED = 1, 2, 3

_FILES_BYTES = 8 << 20
_FILE_BYTES = 1 << 20
_TRIAL_S = 20.0
_TRIAL = """
import os
assert os.getuid() == 65534 and os.listdir() == [] and not os.path.exists("/etc/passwd")
"""


class Sandbox:
    """Runs programs, with the bounds of the spec; `find_sandbox` returns one that works."""

    def __init__(self, way: Way, spec: UnitTestsSpec) -> None:
        self.way = way
        self._spec = spec
        workers = spec.workers or os.cpu_count() or 1
        self._room = asyncio.Semaphore(workers)
        self._threads = ThreadPoolExecutor(workers, "sandbox")  # each waits for one process
        library = Path(sysconfig.get_path("stdlib")).resolve()
        self._packages = str(library / "site-packages")
        self._visible = [str(library), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
        source = Path(sandboxed.__file__).read_text("utf-8")
        # Not the environment's interpreter, which would look for the environment.
        python = os.path.realpath(sys.executable)
        self._command = [python, "-I", "-S", "-c", source]

    def trial(self) -> str:
        """Why this way does not work here; empty if it does.

        A program that sees files or another user than it should fails the trial.
        """
        token, job = self._job("", [] if self.way == "none" else [_TRIAL], "")
        try:
            outcome = subprocess.run(
                self._command, input=job, capture_output=True, env={}, timeout=_TRIAL_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__
        if outcome.stdout == token * (COMPILED + (self.way != "none")):
            return ""
        lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "programs are not isolated"

    async def run(self, program: str, tests: Sequence[str], entry_point: str = "") -> int:
        """How far the program came: STARTED, TESTS_COMPILED, COMPILED, and 1 for each test passed.

        Without tests it is compiled only. It is 0 if the sandbox did not start in time, and
        COMPILED if the program wrote to the report. Raises OSError: no process can be started.
        """
        token, job = self._job(program, tests, entry_point)
        most = len(token) * (COMPILED + len(tests))
        loop = asyncio.get_running_loop()
        async with self._room:
            process = self._start()
            late = loop.call_later(self._spec.wall_s, process.kill)
            ending = loop.run_in_executor(self._threads, _report, process, job, most)
            try:
                report = await asyncio.shield(ending)  # which waits for the process in any case
            finally:
                late.cancel()
                process.kill()  # the processes of the sandbox end with it
        steps = len(report) // len(token)
        return steps if report == token * steps else COMPILED

    def close(self) -> None:
        """End the threads, once their programs have ended."""
        self._threads.shutdown(wait=False)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )

    def _job(self, program: str, tests: Sequence[str], entry_point: str) -> tuple[bytes, bytes]:
        """A token, and what `reward_service.sandboxed` reads."""
        spec = self._spec
        job: dict[str, Any] = {
            "token": os.urandom(16),
            "namespaces": None,
            "limits": (spec.cpu_s, spec.memory_mb << 20, _FILE_BYTES),
            "program": program,
            "tests": [*tests],
            "entry_point": entry_point,
        }
        if self.way == "namespaces":
            job["namespaces"] = (self._visible, self._packages, _FILES_BYTES)
        return job["token"], marshal.dumps(job)


def _report(process: subprocess.Popen[bytes], job: bytes, most: int) -> bytes:
    """What the process writes, at most one byte more than `most`; it has ended then."""
    with process:
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):  # it was killed
            process.stdin.write(job)
            process.stdin.close()
        report = process.stdout.read(most + 1)
        process.kill()
    return report


def find_sandbox(spec: UnitTestsSpec) -> Sandbox:
    """Namespaces, or none if they are refused here and the spec allows that.

    Raises ValueError: programs cannot be isolated, and others are not allowed.
    """
    ways: tuple[Way, ...] = ("namespaces", "none") if spec.allow_unsandboxed else ("namespaces",)
    problems = []
    for way in ways:
        sandbox = Sandbox(way, spec)
        if not (problem := sandbox.trial()):
            return sandbox
        problems.append(f"{way}: {problem}")
    text = "allow user namespaces, or set allow_unsandboxed"
    text = f"programs cannot be isolated ({'; '.join(problems)}): {text}"
    raise ValueError(f"reward {spec.name}: {text}")
