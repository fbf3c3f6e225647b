"""All backends of one kind: discovered by name, watched, and given up when they are silent.

New sessions go to every backend that serves, whatever its version: during a rollout several do.
This module does not depend on sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio

from orchestrator.backends.resolving import Target
from specrej.contracts import errors
from specrej.contracts.status import is_answer
from specrej.threads import ended

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of backends: "other_version" serves, too, but another version than most.
_STATES = ("serving", "other_version", "away")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Seconds between reports, between lookups of names, and of silence until a backend is lost."""

    report_s: float
    resolve_s: float
    lost_s: float


class Peer(Protocol):
    """The client of a backend."""

    def watch(self, interval_s: float) -> AsyncIterator[Any]:
        """Descriptions while it serves; None: as the one before. Raises SpecrejError: it does not
        serve, or cannot be reached."""


P = TypeVar("P", bound=Peer)


class Backend(Generic[P]):
    """One backend and its last known state.

    `version`: equal in backends that can replace each other; None before the first description.
    `running`: sessions opened here that have not ended. `placed`: those that the latest report may
    lack.
    """

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], tuple[grpc.aio.Channel, P]],
        version: Callable[[Any], object],
        changed: Callable[[Backend[P]], None] = lambda _: None,
    ) -> None:
        """`version` is computed from a description; `changed` is called when it or `is_serving`
        has changed."""
        self.target = target
        self.description: Any = None
        self.version: object = None
        self.is_serving = False
        self.failure: errors.SpecrejError = errors.Unavailable("a backend has not answered yet")
        self.running = self.placed = 0
        self.heard = asyncio.Event()  # set after the first report, or without one in time
        self._version_of = version
        self._changed = changed
        # Of calls that wait for this backend, in their order.
        self._timeouts: dict[asyncio.Timeout, None] = {}
        self._answered = 0.0  # the latest report or end of a session's call, by the loop's clock
        self._num_entered = 0  # sessions that the next report includes
        self._is_closed = False
        self._channel, self.peer = connect(target)

    @property
    def is_lost(self) -> bool:
        """Whether it answered once and cannot be reached now."""
        cause = self.failure.__cause__
        is_unreachable = isinstance(cause, grpc.aio.AioRpcError) and not is_answer(self.failure)
        return bool(self.description) and is_unreachable and not self.is_serving

    async def follow(self, report_s: float, lost_s: float) -> None:
        """Take its reports, one in `report_s` seconds, until they end.

        After `lost_s / 4` seconds more without a report or an answer to a session's call, it gets
        no new sessions; after `lost_s`, all calls that wait for it fail.
        """
        clock = asyncio.get_running_loop().time
        self._answered = clock()
        reading = asyncio.ensure_future(self._take_all(self.peer.watch(report_s)))
        try:
            while not (await asyncio.wait({reading}, timeout=lost_s / 8))[0]:
                late_s = clock() - self._answered - report_s
                if late_s > lost_s:
                    self._give_up()
                    break
                if late_s > lost_s / 4:
                    self.suspect(errors.Unavailable("a backend does not answer"))
        finally:
            await ended(reading)
            self.heard.set()

    async def _take_all(self, reports: AsyncIterator[Any]) -> None:
        try:
            async for description in reports:
                self.take(description)
        except errors.SpecrejError as failure:
            self.suspect(failure)
        except Exception:
            # A bug in the description of one backend must not end its reports.
            log.exception("a backend's description cannot be read")
            self.suspect(errors.InternalError("a backend's description cannot be read"))

    def take(self, description: Any) -> None:
        """Note a report; None: the description is as before."""
        self.description = description or self.description
        self._answered = asyncio.get_running_loop().time()
        self.placed -= self._num_entered
        self._num_entered = 0
        self._become(is_serving=True, version=self._version_of(self.description))
        self.heard.set()

    def suspect(self, failure: errors.SpecrejError) -> None:
        """Place no sessions here until the next report."""
        self.failure = failure
        self._become(is_serving=False, version=self.version)

    def _become(self, *, is_serving: bool, version: object) -> None:
        before = self.is_serving, self.version
        self.is_serving, self.version = is_serving, version
        if before != (is_serving, version):
            self._changed(self)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Bound the calls in the context: they fail when the backend is lost.

        Raises:
            Unavailable: the backend is lost or closed.
        """
        if self._is_closed:
            raise self.failure
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._timeouts[timeout] = None
                yield
            self._answered = asyncio.get_running_loop().time()
        except TimeoutError:
            if timeout.expired():
                raise self.failure from None
            raise
        except errors.Unavailable as failure:
            # If the backend sent this error itself, reports decide: only one reward may be down.
            if not is_answer(failure):
                self.suspect(failure)
            raise
        finally:
            self._timeouts.pop(timeout, None)

    @asynccontextmanager
    async def holding(self, opening: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """A session here, counted.

        Raises:
            Unavailable: the backend is lost while the session opens.
        """
        self.placed += 1
        self.running += 1
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with self.answering():
                        session = await stack.enter_async_context(opening)
                finally:
                    self._num_entered += 1
                yield session
                # The session's work is done: a failure to close it concerns no caller.
                with suppress(errors.SpecrejError):
                    async with self.answering():
                        await stack.aclose()
        finally:
            self.running -= 1

    async def close(self) -> None:
        """Fail all calls that wait for this backend, and close its channel."""
        self._is_closed = True
        self._give_up()
        self.heard.set()
        await self._channel.close()

    def _give_up(self) -> None:
        self.suspect(errors.Unavailable("a backend has stopped answering"))
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())


def ranked(
    members: Sequence[T], load: Callable[[T], float], draw: Callable[[], float]
) -> Iterator[T]:
    """All members, the less loaded of two drawn ones first (Mitzenmacher, "The Power of Two Choices
    in Randomized Load Balancing", 2001); other loads are computed once both have failed.

    `load`: in sessions. `draw`: from [0, 1).
    """
    first = int(draw() * len(members))
    second = (first + 1 + int(draw() * (len(members) - 1))) % len(members)
    yield from sorted((members[at] for at in dict.fromkeys((first, second))), key=load)
    others = (one for at, one in enumerate(members) if at not in (first, second))
    yield from sorted(others, key=load)


@dataclass(eq=False)
class Fleet(Generic[P]):
    """The backends of one kind, watched while the context lasts."""

    _kind: str  # for logs
    _resolve: Callable[[], Awaitable[frozenset[Target]]]  # looks up the backends
    _connect: Callable[[Target], tuple[grpc.aio.Channel, P]]
    _version: Callable[[Any], object]  # equal in backends that can replace each other
    _settings: FleetSettings
    _backends: dict[Target, Backend[P]] = field(default_factory=dict)  # sorted
    _watchers: dict[Target, asyncio.Task[None]] = field(default_factory=dict)
    _members: list[Backend[P]] = field(default_factory=list)
    _usual_version: object = None  # of most members
    _combined: tuple[float, Any] = (0.0, None)  # until when, by the loop's clock
    _resolved: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._resolving = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        await ended(self._resolving)
        for target in [*self._backends]:
            await self._remove(target)

    async def wait_heard(self) -> None:
        """Return once all backends found so far have reported, or have not in time."""
        await self._resolved.wait()
        for backend in self._by_address():
            await backend.heard.wait()

    def members(self) -> list[Backend[P]]:
        """Backends that serve, by address."""
        return self._members

    def combined(self, combine: Callable[[list[Any]], T]) -> T:
        """`combine` of the members' descriptions, those of the most frequent version first; kept
        until members change, at most for `report_s`.

        Raises:
            SpecrejError: no backend serves.
        """
        if not self._members:
            raise self._failure()
        now = asyncio.get_running_loop().time()
        if now >= self._combined[0]:
            ordered = sorted(self._members, key=lambda b: b.version != self._usual_version)
            combined = combine([backend.description for backend in ordered])
            self._combined = now + self._settings.report_s, combined
        result: T = self._combined[1]
        return result

    def ranked(
        self, load: Callable[[Backend[P]], float], draw: Callable[[], float]
    ) -> Iterable[Backend[P]]:
        """Members in the order of `ranked`; if there are none, all that do not serve."""
        return ranked(self._members, load, draw) if self._members else self._by_address()

    async def first(
        self, ranked: Iterable[Backend[P]], enter: Callable[[Backend[P]], Awaitable[T]]
    ) -> T:
        """The result of `enter` for the first backend that is available and has room.

        Raises:
            Overloaded, Unavailable: no backend is available and has room.
            InvalidRequest, NotFound: all available ones refuse, for instance as each is too small.
        """
        failure: errors.SpecrejError | None = None
        refusal: errors.SpecrejError | None = None
        for backend in ranked:
            try:
                return await enter(backend)
            except (errors.InvalidRequest, errors.NotFound) as error:
                refusal = refusal or error
            except errors.Unavailable as error:
                failure = failure or error
            except errors.Overloaded as error:
                failure = error
        raise failure or refusal or self._failure()

    def counts(self) -> dict[str, int]:
        """Number of backends by state, for gauges; may be called from any thread."""
        counts = dict.fromkeys(_STATES, 0)
        for backend in self._by_address():
            is_usual = backend.version == self._usual_version
            serving = "serving" if is_usual else "other_version"
            counts[serving if backend.is_serving else "away"] += 1
        return counts

    def _failure(self) -> errors.SpecrejError:
        """The reason why no backend serves."""
        none = errors.Unavailable(f"there is no {self._kind}")
        return next((backend.failure for backend in self._by_address()), none)

    def _by_address(self) -> list[Backend[P]]:
        return [*self._backends.values()]

    async def _follow(self) -> None:
        """Add new backends; remove those that are gone, do not serve and have no session.

        So is one that is lost, and added anew: a channel reads once a certificate that may have
        been renewed.
        """
        while True:
            try:
                targets = await self._resolve()
                for target, backend in sorted(self._backends.items()):
                    is_in_use = backend.is_serving or backend.running
                    if not is_in_use and (backend.is_lost or target not in targets):
                        await self._remove(target)
                for target in sorted(targets - self._backends.keys()):
                    self._add(target)
                self._backends = dict(sorted(self._backends.items()))
            except Exception:
                # For instance a certificate file that does not exist yet.
                log.exception("cannot resolve or connect to every %s", self._kind)
            self._resolved.set()
            await asyncio.sleep(self._settings.resolve_s)

    async def _watch(self, backend: Backend[P]) -> None:
        while True:
            await backend.follow(self._settings.report_s, self._settings.lost_s)
            await asyncio.sleep(self._settings.report_s)

    def _regroup(self, changed: Backend[P]) -> None:
        if changed.target in self._backends:  # else it was removed
            state = "serves" if changed.is_serving else f"does not serve: {changed.failure}"
            log.info("%s at %s %s", self._kind, changed.target.address, state)
        self._members = [backend for backend in self._by_address() if backend.is_serving]
        versions = Counter(member.version for member in self._members).most_common(1)
        self._usual_version = versions[0][0] if versions else None
        self._combined = 0.0, None

    def _add(self, target: Target) -> None:
        backend = Backend(target, self._connect, self._version, self._regroup)
        self._backends[target] = backend
        self._watchers[target] = asyncio.ensure_future(self._watch(backend))

    async def _remove(self, target: Target) -> None:
        backend = self._backends.pop(target)
        try:
            await ended(self._watchers.pop(target))
        finally:
            await backend.close()
