"""A Redis client that never raises: each call returns a reply within a bounded time, or None."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.lock import Lock
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, LockError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from specrej import telemetry
from specrej.telemetry import names

log = logging.getLogger(__name__)

_CONNECTION = "connection"  # what failed if no reply arrived
_HEALTH_CHECK_S = 30  # a connection that was idle for longer is checked by a PING first


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Address of Redis, with redis-py's options such as `ssl_ca_certs`; empty: switched off."""

    url: str = field(default="", repr=False)  # may hold a password
    password_file: Path | None = None  # read again for every new connection


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of Redis: True for OK and PONG, None for nil."""

    value: object


class RedisClient:
    """Fail-open calls to Redis.

    No method raises anything but CancelledError, or takes longer than `timeout_s` seconds. redis-py
    repeats a call once whose pooled connection was closed meanwhile. After a connection failed or
    timed out, no call is sent for `cool_down_s` seconds. An error reply (READONLY, OOM, NOPERM,
    ...) fails its own command only: a server that cannot store can still be read.
    """

    def __init__(
        self,
        access: RedisAccess,
        *,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_connections: int = 16,
    ) -> None:
        """The URL of `access` must be valid, see `check_url`."""
        self._redis = connect(access, timeout_s, max_connections) if access.url else None
        # redis-py's pool raises when no connection is left. Its blocking pool can lose a connection
        # when a task is cancelled while it returns one.
        self._connections = asyncio.Semaphore(max_connections)
        self.timeout_s = timeout_s
        self._cool_down_s = cool_down_s
        self._cool_until = -math.inf  # on the event loop's clock
        self._failing: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether there is an address, reachable or not, and the client is open."""
        return self._redis is not None

    def lock(self, key: str, lease_s: float) -> Lock | None:
        """redis-py's lock, for `attempt`; None without an address."""
        return Lock(self._redis, key, timeout=lease_s) if self._redis else None

    async def call(self, purpose: str, *command: str | bytes | int) -> Reply | None:
        """The reply to one command; None if it failed. `purpose` names it in spans and logs."""
        redis = self._redis
        send = partial(redis.execute_command, *command) if redis else None
        return await self.attempt(purpose, str(command[0]), send)

    async def attempt(
        self, purpose: str, operation: str, send: Callable[[], Awaitable[Any]] | None
    ) -> Reply | None:
        """The reply of `send`, which uses this client; None if it failed, or Redis is off."""
        now = asyncio.get_running_loop().time
        if send is None or now() < self._cool_until:
            return None
        # The command's name, without its arguments.
        attributes = {names.DB_SYSTEM: "redis", names.DB_OPERATION: operation}
        name = names.cache_span(purpose)
        with telemetry.span(name, attributes, telemetry.SpanKind.CLIENT) as span:
            try:
                async with asyncio.timeout(self.timeout_s), self._connections:
                    reply = await send()
            except (ResponseError, LockError) as error:  # of a server that answers
                self._note(_CONNECTION, None, span)
                self._note(purpose, error, span)
                return None
            except Exception as error:
                self._cool_until = now() + self._cool_down_s
                self._note(_CONNECTION, error, span)
                return None
            self._note(_CONNECTION, None, span)
            self._note(purpose, None, span)
        return Reply(reply)

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

    def _note(self, step: str, error: Exception | None, span: telemetry.Span) -> None:
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


def connect(access: RedisAccess, timeout_s: float, max_connections: int) -> Redis:
    """A client whose calls are retried once."""
    options = connection_options(access, parse_url(access.url), timeout_s)
    retry = Retry(NoBackoff(), 1, (RedisConnectionError,))
    options |= {"max_connections": max_connections, "retry": retry}
    return Redis.from_pool(ConnectionPool(**options))


def connection_options(access: RedisAccess, in_url: Any, timeout_s: float) -> dict[str, Any]:
    """Options of a connection pool; `in_url` are those that redis-py reads from the URL.

    `timeout_s` bounds connecting, and each read and write.
    """
    options = {**in_url}
    if access.password_file:
        username = options.pop("username", "")
        options["credential_provider"] = _PasswordFile(username, access.password_file)
    return options | {
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        # Protocol 3 switches off the check that a pooled connection has no unread reply.
        "protocol": 2,
        "decode_responses": False,  # stored values are bytes
        "driver_info": None,  # no CLIENT SETINFO: connections send only AUTH and SELECT at first
    }


def check_url(url: str) -> None:
    """Check the URL of Redis without a connection; an empty one is valid.

    Raises:
        ValueError: it is invalid. The error has no text of the URL, which may hold a password.
    """
    try:
        options: Any = parse_url(url) if url else {}
        pool: Any = ConnectionPool(**options)
        pool.make_connection()
    except (TypeError, ValueError):
        raise ValueError(
            "must be redis://, rediss:// or unix:// with a valid host and port, and options of"
            " redis-py; a password has / ? # @ as %2F %3F %23 %40"
        ) from None
    checks = (options.get("ssl_cert_reqs", "required"), options.get("ssl_check_hostname", True))
    if checks != ("required", True):
        raise ValueError("must not switch off checks of the server's certificate")
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"{name} must be a file that is there")


def has_password(url: str) -> bool:
    """Whether a valid URL of Redis contains a password."""
    return bool(parse_url(url).get("password"))


class _PasswordFile(CredentialProvider):
    """A password that can change: the file is read for every new connection."""

    def __init__(self, username: str, path: Path) -> None:
        self._username = (username,) if username else ()
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            return (*self._username, self._path.read_text().strip())
        except (OSError, ValueError) as error:
            # An error of this type makes the client close the connection.
            raise AuthenticationError("the password file cannot be read") from error

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
