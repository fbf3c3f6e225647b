"""Runs a worker in the environment of its engine: `python -P serve.py FD WORKER.py OPTIONS`.

Serves requests from the connection with file descriptor FD: sends {"ready": versions} first, then
{"seconds": ...}, {"text": ..., "tokens": ...} or {"error": ...} for each request. Before a text it
may send {"score": texts}, and receives {"scores": ...}. Standard library only, since the
environments of the peers hold nothing of ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

# Rewards of texts, higher is better.
Score = Callable[[list[str]], list[float]]


class Worker(Protocol):
    """The class `Worker` of WORKER.py, with one of the methods, or both.

    The options are its keyword arguments.
    """

    versions: dict[str, str]

    def measure(self, **request: Any) -> float:
        """Do the work of a request; its seconds."""

    def answer(self, score: Score, **request: Any) -> tuple[str, int]:
        """The best of n answers, by `score` or by own means; and all generated tokens."""


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
            reply = _reply(worker, connection, request)
        except Exception as error:
            reply = _failure(error)
        connection.send(reply)


def _reply(worker: Worker, connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
    if "turns" not in request:
        return {"seconds": worker.measure(**request)}

    def score(texts: list[str]) -> list[float]:
        connection.send({"score": texts})
        scores: list[float] = connection.recv()["scores"]
        return scores

    text, tokens = worker.answer(score, **request)
    return {"text": text, "tokens": tokens}


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
