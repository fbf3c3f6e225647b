"""A Redis client that never raises: each call returns a reply within a bounded time, or None."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
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


class RedisClient:
    """Fail-open calls to Redis.

    No method raises anything but CancelledError, or takes longer than `timeout_s` seconds. redis-py
    repeats a call once whose pooled connection was closed meanwhile. After a connection failed or
    timed out, no call is sent for `cool_down_s` seconds; after an error reply (READONLY, OOM,
    NOPERM, ...) none for the same purpose: a server that cannot store can still be read.
    """

    def __init__(
        self,
        url: str,
        password_file: Path | None = None,
        *,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_connections: int = 16,
    ) -> None:
        """An empty `url` switches the client off; others must be valid, see `check_access`."""
        self._redis = connect(url, password_file, timeout_s, max_connections) if url else None
        # redis-py's pool raises when no connection is left. Its blocking pool can lose a connection
        # when a task is cancelled while it returns one.
        self._connections = asyncio.Semaphore(max_connections)
        self.timeout_s = timeout_s
        self._cool_down_s = cool_down_s
        # By purpose, on the event loop's clock.
        self._cool_until: defaultdict[str, float] = defaultdict(lambda: -math.inf)

    @property
    def is_on(self) -> bool:
        """Whether there is an address, reachable or not, and the client is open."""
        return self._redis is not None

    def lock(self, key: str, lease_s: float) -> Lock | None:
        """redis-py's lock, for `attempt`; None without an address."""
        return Lock(self._redis, key, timeout=lease_s) if self._redis else None

    async def call(self, purpose: str, *command: str | bytes | int) -> object:
        """The reply to one command; None if it is nil or failed. `purpose` names it in spans."""
        send = partial(self._redis.execute_command, *command) if self._redis else None
        return await self.attempt(purpose, str(command[0]), send)

    async def attempt(
        self, purpose: str, operation: str, send: Callable[[], Awaitable[Any]] | None
    ) -> object:
        """The reply of `send`, which uses this client: True for OK and PONG; None for nil, if it
        failed, or if Redis is off."""
        now = asyncio.get_running_loop().time
        cool_until = max(self._cool_until[purpose], self._cool_until[_CONNECTION])
        if send is None or now() < cool_until:
            return None
        name, kind = names.cache_span(purpose), telemetry.SpanKind.CLIENT
        attributes = {names.DB_SYSTEM: "redis", names.DB_OPERATION: operation}
        with telemetry.span(name, attributes, kind) as span:
            try:
                async with asyncio.timeout(self.timeout_s), self._connections:
                    return await send()
            except LockError:  # it has expired
                return None
            except Exception as error:
                step = purpose if isinstance(error, ResponseError) else _CONNECTION
                self._cool_until[step] = now() + self._cool_down_s
                # Only the error's type: its text can quote the command.
                what = type(error).__name__
                telemetry.metrics.add(names.CACHE_FAILURES, step=step)
                span.add_event(names.CACHE_FAILURE, {names.FAILED_STEP: step, names.FAILURE: what})
                log.warning("cache %s fails, requests go on without it: %s", step, what)
                return None

    async def available(self) -> bool:
        """Whether Redis answers; False while it cools down, or when switched off."""
        return await self.call("ping", "PING") is True

    async def close(self) -> None:
        """Close all connections; later calls return None."""
        redis, self._redis = self._redis, None
        if redis is not None:
            with suppress(Exception):  # a connection that breaks while closing is closed
                async with asyncio.timeout(self.timeout_s):
                    await redis.aclose()


def connect(
    url: str, password_file: Path | None, timeout_s: float, max_connections: int = 1
) -> Redis:
    """A client of a valid URL, whose calls are repeated once.

    `timeout_s` bounds connecting, and each read and write. The URL's own options, such as
    `ssl_ca_certs`, do not override those set here.
    """
    options: dict[str, Any] = {**parse_url(url)}
    if password_file:
        username = options.pop("username", "")
        options["credential_provider"] = _PasswordFile(username, password_file)
    options |= {
        "max_connections": max_connections,
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s,
        "health_check_interval": 30,  # seconds: after a longer pause, a PING comes first
        # Protocol 3 switches off the check that a pooled connection has no unread reply.
        "protocol": 2,
        "driver_info": None,  # no CLIENT SETINFO: connections send only AUTH and SELECT at first
    }
    return Redis.from_pool(ConnectionPool(**options))


def check_access(url: str, password_file: Path | None) -> None:
    """Check the address of Redis without a connection; an empty URL is valid.

    Raises:
        ValueError: it is invalid. The error has no text of the URL, which may hold a password.
    """
    if not url:
        return
    try:
        options: Any = parse_url(url)
        pool: Any = ConnectionPool(**options)
        pool.make_connection()
    except (TypeError, ValueError):
        raise ValueError(
            "redis_url must be redis://, rediss:// or unix:// with a valid host and port, and"
            " options of redis-py; a password has / ? # @ as %2F %3F %23 %40"
        ) from None
    if password_file and options.get("password"):
        raise ValueError("a password is in redis_url or in redis_password_file, not in both")


class _PasswordFile(CredentialProvider):
    """A password that can change: the file is read for every new connection."""

    def __init__(self, username: str, path: Path) -> None:
        self._username = username or "default"
        self._path = path

    async def get_credentials_async(self) -> tuple[str, str]:
        try:
            return self._username, self._path.read_text().strip()
        except (OSError, ValueError) as error:
            # An error of this type makes the client close the connection.
            raise AuthenticationError("the password file cannot be read") from error
