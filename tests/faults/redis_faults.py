"""Faults of Redis: the real server in every bad state, and a way to it that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from redis.asyncio import Redis

from specrej.contracts import CacheControl
from tests.faults.case import Case, here
from tests.faults.proxy import Proxy
from tests.faults.world import Outcome, World, until


@asynccontextmanager
async def redis_client(world: World) -> Any:
    """Straight to the server, past the proxy."""
    client = Redis.from_url(world.stack.redis_url)
    try:
        yield client
    finally:
        await client.aclose()


async def _cached_answers(world: World, seed: int) -> list[Outcome]:
    """Two equal requests that may use the cache, one after the other."""
    options = {"seed": seed, "cache": CacheControl.USE, "max_tokens": 8}
    return [await world.ask(**options), await world.ask(**options)]


def _missed(outcomes: Sequence[Outcome]) -> list[str]:
    """The codes, if both were made anew: a fault that lets the cache answer is none."""
    assert not any(o.generation and o.generation.cached for o in outcomes), "the cache answered"
    return _codes(outcomes)


def _codes(outcomes: Sequence[Outcome], *, most_s: float = 3.0) -> list[str]:
    late = [outcome.seconds for outcome in outcomes if outcome.seconds > most_s]
    assert not late, f"a sick Redis cost {late} s"
    texts = {outcome.generation.best.text for outcome in outcomes if outcome.generation}
    assert len(texts) == 1, f"equal requests, {len(texts)} answers"
    return [outcome.label for outcome in outcomes]


async def redis_through(change: Callable[[Proxy], None], seed: int, world: World) -> list[str]:
    """The way to Redis changes; then it is as before, and works again."""
    change(world.proxies["redis"])
    codes = _missed(await _cached_answers(world, seed))
    await world.proxies["redis"].heal()
    await until(lambda: _is_cached(world, seed))
    return codes


async def _is_cached(world: World, seed: int) -> bool:
    outcomes = await _cached_answers(world, seed)
    return bool(outcomes[1].generation and outcomes[1].generation.cached)


def _slow(proxy: Proxy) -> None:
    proxy.replies.delay_s = 5


def _hang(proxy: Proxy) -> None:
    proxy.replies.shut()


def _reset_mid_reply(proxy: Proxy) -> None:
    proxy.replies.cut_after = 3


def _says(error: str, proxy: Proxy) -> None:
    proxy.answer = f"-{error}\r\n".encode()


async def redis_told(
    before: Sequence[Sequence[str]], after: Sequence[Sequence[str]], seed: int, world: World
) -> list[str]:
    """The real server is brought into a bad state by commands, and out of it again."""
    async with redis_client(world) as client:
        for command in before:
            await client.execute_command(*command)
        codes = _missed(await _cached_answers(world, seed))
        for command in after:
            await client.execute_command(*command)
    await until(lambda: _is_cached(world, seed))
    return codes


async def redis_maxclients(world: World) -> list[str]:
    """The server takes no more connections than the one that said so."""
    async with redis_client(world) as client:
        world.proxies["redis"].cut()
        await client.config_set("maxclients", 1)
        codes = _missed(await _cached_answers(world, 108))
        await client.config_set("maxclients", 1000)
    await until(lambda: _is_cached(world, 108))
    return codes


async def redis_evicts(world: World) -> list[str]:
    """What was stored is gone: the answer is made again, and is the same."""
    async with redis_client(world) as client:
        first = await _cached_answers(world, 109)
        await client.flushall()
        return _codes([*first, *await _cached_answers(world, 109)])


async def redis_value(spoil: Callable[[bytes], bytes], seed: int, world: World) -> list[str]:
    """A stored value that is none: a miss, and replaced."""
    async with redis_client(world) as client:
        await client.flushall()
        first = await _cached_answers(world, seed)
        for key in await client.keys():
            if await client.type(key) == b"string":
                await client.set(key, spoil(await client.get(key)))
        outcomes = await _cached_answers(world, seed)
    assert outcomes[0].generation
    assert not outcomes[0].generation.cached, "a bad value was believed"
    assert outcomes[1].generation
    assert outcomes[1].generation.cached, "a bad value was not replaced"
    return _codes([*first, *outcomes])


def _flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


async def redis_absent(world: World) -> list[str]:
    """An orchestrator that starts without its Redis serves, and finds it later."""
    world.proxies["redis"].refuse()
    await world.stack.restart("orchestrator")
    codes = _missed(await _cached_answers(world, 110))
    await world.proxies["redis"].heal()
    await until(lambda: _is_cached(world, 110))
    return codes


async def redis_killed(world: World) -> list[str]:
    """Killed while 24 requests that would use it are under way."""
    calls = [
        world.call(seed=200 + number, cache=CacheControl.USE, max_tokens=16) for number in range(24)
    ]
    await until(lambda: _runs(world))
    world.kill("redis")
    outcomes = [await call.outcome() for call in calls]
    await world.stack.restart("redis")
    await until(lambda: _is_cached(world, 111))
    return [outcome.label for outcome in outcomes]


async def _runs(world: World) -> bool:
    return (await world.service()).running > 0


async def redis_read_cancelled(world: World) -> list[str]:
    """Reads are given up half-way; connections used again must not give one's reply to another."""
    seeds = range(300, 308)
    right = {seed: (await _cached_answers(world, seed))[1] for seed in seeds}
    replies = world.proxies["redis"].replies
    replies.shut()
    given_up = [world.call(seed=s, cache=CacheControl.USE, max_tokens=8) for s in seeds]
    await replies.held.wait()
    for call in given_up:
        call.cancel()
    codes = [(await call.outcome()).label for call in given_up]
    replies.open()
    for seed in seeds:
        before, again = right[seed], (await _cached_answers(world, seed))[1]
        assert before.generation and again.generation
        assert again.generation.best == before.generation.best, "another request's answer"
        codes.append(again.label)
    return codes


def _cases() -> tuple[Case, ...]:
    ways: dict[str, Callable[[Proxy], None]] = {
        "slow-5s": _slow,
        "hanging": _hang,
        "reset-mid-reply": _reset_mid_reply,
        "loading": partial(_says, "LOADING Redis is loading the dataset in memory"),
        "wrongpass": partial(_says, "WRONGPASS invalid username-password pair"),
        "refused": Proxy.refuse,
    }
    states: dict[str, tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]] = {
        "readonly": ([("REPLICAOF", "127.0.0.1", "1")], [("REPLICAOF", "NO", "ONE")]),
        "oom": ([("CONFIG", "SET", "maxmemory", "1")], [("CONFIG", "SET", "maxmemory", "0")]),
        "noperm": (
            [("ACL", "SETUSER", "default", "-getrange", "-set")],
            [("ACL", "SETUSER", "default", "+getrange", "+set")],
        ),
    }
    values: dict[str, Callable[[bytes], bytes]] = {
        "corrupt": _flipped,
        "truncated": lambda value: value[: len(value) // 2],
        "foreign": lambda value: b'{"somebody": "else"}',
    }
    return (
        *(
            here(
                f"faults/redis-{name}",
                partial(redis_through, change, 400 + number),
                "OK",
                fast=name == "hanging",
            )
            for number, (name, change) in enumerate(ways.items())
        ),
        *(
            here(f"faults/redis-{name}", partial(redis_told, *commands, 500 + number), "OK")
            for number, (name, commands) in enumerate(states.items())
        ),
        *(
            here(
                f"faults/redis-value/{name}",
                partial(redis_value, spoil, 600 + number),
                "OK",
                fast=True,
            )
            for number, (name, spoil) in enumerate(values.items())
        ),
        here("faults/redis-maxclients", redis_maxclients, "OK"),
        here("faults/redis-evicting", redis_evicts, "OK"),
        here("faults/redis-absent-at-start", redis_absent, "OK"),
        here("faults/redis-killed-under-load", redis_killed, "OK", fast=True),
        here("faults/redis-read-cancelled", redis_read_cancelled, "OK", "CANCELLED", fast=True),
    )


CASES = _cases()
