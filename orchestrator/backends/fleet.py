"""All backends of one kind: discovered by name, polled, and given up when they do not answer.

New sessions go only to serving backends of the most frequent version, so during a rollout the other
version gets none. This module does not depend on sessions.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.backends.placement import order
from orchestrator.backends.resolving import Target
from specrej.contracts import BackendHealth, BackendKind, BackendState
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    SpecrejError,
    Unavailable,
)
from specrej.contracts.status import from_backend_error, is_answer
from specrej.threads import ended

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PollSettings:
    """Seconds between polls, between lookups of names, and of silence until a backend is lost."""

    poll_s: float
    resolve_s: float
    lost_s: float


class Peer(Protocol):
    """The client of a backend."""

    async def describe(self) -> Any:
        """Raises SpecrejError: the backend cannot be reached."""


P = TypeVar("P", bound=Peer)


class Backend(Generic[P]):
    """One backend and its last known state.

    `version`: equal in backends that can replace each other; None before the first description.
    `running`: sessions opened here that have not ended.
    """

    def __init__(
        self,
        target: Target,
        connect: Callable[[Target], tuple[grpc.aio.Channel, P]],
        version: Callable[[Any], Hashable],
    ) -> None:
        """`version` is computed from a description."""
        self.target = target
        self.description: Any = None
        self.version: Hashable = None
        self.is_serving = False
        self.failure: SpecrejError = Unavailable("a backend has not answered yet")
        self.running = 0
        self.polled = asyncio.Event()  # set after the first poll, answered or not
        self._connect = connect
        self._version_of = version
        # Of calls that wait for this backend, in their order.
        self._timeouts: dict[asyncio.Timeout, None] = {}
        self._answered = -math.inf  # the last time a session's call ended well, by the loop's clock
        self._num_opened = 0  # sessions, ever
        self._num_described = 0  # of these, the ones that its description includes
        self._is_closed = False
        self._open()

    @property
    def is_lost(self) -> bool:
        """Whether it answered once and cannot be reached now."""
        cause = self.failure.__cause__
        is_unreachable = isinstance(cause, grpc.aio.AioRpcError) and not is_answer(self.failure)
        return self._has_answered and is_unreachable and not self.is_serving

    @property
    def placed(self) -> int:
        """Sessions opened here since the last description."""
        return self._num_opened - self._num_described

    async def poll(self, lost_s: float) -> None:
        """Update the state. After `lost_s / 4` seconds without an answer, the backend gets no new
        sessions; after `lost_s`, also without an answer to a session's call, all calls that wait
        for it fail."""
        answer, clock = asyncio.ensure_future(self.update()), asyncio.get_running_loop().time
        began = clock()
        try:
            if not (await asyncio.wait({answer}, timeout=lost_s / 4))[0]:
                self.suspect(Unavailable("a backend does not answer"))
            # Where sessions use all streams of the connection, the poll waits for one of them.
            while not answer.done():
                left_s = max(began, self._answered) + lost_s - clock()
                if left_s <= 0:
                    self._give_up()
                    break
                await asyncio.wait({answer}, timeout=left_s)
            self.polled.set()
        finally:
            await ended(answer)

    async def update(self) -> None:
        """Update the state, however long that takes."""
        num_opened = self._num_opened
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest())
            description = await self.peer.describe()
        except grpc.aio.AioRpcError as failure:
            error = from_backend_error(failure, "a backend")
            error.__cause__ = failure  # for the log: callers do not get the details
            self.suspect(error)
        except SpecrejError as failure:
            self.suspect(failure)
        except Exception:
            # A bug in the description of one backend must not end its polls.
            log.exception("a backend's description cannot be read")
            self.suspect(InternalError("a backend's description cannot be read"))
        else:
            self.description, self.version = description, self._version_of(description)
            self._num_described = max(self._num_described, num_opened)
            self._has_answered = True
            self.is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            self.failure = Unavailable("a backend is not serving")

    def suspect(self, failure: SpecrejError) -> None:
        """Place no sessions here until the next poll that finds it serving."""
        self.is_serving = False
        self.failure = failure

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
        except Unavailable as failure:
            # If the backend sent this error itself, its polls decide: only one reward may be down.
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
        self._num_opened += 1
        self.running += 1
        try:
            async with AsyncExitStack() as stack:
                async with self.answering():
                    session = await stack.enter_async_context(opening)
                yield session
                # The session's work is done: a failure to close it concerns no caller.
                with suppress(SpecrejError):
                    async with self.answering():
                        await stack.aclose()
        finally:
            self.running -= 1

    def _open(self) -> None:
        self._channel, self.peer = self._connect(self.target)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._has_answered = False

    async def reconnect(self) -> None:
        """Connect anew: a certificate, which a channel reads once, may have been renewed."""
        lost = self._channel
        self._open()
        await lost.close()

    async def close(self) -> None:
        """Fail all calls that wait for this backend, and close its channel."""
        self._is_closed = True
        self._give_up()
        self.polled.set()
        await self._channel.close()

    def _give_up(self) -> None:
        self.suspect(Unavailable("a backend has stopped answering"))
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())


class Fleet(Generic[P]):
    """The backends of one kind, polled while the context lasts."""

    def __init__(
        self,
        kind: str,
        resolve: Callable[[], Awaitable[frozenset[Target]]],
        connect: Callable[[Target], tuple[grpc.aio.Channel, P]],
        version: Callable[[Any], Hashable],
        settings: PollSettings,
    ) -> None:
        """`kind`: for logs. `resolve` looks up the backends. `version` of a description: what must
        be equal in backends that work together."""
        self._kind = kind
        self._resolve = resolve
        self._connect = connect
        self._version = version
        self._settings = settings
        self._backends: dict[Target, Backend[P]] = {}  # sorted
        self._watchers: dict[Target, asyncio.Task[None]] = {}
        self._last_version: Hashable = None
        self._resolved = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._resolving = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        await ended(self._resolving)
        for target in [*self._backends]:
            await self._remove(target)

    async def wait_polled(self) -> None:
        """Return once all backends found so far were polled."""
        await self._resolved.wait()
        for backend in self._by_address():
            await backend.polled.wait()

    def members(self) -> list[Backend[P]]:
        """Backends that serve and have the most frequent version, by address."""
        versions: dict[Hashable, list[Backend[P]]] = {}
        for backend in self._by_address():
            if backend.is_serving:
                versions.setdefault(backend.version, []).append(backend)
        if not versions:
            return []
        # Of two equally frequent versions, keep the one chosen before.
        chosen = max(versions, key=lambda v: (len(versions[v]), v == self._last_version))
        self._last_version = chosen
        return versions[chosen]

    def descriptions(self) -> list[Any]:
        """The members' latest descriptions; at least one.

        Raises:
            SpecrejError: no backend serves.
        """
        if members := self.members():
            return [member.description for member in members]
        raise self._failure()

    def ranked(
        self, prefix: str, load: Callable[[Backend[P]], float], draw: Callable[[], float]
    ) -> list[Backend[P]]:
        """Members in the order of `placement.order`; if there are none, all that do not serve."""
        by_address = {member.target.address: member for member in self.members()}
        loads = {address: load(member) for address, member in by_address.items()}
        ranked = [by_address[address] for address in order(prefix, loads, draw)]
        return ranked or self._by_address()

    async def first(
        self, ranked: Iterable[Backend[P]], enter: Callable[[Backend[P]], Awaitable[T]]
    ) -> T:
        """The result of `enter` for the first backend that is available and has room.

        Raises:
            Overloaded, Unavailable: no backend is available and has room.
            InvalidRequest: all available ones refuse, for instance because each is too small.
        """
        failure: SpecrejError | None = None
        refusal: SpecrejError | None = None
        for backend in ranked:
            try:
                return await enter(backend)
            except InvalidRequest as error:
                refusal = refusal or error
            except Unavailable as error:
                failure = failure or error
            except Overloaded as error:
                failure = error
        raise failure or refusal or self._failure()

    def counts(self) -> dict[str, int]:
        """Number of backends by state, for gauges; may be called from any thread."""
        healths = [health for _, health in self._healths()]
        return {health.value: healths.count(health) for health in BackendHealth}

    def states(
        self, kind: BackendKind, details: Callable[[Any], Mapping[str, Any]]
    ) -> list[BackendState]:
        """All backends, by address; `details` of a description are further fields of a state."""
        states = []
        for backend, health in self._healths():
            known = details(backend.description) if backend.description else {}
            address = backend.target.address
            states.append(BackendState(kind, address, health, backend.running, **known))
        return states

    def _healths(self) -> Iterable[tuple[Backend[P], BackendHealth]]:
        members = self.members()
        for backend in self._by_address():
            otherwise = BackendHealth.OTHER_VERSION if backend.is_serving else BackendHealth.AWAY
            yield backend, BackendHealth.SERVING if backend in members else otherwise

    def _failure(self) -> SpecrejError:
        """The reason why no backend serves."""
        none = Unavailable(f"there is no {self._kind}")
        return next((backend.failure for backend in self._by_address()), none)

    def _by_address(self) -> list[Backend[P]]:
        return [*self._backends.values()]

    async def _follow(self) -> None:
        """Add new backends; remove those that are gone, do not serve and have no session.

        One that is lost is connected to anew, once per loss.
        """
        while True:
            try:
                targets = await self._resolve()
                for target, backend in sorted(self._backends.items()):
                    if backend.is_serving or backend.running:
                        continue
                    if target not in targets:
                        await self._remove(target)
                    elif backend.is_lost:
                        await backend.reconnect()
                for target in sorted(targets - self._backends.keys()):
                    self._add(target)
            except Exception:
                # For instance a certificate file that does not exist yet.
                log.exception("cannot resolve or connect to every %s", self._kind)
            self._resolved.set()
            await asyncio.sleep(self._settings.resolve_s)

    async def _watch(self, backend: Backend[P]) -> None:
        while True:
            was_serving = backend.is_serving
            await backend.poll(self._settings.lost_s)
            if backend.is_serving != was_serving:
                state = "serves" if backend.is_serving else f"does not serve: {backend.failure}"
                log.info("%s at %s %s", self._kind, backend.target.address, state)
            await asyncio.sleep(self._settings.poll_s)

    def _add(self, target: Target) -> None:
        backend = Backend(target, self._connect, self._version)
        self._backends = dict(sorted({**self._backends, target: backend}.items()))
        self._watchers[target] = asyncio.ensure_future(self._watch(backend))

    async def _remove(self, target: Target) -> None:
        backend = self._backends.pop(target)
        try:
            await ended(self._watchers.pop(target))
        finally:
            await backend.close()
