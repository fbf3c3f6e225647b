"""Runs a worker in the environment of its engine: `python -P serve.py FD WORKER.py OPTIONS`.

Serves requests from the connection with file descriptor FD: sends {"ready": versions} first, then
{"seconds": ...} or {"error": ...} for each request. Standard library only, since the environments
of the peers hold nothing of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol


class Worker(Protocol):
    """The class `Worker` of WORKER.py; the options are its keyword arguments."""

    versions: dict[str, str]

    def measure(self, **request: Any) -> float:
        """Do the work of a request; its seconds."""


def main(descriptor: int, path: Path, options: dict[str, Any]) -> None:
    """Serve until the other end is closed."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        worker = _load(path, options)
    except Exception as error:
        connection.send(_failure(error))
        sys.exit(1)
    connection.send({"ready": worker.versions})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reply = {"seconds": worker.measure(**request)}
        except Exception as error:
            reply = _failure(error)
        connection.send(reply)


def _load(path: Path, options: dict[str, Any]) -> Worker:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker: Worker = module.Worker(**options)
    return worker


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
