"""Records in Redis: found by every orchestrator, by their own tenant only, and bounded."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import redis

from orchestrator.cache.keys import hashed_tenant, record_key
from orchestrator.cache.records import MAX_LISTED, SharedRecords
from orchestrator.observe.request_records import RequestRecords
from specrej import contracts as c
from specrej.contracts import wire
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.caching import SECRET, open_cache
from tests.orchestrator.test_request_records import record_of
from tests.serving import failure_of, until
from tests.world import BOUND_S, World, small_request, world

RECORD = c.RequestRecord("0" * 32, time.time(), c.Selection(n=4), 64, outcome="OK", n=4)


@pytest.fixture
async def pair(redis_url: str, admin: redis.Redis) -> AsyncIterator[tuple[World, World]]:
    """Two orchestrators, each with backends of its own, on one empty Redis."""
    async with world(redis_url=redis_url) as one, world(redis_url=redis_url) as other:
        yield one, other


async def listed(service: World, tenant: str = "") -> list[c.RequestRecord]:
    metadata = (("specrej-tenant", tenant),) if tenant else ()
    request = pb.ListRecordsRequest()
    reply = await service.stub.ListRecords(request, metadata=metadata, timeout=BOUND_S)
    return [wire.from_message(record, c.RequestRecord) for record in reply.records]


async def stored(service: World, num_records: int, tenant: str = "") -> list[c.RequestRecord]:
    """The list, once it has that many records."""
    records: list[c.RequestRecord] = []

    async def is_complete() -> bool:
        records[:] = await listed(service, tenant)
        return len(records) == num_records

    await until(is_complete)
    return records


async def test_another_orchestrator_finds_a_record(pair: tuple[World, World]) -> None:
    """Guards against records that half of the calls miss behind two orchestrators."""
    first, second = pair
    reply = await first.answer(small_request())
    await stored(second, 1)
    record = await record_of(second, reply.request_id)
    assert record == await record_of(first, reply.request_id)
    assert record.outcome == "OK" and record.rounds[0].trace.candidates
    # The time and the rounds of a list differ from those of a record by intent.
    assert (await listed(second)) == (await listed(first)) == [replace(record, rounds=())]


async def test_a_list_has_running_and_failed_requests_latest_first(
    pair: tuple[World, World],
) -> None:
    """Guards against a list of answers only, and of one process only."""
    first, second = pair
    ended = await second.answer(small_request())
    await failure_of(first.answer(small_request(selection={"rewards": [{"name": "absent"}]})))
    first.shut("extend")
    call = first.stub.GenerateStream(pb.GenerateStreamRequest(request=small_request(seed=8)))
    running = (await call.read()).admitted.request_id
    records = await stored(first, 2)
    assert [record.request_id for record in records] == [running, ended.request_id]
    assert [record.outcome for record in records] == ["", "OK"]
    call.cancel()
    first.generator.gates["extend"].open()
    await until(lambda: first.is_idle)
    assert [record.outcome for record in await stored(second, 2)] == ["CANCELLED", "OK"]


async def test_records_are_those_of_the_tenant(pair: tuple[World, World]) -> None:
    """Guards against a record, or its id, that another tenant gets: from the orchestrator that made
    it, and from Redis."""
    first, second = pair
    reply = await first.answer(small_request(), tenant="a")
    await stored(second, 1, "a")
    for service in pair:
        assert (await record_of(service, reply.request_id, "a")).outcome == "OK"
        unknown = await failure_of(record_of(service, "unknown", "b"))
        for tenant in ("", "b"):
            assert await listed(service, tenant) == []
            failure = await failure_of(record_of(service, reply.request_id, tenant))
            assert failure.code() is unknown.code() is grpc.StatusCode.NOT_FOUND
            assert failure.details() == unknown.details()


@pytest.mark.parametrize("damage", ["foreign", "moved", "garbage"])
async def test_values_that_this_cache_did_not_store_are_no_records(
    pair: tuple[World, World], admin: redis.Redis, damage: str
) -> None:
    """Guards against a program that writes Redis and gives a tenant another one's record."""
    first, second = pair
    reply = await first.answer(small_request(), tenant="a")
    await stored(second, 1, "a")
    owners = [hashed_tenant(tenant, SECRET) for tenant in "ab"]
    key, other = (record_key(reply.request_id, owner) for owner in owners)
    listing, target = (record_key("", owner) for owner in owners)
    if damage == "moved":
        admin.copy(key, other)
        admin.copy(listing, target)
    elif damage == "garbage":
        admin.set(other, b"\xff" * 99)
        admin.rpush(target, b"", b"x" * 200)
    else:
        admin.hset(other, "a", "b")
        admin.hset(target, "a", "b")
    assert await listed(second, "b") == []
    failure = await failure_of(record_of(second, reply.request_id, "b"))
    assert failure.code() is grpc.StatusCode.NOT_FOUND


async def test_the_records_of_a_tenant_are_bounded(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a tenant whose requests fill Redis, and keys without an expiry."""
    async with open_cache(redis_url) as cache:
        shared = SharedRecords(cache)
        for number in range(MAX_LISTED + 3):
            await shared._store(replace(RECORD, request_id=f"{number:032x}"), "t")
        latest = await shared.latest("t")
        assert [int(record.request_id, 16) for record in latest] == [*range(MAX_LISTED + 2, 2, -1)]
        keys = admin.keys("specrej:record:*")
        assert len(keys) == MAX_LISTED + 1
        assert all(0 < admin.pttl(key) <= 3_600_000 for key in keys)
        assert await shared.find(f"{2:032x}", "t") is None
        old = replace(RECORD, request_id="e" * 32, started_unix_s=time.time() - 3601)
        await shared._store(old, "t")
        assert "e" * 32 not in [record.request_id for record in await shared.latest("t")]
        await shared._store(replace(RECORD, request_id="f" * 32, outcome="x" * (1 << 20)), "t")
        assert await shared.find("f" * 32, "t") is None


async def test_without_redis_each_orchestrator_has_its_own_records() -> None:
    """Guards against a request that fails, or a list that waits, because Redis is off."""
    async with world() as service:
        reply = await service.answer(small_request())
        assert [record.request_id for record in await listed(service)] == [reply.request_id]


async def test_the_shared_record_of_a_malformed_id_is_not_looked_up(redis_url: str) -> None:
    """Guards against an id that names another key, such as that of the list."""
    async with open_cache(redis_url) as cache:
        shared = SharedRecords(cache)
        for request_id in ("", "*", "0" * 31, "0" * 33, "0" * 31 + "\n", "A" * 32):
            assert await shared.find(request_id, "t") is None


async def test_closing_waits_for_writes(redis_url: str) -> None:
    """Guards the records of a drain's last requests."""
    async with open_cache(redis_url) as cache:
        shared = SharedRecords(cache)
        shared.keep(RECORD, "t")
        await shared.aclose()
        assert await shared.find(RECORD.request_id, "t") == RECORD


def test_records_that_are_switched_off_are_not_shared() -> None:
    """Guards against records in Redis although kept_records is 0."""
    ended: list[str] = []
    for max_requests in (0, 1):
        records = RequestRecords(max_requests)
        records.on_ended = lambda record, tenant: ended.append(tenant)
        with records.recording("r", f"t{max_requests}", c.Selection(), 4, arrived=0.0):
            pass
    assert ended == ["t1"]
