"""A worker's process as its parent sees it: started, asked, stopped. Knows no engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.workers import serve
from specrej import tether

_REASON_CHARS = 300


class WorkerError(Exception):
    """A request was not answered; the message is the reason, fit for a report."""


class WorkerProcess:
    """A process that serves `worker`; it ends with this one, even when that is killed."""

    def __init__(
        self,
        python: Path,
        worker: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it; `ready` waits until it can be asked. What it prints goes to the file `log`."""
        command = [str(python.absolute()), "-P", serve.__file__, str(worker), json.dumps(options)]
        tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                tethered,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, str]:
        """Wait for the engine; its versions.

        Raises:
            WorkerError: it could not be loaded, or the process ended.
        """
        versions: dict[str, str] = self._reply()["ready"]
        return versions

    def ask(self, request: Mapping[str, Any]) -> float:
        """The seconds that a request took.

        Raises:
            WorkerError: it failed, or the process ended.
        """
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the reply, or rather its absence, tells why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        seconds: float = self._reply()["seconds"]
        return seconds

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it and what it started, whatever it is doing: it holds nothing worth keeping."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{_how(self._process.wait())}: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(shortened(reply["error"]))
        return reply

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return shortened(next((line for line in reversed(lines) if line.strip()), "nothing said"))


def shortened(reason: str) -> str:
    """One line of it, of bounded length."""
    return " ".join(reason.split())[:_REASON_CHARS]


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
