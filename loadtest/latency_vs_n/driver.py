"""Sends requests to the public API block by block on Locust's runner and times them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent as grpc_gevent
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.calls import Caller, Outcome
from loadtest.latency_vs_n.measure import (
    GAVE_UP,
    REPEAT_NUMBERS,
    Block,
    Condition,
    Measured,
    Request,
    Settings,
    blocks,
)
from specrej.contracts import Algorithm, CacheControl, Options

# Must run before the first channel is created: otherwise one call blocks all users.
grpc_gevent.init_gevent()

# A request that ends with another code would end the same way in every later block.
_EXPECTED_CODES = ("OK", GAVE_UP, "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")
_DRAIN_S = 60.0
_POLL_S = 0.05


class MeasurementError(Exception):
    """The service cannot be measured; the message is the reason."""


class _BlockUser(User):
    """Sends requests of the driver's block until all are sent."""

    wait_time = constant(0)

    @task
    def send(self) -> None:
        driver: Driver = self.environment.driver
        if not driver.send_next():
            raise StopUser


class Driver:
    """Runs blocks against one service."""

    def __init__(self, caller: Caller, settings: Settings) -> None:
        self._caller = caller
        self._settings = settings
        environment = Environment(user_classes=[_BlockUser])
        environment.driver = self  # type: ignore[attr-defined]
        self._runner = environment.create_local_runner()
        self._block: Block
        self._due: Iterator[tuple[int, float]]  # number in the block and, if it is fixed, the time
        self._requests: list[Request]

    def measure(self) -> Iterator[Measured]:
        """Every pair of blocks at least once, then more until the time is over.

        Raises:
            MeasurementError: the service does not take the largest N, does not become idle between
                blocks, or fails every request of a block for another reason than load.
            SpecrejError: the service cannot be reached.
        """
        most = self._caller.describe().generator.max_candidates
        if max(self._settings.ns) > most:
            raise MeasurementError(f"the service takes {most} candidates at most")
        for algorithm in Algorithm:  # warms up
            self._run(Block(0, Condition.SATURATED, algorithm, min(self._settings.ns)))
        ends = time.perf_counter() + self._settings.minutes * 60
        for pair in blocks(self._settings):
            if pair[0].repeat and time.perf_counter() > ends:
                return
            yield from map(self._run, pair)

    def send_next(self) -> bool:
        """Send the next request of the block when it is due; False if all are sent."""
        number, due = next(self._due, (-1, 0.0))
        if number < 0:
            return False
        gevent.sleep(max(0.0, due - time.perf_counter()))
        self._requests.append(self._send(number, due or time.perf_counter()))
        return True

    def _run(self, block: Block) -> Measured:
        """Send the requests of one block when the service is idle; wait for their ends."""
        self._wait_until_idle()
        started = time.perf_counter()
        self._block, self._requests = block, []
        is_steady = block.condition is Condition.STEADY
        times_s = (0.0,) * block.num_requests
        if is_steady:
            times_s = self._settings.arrivals_s(block.repeat)
        num_users = 1 if block.condition is Condition.ALONE else len(times_s)
        self._due = enumerate(started + at_s if is_steady else 0.0 for at_s in times_s)
        # All users at once: `start` would add a second to every block.
        self._runner.spawn_users({_BlockUser.__name__: num_users}, wait=True)
        for failure in self._runner.exceptions.values():
            raise MeasurementError(f"{failure['msg']}\n{failure['traceback']}")
        codes = {request.code for request in self._requests}
        if "OK" not in codes and not codes <= set(_EXPECTED_CODES):
            raise MeasurementError(f"the service returns {', '.join(sorted(codes))}")
        requests = sorted(self._requests, key=lambda request: request.number)
        if not is_steady:
            return Measured(block, tuple(requests), time.perf_counter() - started)
        num_early = sum(at_s < self._settings.patience_s for at_s in times_s)
        return Measured(block, tuple(requests[num_early:]), self._settings.window_s)

    def _send(self, index: int, due: float) -> Request:
        block, settings = self._block, self._settings
        number = block.repeat * REPEAT_NUMBERS + index
        late_s = max(0.0, time.perf_counter() - due)
        options = Options(
            n=block.n,
            alpha=settings.alpha,
            algorithm=block.algorithm,
            max_tokens=settings.max_tokens,
            seed=number + 1,
            cache=CacheControl.BYPASS,
        )
        # Not a deadline, which would make the service hurry its cuts.
        patience_s = settings.patience_s if block.condition is Condition.STEADY else math.inf
        outcome = Outcome(GAVE_UP, 0.0)
        with gevent.Timeout(patience_s - late_s if math.isfinite(patience_s) else None, False):
            prompt = settings.prompt(block.repeat, index)
            outcome = self._caller.stream(prompt, due, **options)
        seconds = time.perf_counter() - due
        first_round_s = outcome.rounds[0].seconds if outcome.rounds else 0.0
        return Request(
            number, outcome.code, late_s, seconds, first_round_s, outcome.tokens, outcome.reward
        )

    def _wait_until_idle(self) -> None:
        """Cancelled requests may still run for a moment."""
        ends = time.perf_counter() + _DRAIN_S
        while (service := self._caller.describe()).running or service.queued:
            if time.perf_counter() > ends:
                raise MeasurementError(f"the service is still busy after {_DRAIN_S:g} s")
            gevent.sleep(_POLL_S)
