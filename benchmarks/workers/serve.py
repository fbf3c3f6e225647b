"""Runs one engine's worker: `python -P serve.py WORKER.py OPTIONS`, in that engine's environment.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout: first {"ready": versions},
then {"seconds": ...} or {"error": ...} to each. Standard library only, as the peers' environments
have nothing of ours; knows no engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Protocol, TextIO


class Worker(Protocol):
    """What WORKER.py's class `Worker` is; it is made from the options as keywords."""

    versions: dict[str, str]

    def measure(self, **request: Any) -> float:
        """Seconds that the work took."""


def main(path: Path, options: dict[str, Any]) -> None:
    """Serve until stdin ends."""
    replies = _take_stdout()
    try:
        worker = _load(path, options)
    except Exception as error:
        _send(replies, _failure(error))
        sys.exit(1)
    _send(replies, {"ready": worker.versions})
    for line in sys.stdin:
        _send(replies, _answer(worker, json.loads(line)))


def _take_stdout() -> TextIO:
    """The real stdout, for replies alone: what else is printed, by C code too, joins the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _load(path: Path, options: dict[str, Any]) -> Worker:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker: Worker = module.Worker(**options)
    return worker


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"seconds": worker.measure(**request)}
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
