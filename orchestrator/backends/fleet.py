"""All backends of one kind: found, asked again and again how they are, and given up when silent.

A backend that is to be given something to do serves, and describes itself as the others do: while
two versions of a model run, those of the version that most of them have. Knows no sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.backends.resolving import Target
from specrej.errors import InternalError, Overloaded, SpecrejError, Unavailable
from specrej.status import from_backend_error

log = logging.getLogger(__name__)

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Pulse:
    """How often backends are looked for and asked, and when silence means that one is gone."""

    poll_s: float = 1.0
    resolve_s: float = 5.0
    lost_s: float = 10.0


class Finder(Protocol):
    """Who knows where the backends are: `resolving.Resolver`."""

    async def resolve(self) -> frozenset[Target]: ...


class Peer(Protocol[D_co]):
    """What a backend is called through; its state in the fleet is `Backend`."""

    async def describe(self) -> D_co:
        """Raises SpecrejError: it does not, or cannot be reached."""


P = TypeVar("P", bound=Peer[Any])


class Backend(Generic[P]):
    """One machine, and what is known of it.

    `version`: what others must be equal in to take its place; None if it was never described.
    `running`: sessions that it was given here and that have not ended.
    """

    def __init__(
        self,
        target: Target,
        channel: grpc.aio.Channel,
        peer: P,
        version: Callable[[Any], Hashable],
    ) -> None:
        """`version`: of a description."""
        self.target = target
        self.peer = peer
        self.description: Any = None
        self.version: Hashable = None
        self.is_serving = False
        self.failure: SpecrejError = Unavailable("a backend has not answered yet")
        self.running = 0
        self.asked = asyncio.Event()  # how it is, and there was an answer, or none in time
        self._channel = channel
        self._version_of = version
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._waiting: set[asyncio.Timeout] = set()
        self._num_given = 0  # sessions, ever
        self._num_told = 0  # of these, those that its description knows of
        self._is_closed = False

    @property
    def placed(self) -> int:
        """Sessions that it was given here since it last described itself."""
        return self._num_given - self._num_told

    async def ask(self, lost_s: float) -> None:
        """Find out how it is. One that is slow to answer gets nothing new to do; whoever waits for
        one that is silent for `lost_s` seconds waits no more."""
        answer = asyncio.ensure_future(self.look())
        try:
            if not (await asyncio.wait({answer}, timeout=lost_s / 4))[0]:
                self.suspect(Unavailable("a backend does not answer"))
            if not (await asyncio.wait({answer}, timeout=lost_s * 3 / 4))[0]:
                self._give_up()
            self.asked.set()
        finally:
            await _ended(answer)

    async def look(self) -> None:
        """Find out how it is, however long that takes."""
        num_given = self._num_given
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest())
            description = await self.peer.describe()
        except grpc.aio.AioRpcError as failure:
            error = from_backend_error(failure, "a backend")
            error.__cause__ = failure  # for the log: callers are not told
            self.suspect(error)
        except SpecrejError as failure:
            self.suspect(failure)
        except Exception:
            # Whatever is wrong with one backend must not end the watch over it.
            log.exception("a backend's description cannot be read")
            self.suspect(InternalError("a backend's description cannot be read"))
        else:
            self.description, self.version = description, self._version_of(description)
            self._num_told = max(self._num_told, num_given)
            self.is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            self.failure = Unavailable("a backend is not serving")

    def suspect(self, failure: SpecrejError) -> None:
        """It has failed: nothing to do for it until it says that it serves."""
        self.is_serving = False
        self.failure = failure

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """While it is waited for; one that fails is given nothing new to do.

        Raises:
            Unavailable: it has fallen silent, or is closed.
        """
        if self._is_closed:
            raise self.failure
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._waiting.add(patience)
                yield
        except TimeoutError:
            if patience.expired():
                raise self.failure from None
            raise
        except Unavailable as failure:
            self.suspect(failure)
            raise
        finally:
            self._waiting.discard(patience)

    @asynccontextmanager
    async def holding(self, opening: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """A session here, counted.

        Raises:
            Unavailable: it has fallen silent meanwhile.
        """
        self._num_given += 1
        self.running += 1
        try:
            async with AsyncExitStack() as stack:
                async with self.answering():
                    session = await stack.enter_async_context(opening)
                yield session
                # It has done what it was for: a goodbye without an answer costs nobody anything.
                with suppress(SpecrejError):
                    async with self.answering():
                        await stack.aclose()
        finally:
            self.running -= 1

    async def close(self) -> None:
        """Whoever waits for it, or for its first answer, waits no more."""
        self._is_closed = True
        self._give_up()
        self.asked.set()
        await self._channel.close()

    def _give_up(self) -> None:
        self.suspect(Unavailable("a backend has fallen silent"))
        for patience in self._waiting:
            if not patience.expired():  # who has been told may take a moment to leave
                patience.reschedule(asyncio.get_running_loop().time())


class Fleet(Generic[P]):
    """Backends of one kind; watched while the context lasts."""

    def __init__(
        self,
        kind: str,
        resolver: Finder,
        connect: Callable[[Target], tuple[grpc.aio.Channel, P]],
        version: Callable[[Any], Hashable],
        pulse: Pulse | None = None,
    ) -> None:
        """`kind`: for metrics. `version`: of a description, what must be equal to work together."""
        self._kind = kind
        self._resolver = resolver
        self._connect = connect
        self._version = version
        self._pulse = pulse or Pulse()
        self._backends: dict[Target, Backend[P]] = {}
        self._watchers: dict[Target, asyncio.Task[None]] = {}
        self._last_version: Hashable = None
        self._found = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._finding = asyncio.ensure_future(self._find())
        return self

    async def __aexit__(self, *error: object) -> None:
        await _ended(self._finding)
        for target in [*self._backends]:
            await self._forget(target)

    async def surveyed(self) -> None:
        """Returns once everybody who is known has been asked."""
        await self._found.wait()
        for backend in self._by_address():
            await backend.asked.wait()

    async def refreshed(self) -> list[Backend[P]]:
        """The members as of now, not as of when they were last asked; who is slow, as of then."""
        await self._look_at(self.members())
        return self.members()

    async def recalled(self) -> list[Backend[P]]:
        """The members, with those who only seemed to be away."""
        await self._look_at(self.others())
        return self.members()

    def members(self) -> list[Backend[P]]:
        """Those that serve and are of the version that most of them have, by address."""
        versions: dict[Hashable, list[Backend[P]]] = {}
        for backend in self._by_address():
            if backend.is_serving:
                versions.setdefault(backend.version, []).append(backend)
        if not versions:
            return []
        # Between as many of one as of another: whatever it was.
        chosen = max(versions, key=lambda each: (len(versions[each]), each == self._last_version))
        self._last_version = chosen
        return versions[chosen]

    def others(self) -> list[Backend[P]]:
        """Those that do not serve, as far as is known."""
        return [backend for backend in self._by_address() if not backend.is_serving]

    async def first(
        self, ranked: Iterable[Backend[P]], enter: Callable[[Backend[P]], Awaitable[T]]
    ) -> T:
        """What the first of them makes of it that can be reached and has room.

        Raises:
            Unavailable, Overloaded: none of them.
        """
        failure: SpecrejError | None = None
        for backend in ranked:
            try:
                return await enter(backend)
            except Unavailable as error:
                failure = failure or error
            except Overloaded as error:
                failure = error
        raise failure or self.failure()

    def failure(self) -> SpecrejError:
        """Why there is nobody."""
        nobody = Unavailable(f"there is no {self._kind}")
        return next((each.failure for each in self._by_address()), nobody)

    def _by_address(self) -> list[Backend[P]]:
        return [self._backends[target] for target in sorted(self._backends)]

    async def _look_at(self, backends: Iterable[Backend[P]]) -> None:
        """Find out how they are, as far as they say so in time."""
        looking = {asyncio.ensure_future(each.look()) for each in backends}
        try:
            if looking:
                await asyncio.wait(looking, timeout=self._pulse.lost_s / 4)
        finally:
            for task in looking:
                task.cancel()

    async def _find(self) -> None:
        """Keep up with who there is."""
        while True:
            try:
                await self._follow(await self._resolver.resolve())
            except Exception:
                # Whatever is wrong with one of them, as a certificate that is not there yet.
                log.exception("not every %s can be found", self._kind)
            self._found.set()
            await asyncio.sleep(self._pulse.resolve_s)

    async def _follow(self, targets: frozenset[Target]) -> None:
        """Begin to watch whoever appears, and forget whoever is gone and has nothing to do."""
        for target in self._backends.keys() - targets:
            backend = self._backends[target]
            if not (backend.is_serving or backend.running):
                await self._forget(target)
        for target in targets - self._backends.keys():
            backend = Backend(target, *self._connect(target), self._version)
            self._backends[target] = backend
            self._watchers[target] = asyncio.ensure_future(self._watch(backend))

    async def _watch(self, backend: Backend[P]) -> None:
        while True:
            was_serving = backend.is_serving
            await backend.ask(self._pulse.lost_s)
            if backend.is_serving != was_serving:
                state = "serves" if backend.is_serving else f"does not serve: {backend.failure}"
                log.info("%s at %s %s", self._kind, backend.target.address, state)
            await asyncio.sleep(self._pulse.poll_s)

    async def _forget(self, target: Target) -> None:
        watcher, backend = self._watchers.pop(target), self._backends.pop(target)
        try:
            await _ended(watcher)
        finally:
            await backend.close()

    def counts(self) -> dict[str, int]:
        """Backends by state, those that serve in vain apart; from any thread."""
        backends = list(self._backends.values())
        serving = [each.version for each in backends if each.is_serving]
        members = max(map(serving.count, serving), default=0)
        return {
            "serving": members,
            "other_version": len(serving) - members,
            "away": len(backends) - len(serving),
        }


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancelled and over. Waits for the task, not for its result: a cancellation that comes out of
    that could as well be ours, and must not be swallowed."""
    task.cancel()
    await asyncio.wait({task})
