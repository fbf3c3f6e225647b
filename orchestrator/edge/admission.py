"""Admits a bounded number of requests, queues a bounded number, and refuses the rest at once.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) shares candidate-tokens (candidates times
the tokens that each may grow to) between tenants. A request's start is the end of its tenant's
request before, or the current virtual time if that is later. The request with the least start runs
next. Virtual time, in candidate-tokens per weight, is the start of the request that ran last. It
advances at least as fast as if all tenants that run or wait were served at once: otherwise new
tenants that never stop arriving would delay a waiting one for ever.

While others hold all ordinary permits, a tenant that runs nothing can take a spare one: otherwise
it would wait for one of their requests to end, however small its share. Spare permits do not move
virtual time, and go to the tenant that has waited for longest while it ran nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from specrej.contracts.errors import Overloaded, TooLate
from specrej.security import Share

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_UNKNOWN_SERVICE_S = 1.0
_RECENT = 0.1  # weight of the latest request in the service time per token
_MIN_KEPT = 64  # tenants and heap entries up to which nothing is dropped


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits; 0 candidate-tokens: no limit.

    `max_running` requests run, plus `spare_running`, each of a tenant with no other running one.
    `max_queued` requests with `max_queued_tokens` candidate-tokens in all wait; both limits are
    divided equally among the tenants that wait. `tenant_tokens` bounds the candidate-tokens that
    one tenant has running and waiting, unless its share has a limit.
    """

    max_running: int
    max_queued: int
    max_queued_tokens: int = 0
    tenant_tokens: int = 0
    spare_running: int = 0


@dataclass(eq=False, slots=True)
class _Waiter:
    tokens: int
    permit: asyncio.Future[bool]  # whether it is a spare one


@dataclass(eq=False, slots=True)
class _Tenant:
    """One tenant: candidate-tokens `held` by its requests here, and the part of them `waiting`.

    `running` is the number of its permits. `start` is the virtual start of the first request in its
    line, `finish` the virtual end of the last one that ran. `entry` is the number of its valid
    entry in the heap. `waits_since` orders tenants that run nothing: by when they began to wait so.
    """

    weight: float = 1.0
    held: int = 0
    running: int = 0
    waiting: int = 0
    start: float = 0.0
    finish: float = 0.0
    entry: int = 0
    waits_since: int = 0
    line: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)


class Admission:
    """Permits for `max_running` requests and a few spare ones, and lines of `max_queued` in all.

    Invariant: a request waits only while all permits that it may have are held. A returned permit
    goes straight to the next in line, so that no newcomer can take it and no cancellation can lose
    it.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self.running = 0
        self._running_tokens = 0  # their candidate-tokens
        self._num_spare = 0  # requests that run on a spare permit
        self.queued = 0  # requests that wait for a permit
        self.queued_tokens = 0  # their candidate-tokens
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._collect_above = _MIN_KEPT  # tenants and entries
        # The tenants with a line, the least start first; also old entries, which are skipped.
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._entries = itertools.count(1)
        self._num_lines = 0
        self._num_holding = 0  # tenants that run or wait
        self._weights = 0.0  # theirs
        self._virtual = 0.0
        self._passing = 0.0  # virtual time that passes while the latest request is served
        self._latest = 0.0  # of all finishes
        # Exponential averages: seconds that permits were held, for that many candidate-tokens.
        self._recent_s = self._recent_tokens = 0.0

    @asynccontextmanager
    async def enter(
        self,
        tenant: str = "",
        tokens: int = 1,
        time_left_s: float | None = None,
        share: Share | None = None,
    ) -> AsyncIterator[None]:
        """Wait for a permit and hold it while the context lasts.

        `tokens`: the request's candidate-tokens; `time_left_s`: to its deadline; `share`: the
        tenant's, as of now.

        Raises:
            Overloaded: the tenant's part of the line is full, or its limit is reached; carries a
                delay. Also while waiting, if a tenant with a shorter line needs the place.
            TooLate: the expected wait is longer than the time left.
        """
        share, own = share or Share(), self._tenants.setdefault(tenant, _Tenant())
        if own.held:
            self._weights += share.weight - own.weight
        own.weight = share.weight
        try:
            self._check(own, tokens, time_left_s, share)
            if not own.held:
                self._num_holding += 1
                self._weights += own.weight
            own.held += tokens
            try:
                is_spare = await self._acquire(own, tokens)
                began, has_failed = self._clock(), True
                self._running_tokens += tokens
                try:
                    yield
                    has_failed = False
                finally:
                    self._note(tokens, self._clock() - began, has_failed=has_failed)
                    self._running_tokens -= tokens
                    self._release(own, is_spare)
            finally:
                own.held -= tokens
                if not own.held:
                    self._num_holding -= 1
                    self._weights = self._weights - own.weight if self._num_holding else 0.0
        finally:
            self._collect()

    def heaviest(self, num_tenants: int) -> list[tuple[str, int]]:
        """The tenants with the most candidate-tokens that run and wait; from any thread."""
        held = [(name, tenant.held) for name, tenant in [*self._tenants.items()] if tenant.held]
        return heapq.nlargest(num_tenants, held, key=lambda pair: pair[1])

    def _check(self, own: _Tenant, tokens: int, time_left_s: float | None, share: Share) -> None:
        """Raises Overloaded unless this request may run or wait."""
        limits = self._limits
        limit = limits.tenant_tokens if share.tokens is None else share.tokens
        excess = own.held + tokens - limit
        if limit and own.held and excess > 0:
            text = f"{own.held} candidate-tokens of {limit} are under way"
            raise Overloaded(text, retry_after_s=_bounded(self._wait_s(excess, 1)))
        if self._may_run(own):
            return
        num_lines = self._num_lines + (not own.line)
        is_full = self.queued >= limits.max_queued
        if is_full and (len(own.line) + 1) * num_lines > limits.max_queued:
            text = f"{self.running} requests run and {self.queued} wait"
        elif (
            limits.max_queued_tokens
            and own.line
            and (own.waiting + tokens) * num_lines > limits.max_queued_tokens
        ):
            text = f"{own.waiting} candidate-tokens wait"
        else:
            self._check_time(own, time_left_s)
            return
        raise Overloaded(text, retry_after_s=_bounded(self._fair_wait_s(own)))

    def _check_time(self, own: _Tenant, time_left_s: float | None) -> None:
        """Raises TooLate if the expected wait is longer than the time left."""
        if time_left_s is None or not self._recent_tokens:
            return
        ahead = self.queued_tokens + self._mean_running_tokens
        if self._wait_s(ahead, self.queued + 1) <= time_left_s:
            return  # even behind all others
        wait_s = self._fair_wait_s(own)
        if wait_s > time_left_s:
            text = f"the wait is about {wait_s:.1f} s, the deadline is in {time_left_s:.1f} s"
            raise TooLate(text, retry_after_s=_bounded(wait_s))

    def _note(self, tokens: int, service_s: float, *, has_failed: bool) -> None:
        """A request of so many candidate-tokens has held a permit for `service_s` seconds. Many
        that fail at once, while a backend is away, do not make the estimate shorter."""
        if has_failed and service_s * self._recent_tokens <= tokens * self._recent_s:
            return
        self._recent_s = (1 - _RECENT) * self._recent_s + service_s
        self._recent_tokens = (1 - _RECENT) * self._recent_tokens + tokens

    @property
    def _mean_running_tokens(self) -> float:
        return self._running_tokens / max(1, self.running)

    def _wait_s(self, tokens: float, requests: int) -> float:
        """Expected seconds until so many candidate-tokens, of so many requests, are served."""
        if not self._recent_tokens:
            return _UNKNOWN_SERVICE_S * requests / self._limits.max_running
        return tokens * self._recent_s / self._recent_tokens / self._limits.max_running

    def _fair_wait_s(self, own: _Tenant) -> float:
        """Expected seconds until one more request of the tenant can run, in the fair order: until a
        running request ends, and the requests ahead are served."""
        start = max(own.finish, self._virtual)
        if own.line:
            start = own.start + own.waiting / own.weight
        tokens, requests = self._mean_running_tokens, 1
        for tenant in self._with_lines():
            before = tenant.start
            for waiter in tenant.line:
                if before > start:
                    break
                tokens, requests = tokens + waiter.tokens, requests + 1
                before += waiter.tokens / tenant.weight
        return self._wait_s(tokens, requests)

    def _may_run(self, own: _Tenant) -> bool:
        """A permit is free that the tenant may have."""
        return self._has_ordinary() or self._has_spare(own)

    def _has_ordinary(self) -> bool:
        return self.running - self._num_spare < self._limits.max_running

    def _has_spare(self, own: _Tenant) -> bool:
        return not own.running and self._num_spare < self._limits.spare_running

    async def _acquire(self, own: _Tenant, tokens: int) -> bool:
        """Wait for a permit; return whether it is a spare one."""
        if self._may_run(own):
            if self._num_lines:  # otherwise not charged: no other request waits
                self._charge(own, max(own.finish, self._virtual), tokens)
            return self._take(own)
        if self.queued >= self._limits.max_queued:
            self._evict()
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._line_up(own, waiter)
        try:
            return await waiter.permit
        except asyncio.CancelledError:
            permit = waiter.permit
            if permit.done() and not (permit.cancelled() or permit.exception()):
                self._release(own, permit.result())  # cancelled before it resumed
            raise
        finally:
            self._leave(own, waiter)

    def _line_up(self, tenant: _Tenant, waiter: _Waiter) -> None:
        if not tenant.line:
            self._num_lines += 1
            tenant.waits_since = next(self._entries)
            self._begin(tenant, max(tenant.finish, self._virtual))
        tenant.line[waiter] = None
        tenant.waiting += waiter.tokens
        self.queued += 1
        self.queued_tokens += waiter.tokens

    def _leave(self, tenant: _Tenant, waiter: _Waiter) -> None:
        """Take a request out of its tenant's line; does nothing if it has left."""
        if waiter not in tenant.line:
            return
        del tenant.line[waiter]
        tenant.waiting -= waiter.tokens
        self.queued -= 1
        self.queued_tokens -= waiter.tokens
        if not tenant.line:
            self._num_lines -= 1

    def _take(self, tenant: _Tenant) -> bool:
        """Take a permit that is free; whether it is a spare one."""
        is_spare = not self._has_ordinary()
        self.running += 1
        self._num_spare += is_spare
        tenant.running += 1
        return is_spare

    def _release(self, owner: _Tenant, is_spare: bool) -> None:
        """Take the owner's permit back and give it, or a spare one, to the next in line."""
        self.running -= 1
        self._num_spare -= is_spare
        owner.running -= 1
        owner.waits_since = next(self._entries)
        while tenant := self._next():
            waiter = next(iter(tenant.line))
            start = tenant.start
            self._leave(tenant, waiter)
            if waiter.permit.done():
                continue  # cancelled, and has not resumed yet
            if self._has_ordinary():  # a spare permit is outside of the order
                self._virtual = max(self._virtual + self._passing, start)
                self._passing = waiter.tokens / self._weights
            self._charge(tenant, start, waiter.tokens)
            if tenant.line:
                self._begin(tenant, tenant.finish)
            waiter.permit.set_result(self._take(tenant))
        if self._has_ordinary():
            self._virtual, self._passing = self._latest, 0.0  # all tenants are equal again

    def _next(self) -> _Tenant | None:
        """The tenant whose request is next; None: no tenant with a line may have a permit."""
        if not self._has_ordinary():
            may_run = (tenant for tenant in self._with_lines() if self._has_spare(tenant))
            return min(may_run, key=lambda tenant: tenant.waits_since, default=None)
        while self._heap:
            _, entry, tenant = self._heap[0]
            if entry == tenant.entry and tenant.line:
                return tenant
            heapq.heappop(self._heap)
        return None

    def _charge(self, tenant: _Tenant, start: float, tokens: int) -> None:
        """A request of so many candidate-tokens begins, at this start in virtual time."""
        tenant.finish = start + tokens / tenant.weight
        self._latest = max(self._latest, tenant.finish)

    def _begin(self, tenant: _Tenant, start: float) -> None:
        """Set the start of the first request in the tenant's line."""
        tenant.start, tenant.entry = start, next(self._entries)
        heapq.heappush(self._heap, (start, tenant.entry, tenant))

    def _with_lines(self) -> Iterator[_Tenant]:
        return (t for _, entry, t in self._heap if t.line and t.entry == entry)

    def _evict(self) -> None:
        """Refuse the last request of the longest line."""
        tenant = max(self._with_lines(), key=lambda tenant: len(tenant.line))
        waiter = next(reversed(tenant.line))
        self._leave(tenant, waiter)
        if not waiter.permit.done():
            text = f"{self.running} requests run and a tenant with fewer waiting took the place"
            wait_s = _bounded(self._fair_wait_s(tenant))
            waiter.permit.set_exception(Overloaded(text, retry_after_s=wait_s))

    def _collect(self) -> None:
        """Drop tenants without requests here and without debt, and old entries of the heap.

        Runs when both have doubled, so its cost per request is constant.
        """
        if len(self._tenants) + len(self._heap) <= self._collect_above:
            return
        for name, tenant in [*self._tenants.items()]:
            if not tenant.held and tenant.finish <= self._virtual:
                del self._tenants[name]
        self._heap = [(t.start, t.entry, t) for t in self._with_lines()]
        heapq.heapify(self._heap)
        self._collect_above = 2 * (len(self._tenants) + len(self._heap)) + _MIN_KEPT


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
