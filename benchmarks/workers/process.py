"""A worker process: started, sent requests, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from benchmarks.workers import serve
from deploy.local.processes import dying_with_parent

_REASON_CHARS = 300


class WorkerError(Exception):
    """A worker could not answer; the message is the reason in one line."""


class WorkerProcess:
    """A process that serves the file `worker`; it ends with this process, even by SIGKILL."""

    def __init__(
        self,
        python: Path,
        worker: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start the process; `ready` waits for it. Its output goes to the file `log`.

        Raises:
            WorkerError: the interpreter `python` does not exist.
        """
        if not python.exists():
            raise WorkerError(f"{python} does not exist")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = Pipe()
        serving = (serve.__file__, str(theirs.fileno()), str(worker), json.dumps(options))
        with log.open("wb") as stream, theirs:
            self._process = subprocess.Popen(
                dying_with_parent((str(python.absolute()), "-P", *serving)),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to this process only
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> dict[str, str]:
        """Wait until the engine is loaded; its versions.

        Raises:
            WorkerError: the engine cannot be loaded, or the process ended.
        """
        versions: dict[str, str] = self._reply()["ready"]
        return versions

    def measure(self, request: Mapping[str, Any]) -> float:
        """The seconds of a request.

        Raises:
            WorkerError: the request failed, or the process ended.
        """
        seconds: float = self.exchange(request)["seconds"]
        return seconds

    def exchange(self, message: Mapping[str, Any], until: float | None = None) -> dict[str, Any]:
        """The reply to a message, as in serve.py; `until` is a time of `time.monotonic`.

        Raises:
            WorkerError: the request failed, there is no reply in time, or the process ended.
        """
        with suppress(BrokenPipeError):  # _reply raises with the reason
            self._connection.send(dict(message))
        if not self._connection.poll(None if until is None else until - time.monotonic()):
            raise WorkerError("no answer in time")
        return self._reply()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _reply(self) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            raise WorkerError(f"ended {how}: {self._last_output()}") from None
        if "error" in reply:
            raise WorkerError(_shortened(reply["error"]))
        return reply

    def _last_output(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return _shortened(next((line for line in reversed(lines) if line.strip()), "no output"))


def _shortened(reason: str) -> str:
    """One line of bounded length."""
    return " ".join(reason.split())[:_REASON_CHARS]
