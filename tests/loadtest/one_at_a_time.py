"""A service that answers one request at a time, measured by the driver of latency-vs-n.

A program of its own, since Locust replaces functions of the standard library. The argument is how
many seconds an answer takes, or "busy" for a service that never becomes idle. Prints one JSON
object: an error, or the codes and latencies of a steady block, and its answers per second.
"""

from __future__ import annotations

import locust  # noqa: F401 - first: it replaces functions of the standard library

# isort: split
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import gevent  # type: ignore[import-untyped]
from gevent.lock import BoundedSemaphore  # type: ignore[import-untyped]

from loadtest.calls import Outcome
from loadtest.latency_vs_n import driver
from loadtest.latency_vs_n.measure import Block, Condition, Settings
from specrej.contracts import Algorithm

SETTINGS = Settings(("Why?",), rate=20.0, patience_s=1.0)


class OneAtATime:
    """Instead of a `loadtest.calls.Caller`."""

    def __init__(self, seconds: str) -> None:
        self._seconds = 0.0 if seconds == "busy" else float(seconds)
        self._running = int(seconds == "busy")
        self._turn = BoundedSemaphore(1)

    def stream(self, prompt: str, started: float, **_: Any) -> Outcome:
        with self._turn:
            gevent.sleep(self._seconds)
        return Outcome("OK", time.perf_counter() - started)

    def describe(self) -> SimpleNamespace:
        return SimpleNamespace(running=self._running, queued=0)


def main() -> None:
    driver._DRAIN_S = 0.2
    service: Any = OneAtATime(sys.argv[1])
    block = Block(0, Condition.STEADY, Algorithm.BEST_OF_N, 4)
    try:
        measured = driver.Driver(service, SETTINGS)._run(block)
    except driver.MeasurementError as error:
        print(json.dumps({"error": str(error)}))
        return
    answered = [request.seconds for request in measured.requests if request.code == "OK"]
    print(
        json.dumps(
            {
                "codes": [request.code for request in measured.requests],
                "numbers": [request.number for request in measured.requests],
                "answers_per_s": len(answered) / measured.wall_s,
                "slowest_s": max(answered, default=0.0),
            }
        )
    )


if __name__ == "__main__":
    main()
