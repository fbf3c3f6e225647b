"""Worker processes: real ones, with a toy engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.engines import WorkerError, WorkerProcess
from tests.benchmarks import fake_worker

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(engines, "worker", fake_worker)
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    started: list[WorkerProcess] = []

    def start(mode: str = "works") -> WorkerProcess:
        started.append(
            WorkerProcess(Path(sys.executable), "Toy", {"mode": mode}, root, tmp_path / "log")
        )
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_worker_answers_until_it_ends(start: Start) -> None:
    """Whatever the engine prints from C and from children, and after a request that raised."""
    process = start()
    assert process.ready() == {"toy": "1.0"}
    assert process.measure({"n": 7}) == 7.0
    with pytest.raises(WorkerError, match=r"^ValueError: nothing to do$"):
        process.measure({"n": 0})
    assert not process.has_ended()
    assert process.measure({"n": 8}) == 8.0
    with pytest.raises(WorkerError, match=r"^ended with code 3: last line$"):
        process.measure({"n": -1})
    assert process.has_ended()
    with pytest.raises(WorkerError, match="ended with code 3"):
        process.measure({"n": 7})


def test_busy_worker_is_stopped(start: Start) -> None:
    process = start("slow")
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
