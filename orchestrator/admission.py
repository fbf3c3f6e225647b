"""A bounded number of requests run, a bounded number wait in line, the rest are refused at once.

Fair between tenants, by what they ask for: candidate-tokens, that is candidates times the tokens
each may grow to. Of those that wait, the next is of the tenant that was served least; within a
tenant it is first come, first served. Standard library and the exception tree only; knows no
request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specrej.errors import Overloaded, TooLate

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_UNKNOWN_SERVICE_S = 1.0
_RECENT = 0.1  # weight of the latest request in the drain rate


@dataclass(frozen=True, slots=True)
class Limits:
    """Most requests that run and that wait, most candidate-tokens that wait, and most of one tenant
    that run and wait together; 0 candidate-tokens: no limit."""

    max_running: int
    max_queued: int
    max_queued_tokens: int = 0
    tenant_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0:
            raise ValueError(
                f"max_running {self.max_running} < 1 or max_queued {self.max_queued} < 0"
            )


@dataclass(eq=False, slots=True)
class _Place:
    """Somebody in line."""

    tokens: int
    permit: asyncio.Future[None]


@dataclass(slots=True)
class _Tenant:
    """`served`: its candidate-tokens so far, in fair shares with the others; `held`: those that run
    and wait now."""

    served: float = 0.0
    held: int = 0
    line: deque[_Place] = field(default_factory=deque)


class Admission:
    """Permits for `max_running` requests, and places in line for `max_queued` more.

    Invariant: somebody waits only while all permits are held. A permit given back goes straight
    to the next in line, so that no newcomer can take it and no cancellation can lose it.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self.running = 0
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._waits: dict[_Place, None] = {}  # of all tenants
        self._served = 0.0  # of the tenant that was let in last
        self._drain = _DrainRate()

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return len(self._waiting())

    @property
    def queued_tokens(self) -> int:
        """Candidate-tokens of those that wait."""
        return sum(place.tokens for place in self._waiting())

    def _waiting(self) -> list[_Place]:
        # Other threads read gauges: to them dict.copy() is one step, iterating is not.
        return [place for place in self._waits.copy() if not place.permit.done()]

    @asynccontextmanager
    async def enter(
        self, tenant: str = "", tokens: int = 1, time_left_s: float | None = None
    ) -> AsyncIterator[None]:
        """Hold a permit; waits for it in line. Leaving the context, however, gives it back.

        `tokens`: candidate-tokens asked for; `time_left_s`: who would wait longer is refused.

        Raises:
            Overloaded: the line is full, the tenant asks for too much at once, or the wait is
                longer than the time left; after `retry_after_s` seconds it should be otherwise.
        """
        asking = self._tenants.setdefault(tenant, _Tenant())
        try:
            self._check(asking, tokens, time_left_s)
            asking.held += tokens
            try:
                await self._acquire(asking, tokens)
                began = self._clock()
                try:
                    yield
                finally:
                    self._drain.note(tokens, self._clock() - began)
                    self._release()
            finally:
                asking.held -= tokens
        finally:
            self._forget()

    def _check(self, asking: _Tenant, tokens: int, time_left_s: float | None) -> None:
        """Raises Overloaded unless this may run or wait; TooLate: with more time it might."""
        limits, queued, waiting_tokens = self._limits, self.queued, self.queued_tokens
        beyond = asking.held + tokens - limits.tenant_tokens
        if limits.tenant_tokens and asking.held and beyond > 0:
            text = f"{asking.held} candidate-tokens of {limits.tenant_tokens} are under way"
            raise Overloaded(text, retry_after_s=_bounded(self._wait_s(beyond, 1)))
        if self.running < limits.max_running:
            return
        wait_s = self._wait_s(waiting_tokens + tokens, queued + 1)
        room = limits.max_queued_tokens - waiting_tokens
        kind = Overloaded
        if queued >= limits.max_queued:
            text = f"{self.running} requests run and {queued} wait"
        elif limits.max_queued_tokens and queued and tokens > room:
            text = f"{waiting_tokens} candidate-tokens wait"
        elif time_left_s is not None and self._drain.is_known and wait_s > time_left_s:
            text = f"the wait is about {wait_s:.1f} s, the deadline is in {time_left_s:.1f} s"
            kind = TooLate
        else:
            return
        raise kind(text, retry_after_s=_bounded(wait_s))

    def _wait_s(self, tokens: int, requests: int) -> float:
        """Seconds until so many candidate-tokens, of so many requests, have left."""
        known = self._drain.seconds(tokens, self._limits.max_running)
        return _UNKNOWN_SERVICE_S * requests / self._limits.max_running if known is None else known

    async def _acquire(self, asking: _Tenant, tokens: int) -> None:
        if self.running < self._limits.max_running:
            self.running += 1
            self._serve(asking, tokens)
            return
        place = _Place(tokens, asyncio.get_running_loop().create_future())
        asking.line.append(place)
        self._waits[place] = None
        try:
            await place.permit
        except asyncio.CancelledError:
            if place.permit.cancelled():
                self._leave(asking, place)
            else:  # cancelled between getting the permit and waking up
                self._release()
            raise
        finally:
            del self._waits[place]

    def _release(self) -> None:
        while waiting := [tenant for tenant in self._tenants.values() if tenant.line]:
            chosen = min(waiting, key=lambda tenant: tenant.served)
            place = chosen.line.popleft()
            if not place.permit.done():
                self._serve(chosen, place.tokens)
                place.permit.set_result(None)
                return
        self.running -= 1

    def _serve(self, tenant: _Tenant, tokens: int) -> None:
        """Start-time fair queueing: who was away does not catch up at the others' expense."""
        self._served = max(self._served, tenant.served)
        tenant.served = max(tenant.served, self._served) + tokens

    def _forget(self) -> None:
        """Tenants with nothing here that would begin where the others are, if they came again.

        One that was served more is remembered while others wait: else who asks again as soon as it
        has an answer would always be the one that was served least.
        """
        is_contended = bool(self.queued)
        for name, tenant in [*self._tenants.items()]:
            is_ahead = is_contended and tenant.served > self._served
            if not (tenant.held or tenant.line or is_ahead):
                del self._tenants[name]

    def _leave(self, asking: _Tenant, place: _Place) -> None:
        if place in asking.line:  # a release may have passed over it already
            asking.line.remove(place)


class _DrainRate:
    """How fast candidate-tokens leave: seconds that a permit was held per token, lately."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def is_known(self) -> bool:
        return self._tokens > 0

    def note(self, tokens: int, service_s: float) -> None:
        """A request for so many has left. Older ones count less and less."""
        self._seconds = (1 - _RECENT) * self._seconds + service_s
        self._tokens = (1 - _RECENT) * self._tokens + tokens

    def seconds(self, tokens: float, num_running: int) -> float | None:
        """Until so many have left, at this number of permits; None while none ever has."""
        return tokens * self._seconds / self._tokens / num_running if self._tokens else None


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
