"""A Redis client that never raises: each call returns a reply within a bounded time, or None."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, ResponseError

from specrej import telemetry
from specrej.telemetry import names

log = logging.getLogger(__name__)

Command = Sequence[str | bytes | int]

# What a call without a reply lacked: a free connection, the event loop's time, or Redis itself.
_POOL, _LOOP, _CONNECTION = "pool", "loop", "connection"
_PARTS = 4


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Address and credentials of Redis; an empty URL switches it off."""

    url: str = field(default="", repr=False)  # may hold a password
    username: str = ""
    password_file: Path | None = None  # read again for every new connection
    ca: Path | None = None  # signs the server's certificate; None: the system's authorities
    certificate: Path | None = None  # of this client, for mutual TLS
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of Redis: True for OK and PONG, None for nil."""

    value: object


class RedisClient:
    """Fail-open calls to Redis.

    No method raises anything but CancelledError, or takes longer than `timeout_s` seconds of a loop
    that is not blocked. After a connection failed, broke or timed out, no call is sent for
    `cool_down_s` seconds; then one call probes. A call that got no connection of the pool in time,
    or whose time passed while the event loop was blocked, has no reply but is not Redis's failure.
    An error reply (READONLY, OOM, NOPERM, ...) fails its own command only: a server that cannot
    store can still be read.
    """

    def __init__(
        self,
        access: RedisAccess,
        *,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_connections: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`access` must be valid, see `check_access`. `clock` returns seconds."""
        self._redis = connect(access, max_connections) if access.url else None
        # redis-py's pool raises when no connection is left. Its blocking pool can lose a connection
        # when a task is cancelled while it returns one.
        self._connections = asyncio.Semaphore(max_connections)
        self.timeout_s = timeout_s
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._cool_until = clock()
        self._failing: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether there is an address, reachable or not, and the client is open."""
        return self._redis is not None

    async def call(self, purpose: str, *command: str | bytes | int) -> Reply | None:
        """The reply to one command; None if it failed. `purpose` names it in spans and logs."""
        return (await self.pipeline(purpose, command))[0]

    async def pipeline(
        self, purpose: str, *commands: Command, traced: bool = True
    ) -> Sequence[Reply | None]:
        """The replies to commands that are sent together; None for each that failed.

        `traced`: record a span below the current one.
        """
        no_replies = [None] * len(commands)
        redis = self._redis
        if redis is None or self._cools_down():
            return no_replies
        # The commands' names, without their arguments.
        operation = " ".join(str(command[0]) for command in commands)
        attributes = {names.DB_SYSTEM: "redis", names.DB_OPERATION: operation}
        name = names.cache_span(purpose)
        with (
            telemetry.span(name, attributes, telemetry.SpanKind.CLIENT)
            if traced
            else telemetry.NO_SPAN
        ) as span:
            replies = await self._exchange(redis, commands, span)
            if replies is None:
                return no_replies
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            self._report(purpose, errors[0] if errors else None, span)
        return [None if isinstance(reply, Exception) else Reply(reply) for reply in replies]

    async def _exchange(
        self, redis: Redis, commands: Sequence[Command], span: telemetry.Span
    ) -> list[Any] | None:
        """For each command its reply, or Redis's error; None if no connection delivers them."""
        step, delay = _POOL, _Delay()
        try:
            async with _timeout(self.timeout_s, delay), self._connections:
                step = _CONNECTION
                replies = await _replies(redis, commands)
        except Exception as error:
            if isinstance(error, TimeoutError) and delay.blocked_s > self.timeout_s / _PARTS:
                step = _LOOP
            if step == _CONNECTION:
                self._cool_until = self._clock() + self._cool_down_s
            self._report(step, error, span)
            return None
        for step in (_POOL, _LOOP, _CONNECTION):
            self._report(step, None, span)
        return replies

    async def available(self) -> bool:
        """Whether Redis answers; False while it cools down, or when switched off."""
        return await self.call("ping", "PING") == Reply(True)

    async def close(self) -> None:
        """Close all connections; later calls return None."""
        redis, self._redis = self._redis, None
        if redis is not None:
            with suppress(Exception):  # a connection that breaks while closing is closed
                async with asyncio.timeout(self.timeout_s):
                    await redis.aclose()

    def _cools_down(self) -> bool:
        """Whether to send no call; False once after the cool-down, for one call that probes."""
        if _CONNECTION not in self._failing:
            return False
        now = self._clock()
        if now < self._cool_until:
            return True
        self._cool_until = now + max(self._cool_down_s, self.timeout_s)
        return False

    def _report(self, step: str, error: Exception | None, span: telemetry.Span) -> None:
        """Record how a step went, and log when that has changed."""
        if error is None:
            if step in self._failing:
                self._failing.remove(step)
                log.info("cache %s works again", step)
            return
        # Only the error's kind: its text can quote the command.
        kind = type(error).__name__
        telemetry.metrics.add(names.CACHE_FAILURES, step=step)
        span.add_event(names.CACHE_FAILURE, {names.FAILED_STEP: step, names.FAILURE: kind})
        if step not in self._failing:
            self._failing.add(step)
            log.warning("cache %s fails, requests go on without it: %s", step, kind)


@dataclass(slots=True)
class _Delay:
    """Seconds by which timers of this event loop were late."""

    blocked_s: float = 0.0


@asynccontextmanager
async def _timeout(seconds: float, delay: _Delay) -> AsyncIterator[None]:
    """`asyncio.timeout` in parts: a blocked event loop uses up one part, however long the block.

    The last part ends one turn of the loop later, so that a reply which has arrived is read first.
    """
    loop, part_s = asyncio.get_running_loop(), seconds / _PARTS
    timer: asyncio.TimerHandle

    def wait(num_parts: int) -> None:
        nonlocal timer
        timer = loop.call_later(part_s, end_part, num_parts - 1, loop.time() + part_s)

    def end_part(num_left: int, due: float) -> None:
        delay.blocked_s += loop.time() - due
        if num_left:
            wait(num_left)
        else:
            bound.reschedule(loop.time())

    async with asyncio.timeout(None) as bound:
        wait(_PARTS)
        try:
            yield
        finally:
            timer.cancel()


async def _replies(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    """For each command its reply, or the error that Redis replied with."""
    if len(commands) == 1:
        try:
            return [await redis.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
        except ResponseError as error:
            return [error]
    async with redis.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
    return replies


def connect(access: RedisAccess, max_connections: int) -> Redis:
    """A client without retries and timeouts: the caller bounds connecting, reads and writes."""
    options = connection_options(access, parse_url(access.url), None)
    return Redis.from_pool(ConnectionPool(**options | {"max_connections": max_connections}))


def connection_options(access: RedisAccess, in_url: Any, timeout_s: float | None) -> dict[str, Any]:
    """Options of a connection pool; `in_url` are those that redis-py reads from the URL.

    `timeout_s` bounds connecting, and each read and write.
    """
    username = access.username or in_url.get("username", "")
    credentials: dict[str, Any] = {"username": username, "password": in_url.get("password")}
    if access.password_file:
        credentials = {"credential_provider": _PasswordFile(username, access.password_file)}
    tls = {
        "ssl_ca_certs": access.ca,
        "ssl_certfile": access.certificate,
        "ssl_keyfile": access.key,
    }
    return {
        **{name: value for name, value in in_url.items() if name not in ("username", "password")},
        **credentials,
        **{name: str(path) for name, path in tls.items() if path},
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        # Protocol 3 switches off the check that a pooled connection has no unread reply.
        "protocol": 2,
        "decode_responses": False,  # stored values are bytes
        "driver_info": None,  # no CLIENT SETINFO: connections send only AUTH and SELECT at first
    }


def check_access(access: RedisAccess) -> None:
    """Check without a connection.

    Raises:
        ValueError: parts of `access` contradict each other, or its URL has a wrong option.
    """
    if access.url:
        _check_options(access.url)
    if (access.ca or access.certificate or access.key) and not access.url.startswith("rediss://"):
        raise ValueError("redis_ca, redis_cert and redis_key need a redis_url of rediss://")
    if access.key and not access.certificate:
        raise ValueError("redis_key needs redis_cert")
    if access.password_file and access.url and parse_url(access.url).get("password"):
        raise ValueError("a password is in redis_url or in redis_password_file, not in both")


def _check_options(url: str) -> None:
    try:
        in_url: Any = parse_url(url)
        pool: Any = ConnectionPool(**in_url)
        pool.make_connection()
    except (TypeError, ValueError):  # whose text may have a part of a password
        raise ValueError("redis_url has an option that redis-py lacks, or a wrong value") from None
    checks = (in_url.get("ssl_cert_reqs", "required"), in_url.get("ssl_check_hostname", True))
    if checks != ("required", True):
        raise ValueError("redis_url must not switch off checks of the server's certificate")


class _PasswordFile(CredentialProvider):
    """A password that can change: the file is read for every new connection."""

    def __init__(self, username: str, path: Path) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text().strip()
        except (OSError, ValueError) as error:
            # An error of this type makes the client close the connection.
            raise AuthenticationError("the password file cannot be read") from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
