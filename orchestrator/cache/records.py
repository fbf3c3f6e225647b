"""Records of ended requests in Redis, so that every orchestrator of it finds them.

Bounded per tenant: the latest `MAX_LISTED` records, each of at most `MAX_BYTES`, for an hour.
Values are sealed as answers are. If Redis fails, a record is not found.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.background import BackgroundTasks, packed, unpacked
from orchestrator.cache.answers import Cache
from orchestrator.cache.keys import hashed_tenant, record_key
from orchestrator.cache.secret import seal, unseal
from specrej.contracts import RequestRecord

MAX_LISTED = 64  # records of a tenant
MAX_BYTES = 1 << 20  # of a record, before it is compressed
_ID = re.compile(r"[0-9a-f]{32}")
_ID_CHARACTERS = 32
_LIFE_MS = 3_600_000
_MAX_WRITES = 64  # at once; a busy process drops the others

# Stores a record, and its summary in front of the tenant's list; deletes the records that the list
# drops. A summary begins with its record's id.
_ADD = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('LPUSH', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
while redis.call('LLEN', KEYS[2]) > tonumber(ARGV[4]) do
  redis.call('DEL', KEYS[2] .. string.sub(redis.call('RPOP', KEYS[2]), 1, 32))
end
"""


@dataclass(frozen=True, slots=True)
class _Sealed:
    """What is sealed: a record."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )
    record: RequestRecord


_SEALED = TypeAdapter(_Sealed)


class SharedRecords:
    """The records of all orchestrators of a cache's Redis."""

    def __init__(self, cache: Cache) -> None:
        self._redis = cache.redis
        self._secret = cache.secret
        self._writes = BackgroundTasks("storing a record", limit=_MAX_WRITES, deadline_s=10.0)

    async def aclose(self) -> None:
        """Wait for the writes, as long as a call to Redis may take."""
        await self._writes.aclose(self._redis.timeout_s)

    def keep(self, record: RequestRecord, tenant: str) -> None:
        """Store the record of an ended request in the background."""
        if self._redis.is_on:
            # Within the request's trace, and in its tenant's turn.
            store = partial(self._store, record, tenant)
            self._writes.start(record.request_id, store, contextvars.copy_context())

    async def find(self, request_id: str, tenant: str) -> RequestRecord | None:
        """One of the tenant's records."""
        if not (self._redis.is_on and _ID.fullmatch(request_id)):
            return None
        key = record_key(request_id, hashed_tenant(tenant, self._secret))
        reply = await self._redis.call("record", "GETRANGE", key, 0, MAX_BYTES)
        return await unpacked(partial(self._read, key), reply and reply.value)

    async def latest(self, tenant: str) -> list[RequestRecord]:
        """The tenant's records without their rounds, the latest first."""
        if not self._redis.is_on:
            return []
        key = record_key("", hashed_tenant(tenant, self._secret))
        reply = await self._redis.call("record", "LRANGE", key, 0, MAX_LISTED - 1)
        listed = reply.value if reply and isinstance(reply.value, list) else []
        summaries = await unpacked(lambda entries: [*self._summaries(key, entries)], listed)
        oldest_s = time.time() - _LIFE_MS / 1e3  # each record of its own; the list lives longer
        return [each for each in summaries if _ended_s(each) > oldest_s]

    async def _store(self, record: RequestRecord, tenant: str) -> None:
        owner = hashed_tenant(tenant, self._secret)
        key, listing = record_key(record.request_id, owner), record_key("", owner)
        summary = replace(record, rounds=())
        try:
            stored = await packed(partial(self._sealed, key=key), record)
            listed = record.request_id.encode() + self._sealed(summary, key=listing)
        except ValueError:
            return  # too large
        arguments = (stored, listed, _LIFE_MS, MAX_LISTED)
        await self._redis.call("record", "EVAL", _ADD, 2, key, listing, *arguments)

    def _sealed(self, record: RequestRecord, *, key: str) -> bytes:
        return seal(_SEALED.dump_json(_Sealed(record)), key, self._secret, MAX_BYTES)

    def _summaries(self, key: str, listed: list[object]) -> Iterator[RequestRecord]:
        for entry in listed:
            if isinstance(entry, bytes) and (record := self._read(key, entry[_ID_CHARACTERS:])):
                yield record

    def _read(self, key: str, stored: object) -> RequestRecord | None:
        with suppress(ValueError):  # missing, or not stored by this cache
            return _SEALED.validate_json(unseal(key, stored, self._secret, MAX_BYTES)).record
        return None


def _ended_s(record: RequestRecord) -> float:
    """When the request ended, as seconds since the epoch."""
    return record.started_unix_s + record.elapsed_ms / 1e3
