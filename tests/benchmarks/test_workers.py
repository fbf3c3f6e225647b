"""A worker's process: real ones, with toys for engines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.workers import engines
from benchmarks.workers.engines import EngineSpec
from benchmarks.workers.process import WorkerError, WorkerProcess

TOY = """
import os, sys, time

class Worker:
    def __init__(self, mood):
        print("printed while loading")
        os.system("echo printed by a child")
        if mood == "slow":
            time.sleep(600)
        if mood == "bad":
            raise OSError("no weights")
        if mood == "worse":
            sys.exit("killed\\n")
        self.versions = {"toy": "1.0"}

    def measure(self, n):
        print("printed while working")
        if n == 0:
            raise ValueError("nothing\\nto do")
        if n < 0:
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        return float(n)
"""

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    worker = tmp_path / "toy_worker.py"
    worker.write_text(TOY)
    started: list[WorkerProcess] = []

    def start(mood: str = "good") -> WorkerProcess:
        started.append(
            WorkerProcess(Path(sys.executable), worker, {"mood": mood}, {}, tmp_path / "log")
        )
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_answers_come_through_whatever_is_printed(start: Start) -> None:
    """Engines print to stdout at will, from C and from children too."""
    process = start()
    assert process.ready() == {"toy": "1.0"}
    assert process.ask({"n": 7}) == 7.0
    assert process.ask({"n": 8}) == 8.0


def test_a_request_that_raises_is_an_error_and_the_next_is_answered(start: Start) -> None:
    process = start()
    process.ready()
    with pytest.raises(WorkerError, match=r"^ValueError: nothing to do$"):
        process.ask({"n": 0})
    assert not process.has_ended()
    assert process.ask({"n": 7}) == 7.0


def test_a_death_is_told_with_the_last_words(start: Start) -> None:
    process = start()
    process.ready()
    with pytest.raises(WorkerError, match=r"^ended with code 3: last words$"):
        process.ask({"n": -1})
    assert process.has_ended()
    with pytest.raises(WorkerError, match="ended with code 3"):
        process.ask({"n": 7})


@pytest.mark.parametrize(
    ("mood", "reason"), [("bad", "OSError: no weights"), ("worse", "ended with code 1: killed")]
)
def test_a_worker_that_cannot_load_tells_why(start: Start, mood: str, reason: str) -> None:
    with pytest.raises(WorkerError, match=reason):
        start(mood).ready()


def test_a_missing_interpreter_is_an_error_of_the_worker(tmp_path: Path) -> None:
    """A peer's environment may have been deleted since."""
    process = WorkerProcess(tmp_path / "none", tmp_path / "worker", {}, {}, tmp_path / "log")
    with pytest.raises(WorkerError, match="ended with code 1"):
        process.ready()
    process.stop()


def test_a_busy_worker_is_stopped_at_once(start: Start) -> None:
    process = start("slow")
    began = time.monotonic()
    process.stop()
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def _peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> EngineSpec:
    """A peer whose environment is there, with a shell script for its python."""
    monkeypatch.setattr(engines, "PEERS", tmp_path)
    spec = EngineSpec("toy", "", {}, pip=(("install", "toy==1.0"),))
    spec.python.parent.mkdir(parents=True)
    spec.python.write_text(f"#!/bin/sh\n{script}\n")
    spec.python.chmod(0o755)
    return spec


def test_a_failing_install_tells_pips_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _peer(tmp_path, monkeypatch, "echo ERROR: no toy==1.0; echo a hint; exit 1")
    for _ in range(2):  # no stamp: it is tried again
        with pytest.raises(WorkerError, match=r"not installed: ERROR: no toy==1.0$"):
            spec.install()


def test_an_install_happens_once_and_again_when_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _peer(tmp_path, monkeypatch, f'echo "$*" >> {tmp_path}/calls')
    spec.install()
    spec.install()
    EngineSpec("toy", "", {}, pip=(("install", "toy==2.0"),)).install()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["toy==1.0", "toy==2.0"]


def test_an_engine_of_ours_needs_no_install() -> None:
    spec = EngineSpec("specrej", "", {})
    spec.install()
    assert spec.python == Path(sys.executable)
    assert spec.worker.exists()
