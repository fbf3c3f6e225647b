"""Trust: readers and writers of Redis, tenants, certificates and tokens."""

from __future__ import annotations

import hashlib
import json
import signal
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.cache import Secret, cache_keys
from orchestrator.cache.answers import ENTRY_OVERHEAD_BYTES
from orchestrator.cache.secret import mac
from specrej import wire
from specrej.backend.v1 import generator_pb2, generator_pb2_grpc
from specrej.channel import open_channel
from specrej.contracts import CacheControl, GeometricSchedule, TokensSchedule, WeightedReward
from specrej.credentials import Credentials
from specrej.security import Metadata
from tests.certificates import Authority, Pair, place
from tests.faults.case import Case, here
from tests.faults.redis_faults import redis_client
from tests.faults.world import (
    CACHE_S,
    CACHE_SECRET,
    TENANT_CACHE_BYTES,
    Call,
    World,
    request,
    until,
)
from tests.serving import violations_of

_SALARY = "My salary is 91,000"
_USE: Mapping[str, Any] = {"cache": CacheControl.USE, "max_tokens": 8}
# Seven seconds of steps, with an event every 50 ms.
_LONG: Mapping[str, Any] = {
    "n": 1,
    "max_tokens": 1400,
    "schedule": TokensSchedule(tuple(range(10, 1400, 10))),
}


def _tenant(name: str) -> Metadata:
    return [("specrej-tenant", name)]


async def _answer_keys(client: Any) -> list[str]:
    return sorted(key.decode() for key in await client.keys("specrej:v*"))


def _key_of_guess(prompt: str, seen: str, secret: Secret) -> str:
    """The key of a guessed request; a reader of Redis copies the models from a key it has seen."""
    message = request(prompt, seed=1, **_USE)
    guess = wire.request_from_message(message, GeometricSchedule(), [])
    selection = replace(guess.selection, rewards=(WeightedReward("toy"),))
    _, _, _, generator, reward, *_ = seen.split(":")
    keys = cache_keys(
        replace(guess, selection=selection),
        tenant="",
        generator_fingerprint=generator,
        reward_fingerprint=reward,
        secret=secret,
    )
    return keys.answer


async def guessed_prompt(world: World) -> list[str]:
    """A reader of Redis without the secret cannot confirm a prompt; with it, it could."""
    async with redis_client(world) as client:
        await client.flushall()
        outcome = await world.generate(prompt=_SALARY, seed=1, **_USE)
        (seen,) = await _answer_keys(client)
        assert _key_of_guess(_SALARY, seen, Secret()) != seen, "the guess is confirmed"
        assert _key_of_guess(_SALARY, seen, Secret(Path(world.files, CACHE_SECRET))) == seen
    return [outcome.label]


async def _forged(client: Any, key: str, _: str) -> bytes:
    """A whole value of the right format, with another text and a MAC without the secret."""
    value = await client.get(key)
    entry = json.loads(zlib.decompress(value[32:]))
    entry["generation"]["candidates"][0]["text"] = "FORGED"
    stream = zlib.compress(json.dumps(entry).encode())
    return mac(key, stream, Secret()) + stream


async def _of_another_key(client: Any, _: str, other: str) -> bytes:
    """The genuine answer to another request of the same tenant."""
    value: bytes = await client.get(other)
    return value


async def written_value(
    written: Callable[[Any, str, str], Awaitable[bytes]], world: World
) -> list[str]:
    """A value that a writer of Redis puts under a key is not served, and is replaced."""
    async with redis_client(world) as client:
        await client.flushall()
        first = await world.generate(seed=1, **_USE)
        (key,) = await _answer_keys(client)
        other = await world.generate(seed=2, **_USE)
        (other_key,) = set(await _answer_keys(client)) - {key}
        assert first.generation and other.generation
        assert first.generation.best.text != other.generation.best.text
        await client.set(key, await written(client, key, other_key))
        again = [await world.generate(seed=1, **_USE) for _ in range(2)]
    answers = [outcome.generation for outcome in again]
    assert [answer and answer.cached for answer in answers] == [False, True]
    assert all(answer and answer.best == first.generation.best for answer in answers)
    return [outcome.label for outcome in (first, other, *again)]


async def tenant_flood(world: World) -> list[str]:
    """A tenant that fills its budget loses its own oldest answers, and no other tenant's."""
    async with redis_client(world) as client:
        await client.flushall()
        first = await world.generate(metadata=_tenant("small"), seed=1, **_USE)
        (small_key,) = await _answer_keys(client)
        large = _tenant("large")
        many = [await world.generate(metadata=large, seed=seed, **_USE) for seed in range(40)]
        large_keys = [key for key in await _answer_keys(client) if key != small_key]
        sizes = [await client.strlen(key) + ENTRY_OVERHEAD_BYTES for key in large_keys]
        assert TENANT_CACHE_BYTES / 2 < sum(sizes) <= TENANT_CACHE_BYTES, sizes
    cached = [
        await world.generate(metadata=_tenant(tenant), seed=seed, **_USE)
        for tenant, seed in (("small", 1), ("large", 39), ("large", 0))
    ]
    assert [o.generation and o.generation.cached for o in cached] == [True, True, False]
    return [outcome.label for outcome in (first, *many, *cached)]


async def stopped_loop(world: World) -> list[str]:
    """An orchestrator stopped during a call to Redis uses Redis at once when it continues."""
    first = [await world.generate(seed=seed, **_USE) for seed in (71, 72)]
    replies = world.proxies["redis"].replies
    replies.shut()
    call = world.call(seed=71, **_USE)
    await replies.held.wait()
    world.signal("orchestrator", signal.SIGSTOP)
    replies.open()
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 2 * CACHE_S)
    world.signal("orchestrator", signal.SIGCONT)
    outcomes = [await call.outcome(), await world.generate(seed=72, **_USE)]
    cached = [outcome.generation and outcome.generation.cached for outcome in outcomes]
    assert cached == [True, True], "the pause counted as a failure of Redis"
    return [outcome.label for outcome in (*first, *outcomes)]


# Identity.


async def wrong_name(world: World) -> list[str]:
    """A certificate of the right authority with another program's name may only see health."""
    authority = Authority(world.files)
    server, right, wrong = (
        authority.issue(name, name) for name in ("generator", "orchestrator", "reward")
    )

    def identity(pair: Pair) -> Credentials:
        return Credentials(tls_ca=authority.path, tls_cert=pair.cert, tls_key=pair.key)

    settings = {
        "TLS_CERT": str(server.cert),
        "TLS_KEY": str(server.key),
        "TLS_CLIENT_CA": str(authority.path),
        "ALLOWED_CLIENTS": "orchestrator",
    }
    codes = []
    async with world.another("generator", identity(wrong), **settings) as address:
        for pair in (right, wrong):
            async with open_channel(address, retries=False, **identity(pair)) as channel:
                stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
                describe = stub.Describe(generator_pb2.GeneratorServiceDescribeRequest(), timeout=5)
                session = stub.Session(timeout=5)
                await session.done_writing()
                codes += [(await call.code()).name for call in (describe, session)]
    return codes


async def ended_token(is_expiring: bool, world: World) -> list[str]:
    """A token that is removed, or expires, ends its open stream; other streams go on."""
    path = Path(world.files, "tokens")

    def lines(**expires: str) -> str:
        digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in expires}
        entries = [{"tenant": name, "sha256": digests[name]} for name in expires]
        return "\n".join(
            json.dumps(entry | ({"expires": end} if end else {}))
            for entry, end in zip(entries, expires.values(), strict=True)
        )

    place(path, lines(ending="", staying=""))
    async with world.another("orchestrator", TOKENS_FILE=str(path)) as address:
        calls = [
            Call(address, stream=True, metadata=_bearer(token), **_LONG)
            for token in ("ending", "staying")
        ]
        for call in calls:
            await call.begin()
        began = time.monotonic()
        soon = (datetime.now(UTC) + timedelta(seconds=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
        place(path, lines(ending=soon, staying="") if is_expiring else lines(staying=""))
        ended = await calls[0].outcome()
        seconds = time.monotonic() - began
        again = Call(address, n=1, metadata=_bearer("ending"))
        outcomes = [ended, await again.outcome()]
        num_events = len(calls[1].events)
        await until(lambda: len(calls[1].events) > num_events)
        calls[1].cancel()
        outcomes.append(await calls[1].outcome())
    assert seconds < (5 if is_expiring else 3), f"the stream ended after {seconds:.1f} s"
    return [outcome.code for outcome in outcomes]


def _bearer(token: str) -> Metadata:
    return [("authorization", f"Bearer {token}")]


async def two_tenants(world: World) -> list[str]:
    """A second tenant in the metadata is refused, and neither of them is served."""
    async with redis_client(world) as client:
        await client.flushall()
        outcome = await world.generate(metadata=[*_tenant("own"), *_tenant("victim")], **_USE)
        assert not await client.dbsize()
    assert outcome.error and violations_of(outcome.error) == {
        "specrej-tenant": "must be given once"
    }
    return [outcome.label]


CASES: tuple[Case, ...] = (
    here("trust/redis-guessed-prompt", guessed_prompt, "OK", fast=True),
    here("trust/redis-forged-value", partial(written_value, _forged), "OK x 4", fast=True),
    here("trust/redis-value-of-another-key", partial(written_value, _of_another_key), "OK x 4"),
    here("trust/redis-tenant-flood", tenant_flood, "OK x 44"),
    here("trust/redis-stopped-orchestrator", stopped_loop, "OK x 4", fast=True),
    here("trust/certificate-name", wrong_name, "OK x 2", "PERMISSION_DENIED x 2"),
    here(
        "trust/removed-token",
        partial(ended_token, False),
        "UNAUTHENTICATED x 2",
        "CANCELLED",
    ),
    here("trust/expired-token", partial(ended_token, True), "UNAUTHENTICATED x 2", "CANCELLED"),
    here("trust/two-tenants", two_tenants, "INVALID_ARGUMENT", fast=True),
)
