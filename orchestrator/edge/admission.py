"""Admits a bounded number of requests, queues a bounded number, and refuses the rest at once.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) shares candidate-tokens (candidates times
the tokens that each may grow to) between tenants. A request's start is the end of its tenant's
request before, or the current virtual time if that is later. The request with the least start runs
next. Virtual time, in candidate-tokens per weight, is the start of the request that ran last.

Tenants that have had no permit yet have one tenant's share together: the first request of each
starts at the end of the one before. So a caller that names a new tenant in each call gains nothing.
Tenants that come again start at the current virtual time and could delay a waiting tenant for ever:
at most `MOST_PASSED` requests of tenants that came later run before it.

A tenant that has no running request need not wait for one of another tenant to end: a quarter more
permits than the limit, rounded down, are for such tenants. Those that wait lose nothing by them: a
permit within the limit that is returned is theirs while requests beyond it run. They are charged,
too, and a tenant that was served an average running request more than the others, in tokens and in
seconds, waits. Seconds count because a slow reward holds permits for few tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specrej.contracts.errors import Overloaded, TooLate

MOST_PASSED = 12
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0
_UNKNOWN_SERVICE_S = 1.0
_RECENT = 0.1  # weight of the latest request in the service time per token
_MOST_PACES = 1024  # tenants whose service times are known


@dataclass(slots=True)
class _Pace:
    """Exponential averages: seconds that permits were held, for that many candidate-tokens."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds = (1 - _RECENT) * self.seconds + seconds
        self.tokens = (1 - _RECENT) * self.tokens + tokens


@dataclass(eq=False, slots=True)
class Permit:
    """A request that runs.

    `unused`: how many of its candidate-tokens it turned out not to need. `is_beyond`: whether it is
    one of the quarter beyond the limit; `is_first`: whether its tenant had none before, and
    others wait or may soon. `began_s` is a time of the admission's clock.
    """

    is_charged: bool
    is_beyond: bool
    is_first: bool
    began_s: float
    unused: int = 0


@dataclass(eq=False, slots=True)
class _Tenant:
    """One tenant: candidate-tokens `held` by its requests here, and its line of waiting ones.

    `running` of them have permits. `start` is the virtual start of its next request, `came` the
    number of its arrival. `passed` requests of tenants that came later got permits
    within the limit since its first in line became so at `waits_since`. `dues`: by how much the
    first request of a tenant delays those of others.
    """

    name: str
    came: int
    weight: float = 1.0
    held: int = 0
    running: int = 0
    start: float = 0.0
    waits_since: int = 0
    passed: int = 0
    dues: float = 0.0
    # The candidate-tokens of each request in line, by the permit that it waits for.
    line: OrderedDict[asyncio.Future[Permit], int] = field(default_factory=OrderedDict)


class Admission:
    """Permits for `max_running` requests, and a quarter more for tenants that have none running;
    lines of `max_queued` in all, in equal parts for the tenants that wait.

    Invariant: a request waits only while all permits within the limit are held. A returned permit
    goes straight to the next in line, so that no newcomer can take it and no cancellation can lose
    it.
    """

    def __init__(
        self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` returns seconds."""
        # Permits in all, those beyond the limit, and the first ones of tenants.
        self.running = self._beyond = self._firsts = 0
        self._running_tokens = 0  # their candidate-tokens
        self._begun_s = 0.0  # the sum of their begins
        self._max_running, self._max_queued = max_running, max_queued
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._arrivals = itertools.count(1)
        self._virtual = 0.0
        self._newest = 0.0  # the end of the last first request of a tenant
        self._pace = _Pace()  # of all tenants
        self._paces: OrderedDict[str, _Pace] = OrderedDict()  # the latest last

    @property
    def queued(self) -> int:
        """Requests that wait for a permit; from any thread."""
        return sum(len(tenant.line) for tenant in [*self._tenants.values()])

    @property
    def queued_tokens(self) -> int:
        """Their candidate-tokens."""
        return sum(tenant.held for tenant in [*self._tenants.values()]) - self._running_tokens

    @asynccontextmanager
    async def enter(
        self, tenant: str = "", tokens: int = 1, time_left_s: float = math.inf, weight: float = 1.0
    ) -> AsyncIterator[Permit]:
        """Wait for a permit and hold it while the context lasts; `time_left_s`: to the deadline.
        What is `unused` at its end is given back to the tenant.

        Raises:
            Overloaded: the tenant's part of the line is full; carries a delay. Also while waiting,
                if a tenant with a shorter line needs the place.
            TooLate: the expected wait is longer than the time left.
        """
        own = self._tenants.get(tenant) or _Tenant(tenant, next(self._arrivals))
        own.weight = weight
        self._check(own, time_left_s)
        self._tenants[tenant] = own
        own.held += tokens
        try:
            permit = await self._acquire(own, tokens)
            try:
                yield permit
            finally:
                self._note(tenant, self._clock() - permit.began_s, tokens)
                self._release(own, tokens, permit)
        finally:
            own.held -= tokens
            for name, one in [*self._tenants.items()]:
                if not one.held and one.start <= self._virtual:
                    del self._tenants[name]  # no request here and no debt

    def heaviest(self, num_tenants: int) -> list[tuple[str, int]]:
        """The tenants with the most candidate-tokens that run and wait; from any thread."""
        held = [(name, tenant.held) for name, tenant in [*self._tenants.items()] if tenant.held]
        return heapq.nlargest(num_tenants, held, key=lambda pair: pair[1])

    def _check(self, own: _Tenant, time_left_s: float) -> None:
        """Raises Overloaded or TooLate unless this request may run or wait."""
        if self._may_run(own):
            return
        num_lines, wait_s = len(self._with_lines()) + (not own.line), self._fair_wait_s(own)
        is_full = self.queued >= self._max_queued
        if is_full and (len(own.line) + 1) * num_lines > self._max_queued:
            text = f"{self.running} requests run and {self.queued} wait"
            raise Overloaded(text, retry_after_s=_bounded(wait_s))
        if self._pace.tokens and wait_s > time_left_s:
            text = f"the wait is about {wait_s:.1f} s, the deadline is in {time_left_s:.1f} s"
            raise TooLate(text, retry_after_s=_bounded(wait_s))

    def _note(self, tenant: str, seconds: float, tokens: int) -> None:
        self._pace.add(seconds, tokens)
        self._paces.setdefault(tenant, _Pace()).add(seconds, tokens)
        self._paces.move_to_end(tenant)
        if len(self._paces) > _MOST_PACES:
            self._paces.popitem(last=False)

    def _service_s(self, tenant: _Tenant | None, tokens: float) -> float:
        """Expected seconds of a permit for so many candidate-tokens, as the tenant's before took;
        None, and one that is not known: as those of all."""
        pace = (tenant and self._paces.get(tenant.name)) or self._pace
        return tokens * pace.seconds / pace.tokens if pace.tokens else _UNKNOWN_SERVICE_S

    def _fair_wait_s(self, own: _Tenant) -> float:
        """Expected seconds until a running request ends and those ahead of a new one are served."""
        start = self._start_of(own) + sum(own.line.values()) / own.weight
        seconds = self._service_s(None, self._running_tokens / max(1, self.running))
        for tenant in self._with_lines():
            before = tenant.start
            for waiting in tenant.line.values():
                if before <= start:
                    seconds += self._service_s(tenant, waiting)
                before += waiting / tenant.weight
        return seconds / self._max_running

    def _is_known(self, tenant: _Tenant) -> bool:
        """Whether a request of the tenant has had a permit."""
        return tenant.running > 0 or tenant.name in self._paces

    def _start_of(self, tenant: _Tenant) -> float:
        """Where the line of a tenant begins that has none."""
        is_first = not (tenant.line or self._is_known(tenant))
        return max(tenant.start, self._virtual, self._newest if is_first else 0.0)

    def _with_lines(self) -> list[_Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.line]

    def _may_run(self, tenant: _Tenant) -> bool:
        """Whether there is a permit for a request of this tenant."""
        most = self._max_running
        if self.running - self._beyond < most:
            return True
        has_running = tenant.running or (self._firsts and not self._is_known(tenant))
        if has_running or self._beyond >= most // 4:
            return False
        excess = (self._start_of(tenant) - self._virtual) * tenant.weight
        held_s = self._clock() - self._begun_s / self.running  # on average
        return (
            excess <= self._running_tokens / self.running
            or self._service_s(tenant, excess) < held_s
        )

    async def _acquire(self, own: _Tenant, tokens: int) -> Permit:
        if not own.line:
            own.start = self._start_of(own)
            if self._may_run(own):
                return self._grant(own, tokens, self._with_lines())
            own.waits_since, own.passed = next(self._arrivals), 0
            if not self._is_known(own):
                own.dues = tokens / own.weight
                self._newest = own.start + own.dues
        if self.queued >= self._max_queued:
            self._evict()
        permit: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        own.line[permit] = tokens
        try:
            return await permit
        except (asyncio.CancelledError, Overloaded):
            own.line.pop(permit, None)
            if permit.done() and not (permit.cancelled() or permit.exception()):
                permit.result().unused = tokens  # cancelled before it resumed
                self._release(own, tokens, permit.result())
            elif own.dues:  # of the first in line, which this one may have been
                before, own.dues = own.dues, next(iter(own.line.values()), 0) / own.weight
                self._give_back(own, before - own.dues)
                if not own.line:
                    own.start = self._virtual
            raise

    def _grant(self, tenant: _Tenant, tokens: int, lines: list[_Tenant]) -> Permit:
        """Count a permit, and charge it if there are tenants with `lines`."""
        is_beyond = self.running - self._beyond >= self._max_running
        is_first = bool(lines or is_beyond) and not self._is_known(tenant)
        if not is_beyond:
            for other in lines:
                other.passed += other.waits_since < tenant.came
            if lines:
                self._virtual = max(self._virtual, tenant.start)
        if lines:
            tenant.start += tokens / tenant.weight
            if is_first and not tenant.dues:  # it did not wait
                self._newest = tenant.start
        tenant.waits_since, tenant.passed, tenant.dues = next(self._arrivals), 0, 0.0
        tenant.running += 1
        self.running += 1
        self._beyond += is_beyond
        self._firsts += is_first
        self._running_tokens += tokens
        self._begun_s += (began_s := self._clock())
        return Permit(bool(lines), is_beyond, is_first, began_s)

    def _release(self, own: _Tenant, tokens: int, permit: Permit) -> None:
        """Return a permit and what it did not use; give those that are free to the next in line."""
        unused = min(permit.unused, tokens) / own.weight * permit.is_charged
        own.start -= unused
        if permit.is_first:
            self._give_back(own, unused)
        own.running -= 1
        self.running -= 1
        self._beyond -= permit.is_beyond
        self._firsts -= permit.is_first
        self._running_tokens -= tokens
        self._begun_s = self._begun_s - permit.began_s if self.running else 0.0
        if not self._with_lines():  # all tenants are equal again
            self._virtual = max([self._virtual, *(one.start for one in self._tenants.values())])
        while ready := [tenant for tenant in self._with_lines() if self._may_run(tenant)]:
            lines = self._with_lines()
            tenant = min(ready, key=lambda one: (one.passed < MOST_PASSED, one.start))
            waiting, tokens = tenant.line.popitem(last=False)
            if not waiting.done():  # else cancelled, and has not resumed yet
                waiting.set_result(self._grant(tenant, tokens, lines))

    def _give_back(self, own: _Tenant, dues: float) -> None:
        """Let first requests of tenants that came after `own`, which needed less, start earlier."""
        self._newest -= dues
        for one in self._tenants.values():
            if one.dues and one.came > own.came:
                one.start -= dues

    def _evict(self) -> None:
        """Refuse the last request of the longest line."""
        tenant = max(self._with_lines(), key=lambda one: len(one.line))
        permit, _ = tenant.line.popitem()
        if not permit.done():
            text = f"{self.running} requests run and a tenant with fewer waiting took the place"
            wait_s = _bounded(self._fair_wait_s(tenant))
            permit.set_exception(Overloaded(text, retry_after_s=wait_s))


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
