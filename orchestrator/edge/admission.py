"""A bounded number of requests run, a bounded number wait, the rest are refused at once.

Fair between tenants by candidate-tokens: candidates times the tokens that each may grow to. The
next to run is of the tenant that was served least; within a tenant, the first to arrive. Standard
library and the exception tree only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specrej.errors import Overloaded, TooLate

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_UNKNOWN_SERVICE_S = 1.0
_RECENT = 0.1  # weight of the latest request in the service time per token


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits; 0 candidate-tokens: no limit.

    `max_queued_tokens` are the candidate-tokens that wait; `tenant_tokens` are those of one tenant
    that run and wait.
    """

    max_running: int
    max_queued: int
    max_queued_tokens: int = 0
    tenant_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0:
            raise ValueError(
                f"max_running {self.max_running} < 1 or max_queued {self.max_queued} < 0"
            )


@dataclass(slots=True)
class _Tenant:
    """Candidate-tokens of one tenant: `served` so far, and `held` by requests here now."""

    served: float = 0.0
    held: int = 0


@dataclass(eq=False, slots=True)
class _Waiter:
    tenant: _Tenant
    tokens: int
    permit: asyncio.Future[None]


class Admission:
    """Permits for `max_running` requests, and a queue of at most `max_queued`.

    Invariant: a request waits only while all permits are held. A returned permit goes straight to
    the next in the queue, so that no newcomer can take it and no cancellation can lose it.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.running = 0
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._queue: dict[_Waiter, None] = {}  # in the order of arrival
        self._served = 0.0  # of the tenant that was served last
        # Exponential averages: seconds that permits were held, for that many candidate-tokens.
        self._recent_s = self._recent_tokens = 0.0

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return len(self._waiting())

    @property
    def queued_tokens(self) -> int:
        """Candidate-tokens of the requests that wait."""
        return sum(waiter.tokens for waiter in self._waiting())

    def _waiting(self) -> list[_Waiter]:
        # Gauges call this from other threads: dict.copy() is atomic, iterating is not.
        return [waiter for waiter in self._queue.copy() if not waiter.permit.done()]

    @asynccontextmanager
    async def enter(
        self, tenant: str = "", tokens: int = 1, time_left_s: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for a permit and hold it while the context lasts.

        `tokens`: the request's candidate-tokens; `time_left_s`: to its deadline.

        Raises:
            Overloaded: the queue is full, or the tenant's limit is reached; carries a delay.
            TooLate: the expected wait is longer than the time left.
        """
        own = self._tenants.setdefault(tenant, _Tenant())
        try:
            self._check(own, tokens, time_left_s)
            own.held += tokens
            try:
                await self._acquire(own, tokens)
                began = self._clock()
                try:
                    yield
                finally:
                    self._note(tokens, self._clock() - began)
                    self._release()
            finally:
                own.held -= tokens
        finally:
            self._drop_idle_tenants()

    def _check(self, own: _Tenant, tokens: int, time_left_s: float | None) -> None:
        """Raises Overloaded unless this request may run or wait."""
        limits, queued, waiting_tokens = self._limits, self.queued, self.queued_tokens
        excess = own.held + tokens - limits.tenant_tokens
        if limits.tenant_tokens and own.held and excess > 0:
            text = f"{own.held} candidate-tokens of {limits.tenant_tokens} are under way"
            raise Overloaded(text, retry_after_s=_bounded(self._wait_s(excess, 1)))
        if self.running < limits.max_running:
            return
        wait_s = self._wait_s(waiting_tokens + tokens, queued + 1)
        kind = Overloaded
        if queued >= limits.max_queued:
            text = f"{self.running} requests run and {queued} wait"
        elif (
            limits.max_queued_tokens
            and queued
            and (waiting_tokens + tokens > limits.max_queued_tokens)
        ):
            text = f"{waiting_tokens} candidate-tokens wait"
        elif time_left_s is not None and self._recent_tokens and wait_s > time_left_s:
            text = f"the wait is about {wait_s:.1f} s, the deadline is in {time_left_s:.1f} s"
            kind = TooLate
        else:
            return
        raise kind(text, retry_after_s=_bounded(wait_s))

    def _note(self, tokens: int, service_s: float) -> None:
        """A request of so many candidate-tokens has held a permit for `service_s` seconds."""
        self._recent_s = (1 - _RECENT) * self._recent_s + service_s
        self._recent_tokens = (1 - _RECENT) * self._recent_tokens + tokens

    def _wait_s(self, tokens: int, requests: int) -> float:
        """Expected seconds until so many candidate-tokens, of so many requests, are served."""
        if not self._recent_tokens:
            return _UNKNOWN_SERVICE_S * requests / self._limits.max_running
        return tokens * self._recent_s / self._recent_tokens / self._limits.max_running

    async def _acquire(self, own: _Tenant, tokens: int) -> None:
        if self.running < self._limits.max_running:
            self.running += 1
            self._serve(own, tokens)
            return
        waiter = _Waiter(own, tokens, asyncio.get_running_loop().create_future())
        self._queue[waiter] = None
        try:
            await waiter.permit
        except asyncio.CancelledError:
            if not waiter.permit.cancelled():  # cancelled between getting the permit and waking
                self._release()
            raise
        finally:
            del self._queue[waiter]

    def _release(self) -> None:
        """Give the permit to the next in the queue."""
        if waiting := self._waiting():
            chosen = min(waiting, key=lambda waiter: waiter.tenant.served)
            self._serve(chosen.tenant, chosen.tokens)
            chosen.permit.set_result(None)
        else:
            self.running -= 1

    def _serve(self, tenant: _Tenant, tokens: int) -> None:
        """Start-time fair queueing: a tenant that was away gets no credit for that time."""
        self._served = max(self._served, tenant.served)
        tenant.served = max(tenant.served, self._served) + tokens

    def _drop_idle_tenants(self) -> None:
        """Drop tenants without requests here, but while others wait keep those served more.

        Otherwise a tenant that sends one request after another would always be served least.
        """
        is_contended = bool(self.queued)
        for name, tenant in [*self._tenants.items()]:
            is_ahead = is_contended and tenant.served > self._served
            if not (tenant.held or is_ahead):
                del self._tenants[name]


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
