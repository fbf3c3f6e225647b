"""Calls to Redis that never fail: an answer within a bounded time, or none.

With the cache's admin command the only file that knows redis. What is stored, and under which key,
is its callers' business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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


@dataclass(frozen=True, slots=True)
class Access:
    """Where Redis is, and what lets us in; an empty URL switches everything off."""

    url: str = field(default="", repr=False)  # may hold a password
    username: str = ""
    password_file: Path | None = None  # read again for every new connection
    ca: Path | None = None  # who may have signed the server's certificate; None: the system's
    certificate: Path | None = None  # ours, with its key
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What Redis said: True for OK and PONG, None for nil."""

    value: object


class Store:
    """Redis, fail-open.

    No method raises anything but CancelledError, or takes longer than `timeout_s` seconds. Once
    Redis could not be reached, did not answer in time or broke off, it is left alone for
    `cool_down_s` seconds; then one call probes it. An error reply (READONLY, OOM, NOPERM, ...) is
    an answer in time: only its own command fails, as a server that cannot store can still be read.
    """

    def __init__(
        self,
        access: Access,
        *,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_connections: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` tells seconds.

        Raises:
            ValueError: `access` contradicts itself, or its URL is none of Redis.
        """
        self.num_failures = 0
        self._redis = connect(access, timeout_s, max_connections) if access.url else None
        # The pool alone would refuse the one connection too many. Its own blocking kind can lose
        # a connection for good when a task is cancelled while it waits to give one back.
        self._connections = asyncio.Semaphore(max_connections)
        self._timeout_s = timeout_s
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._rest_until = clock()
        self._failing: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether there is a Redis to ask, well or not."""
        return self._redis is not None

    async def call(self, purpose: str, *command: str | bytes | int) -> Reply | None:
        """The reply to one command; None if there is none, for whatever reason."""
        return (await self.pipeline(purpose, command))[0]

    async def pipeline(self, purpose: str, *commands: Command) -> Sequence[Reply | None]:
        """The replies to all, sent at once; None for each that was refused or not answered."""
        nothing = [None] * len(commands)
        redis = self._redis
        if redis is None or self._resting():
            return nothing
        operations = {names.DB_SYSTEM: "redis", names.DB_OPERATION: _operation(commands)}
        with telemetry.span(
            names.cache_span(purpose), operations, telemetry.SpanKind.CLIENT
        ) as span:
            try:
                async with asyncio.timeout(self._timeout_s), self._connections:
                    replies = await _replies(redis, commands)
            except Exception as error:
                self._rest_until = self._clock() + self._cool_down_s
                self._fails("connection", error, span)
                return nothing
            self._works("connection")
            refusals = [reply for reply in replies if isinstance(reply, Exception)]
            if refusals:
                self._fails(purpose, refusals[0], span)
            else:
                self._works(purpose)
        return [None if isinstance(reply, Exception) else Reply(reply) for reply in replies]

    async def available(self) -> bool:
        """Whether Redis answers; False while it is left alone, or switched off."""
        return await self.call("ping", "PING") == Reply(True)

    async def close(self) -> None:
        """Close all connections; from then on nothing is asked."""
        redis, self._redis = self._redis, None
        if redis is not None:
            with suppress(Exception):  # a connection that breaks while closing is closed
                async with asyncio.timeout(self._timeout_s):
                    await redis.aclose()

    def _resting(self) -> bool:
        """Whether Redis is being left alone; if that is just over, the one who asks may probe."""
        if "connection" not in self._failing:
            return False
        now = self._clock()
        if now < self._rest_until:
            return True
        self._rest_until = now + max(self._cool_down_s, self._timeout_s)
        return False

    def _fails(self, what: str, error: Exception, span: telemetry.Span) -> None:
        self.num_failures += 1
        # Only the error's kind: its text can quote the command.
        kind = type(error).__name__
        span.add_event(names.CACHE_FAILURE, {names.FAILED_STEP: what, names.FAILURE: kind})
        if what not in self._failing:
            self._failing.add(what)
            log.warning("cache %s fails, going on without it: %s", what, kind)

    def _works(self, what: str) -> None:
        if what in self._failing:
            self._failing.remove(what)
            log.info("cache %s works again", what)


def _operation(commands: Sequence[Command]) -> str:
    """The commands' names, without what they are about."""
    return " ".join(str(command[0]) for command in commands)


async def _replies(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    """A reply, or the error that Redis replied with, for each command."""
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


def connect(access: Access, timeout_s: float, max_connections: int = 16) -> Redis:
    """A client that never retries, and whose connections need no handshake but AUTH and SELECT.

    `timeout_s` bounds connecting; who calls bounds the rest.

    Raises:
        ValueError: `access` contradicts itself, or its URL is none of Redis.
    """
    check_access(access)
    in_url: Any = parse_url(access.url)
    options: dict[str, Any] = {
        **{name: value for name, value in in_url.items() if name not in ("username", "password")},
        **_credentials(access, in_url),
        **_tls(access),
        "max_connections": max_connections,
        "socket_connect_timeout": timeout_s,
        # The caller's timeout bounds reads and writes. redis-py's own goes through
        # asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
        "socket_timeout": None,
        # Protocol 3 switches on maintenance notifications, and with them off the check that a
        # pooled connection has no unread reply.
        "protocol": 2,
        "driver_info": None,
    }
    pool: ConnectionPool = ConnectionPool(**options)
    return Redis.from_pool(pool)


def check_access(access: Access) -> None:
    """Whether its parts go together.

    Raises:
        ValueError: they do not.
    """
    if (access.ca or access.certificate or access.key) and not access.url.startswith("rediss://"):
        raise ValueError("redis_ca, redis_cert and redis_key need a redis_url of rediss://")
    if access.key and not access.certificate:
        raise ValueError("redis_key needs redis_cert")
    if access.password_file and access.url and parse_url(access.url).get("password"):
        raise ValueError("a password is in redis_url or in redis_password_file, not in both")


def _credentials(access: Access, in_url: Any) -> dict[str, Any]:
    username = access.username or in_url.get("username", "")
    if access.password_file:
        return {"credential_provider": _PasswordFile(username, access.password_file)}
    return {"username": username, "password": in_url.get("password")}


def _tls(access: Access) -> dict[str, str]:
    paths = {
        "ssl_ca_certs": access.ca,
        "ssl_certfile": access.certificate,
        "ssl_keyfile": access.key,
    }
    return {name: str(path) for name, path in paths.items() if path}


class _PasswordFile(CredentialProvider):
    """A password that may change: the file is read for every new connection."""

    def __init__(self, username: str, path: Path) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text().strip()
        except (OSError, ValueError) as error:
            # Of this kind the client expects that a connection must be given up.
            raise AuthenticationError("the password file cannot be read") from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
