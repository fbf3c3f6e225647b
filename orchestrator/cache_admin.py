"""`specrej cache`: look into the answer cache, and empty it.

Unlike the cache it is for people, so it says what is wrong with Redis. Exit codes: 0 done, 2 bad
usage or no such key, 3 Redis cannot be reached, 1 anything else. Never asks for KEYS, which would
hold up a server that is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.envelope import Envelope, unpack
from orchestrator.keys import FORMAT_VERSION, PREFIX, tenant_digest
from orchestrator.settings import ENV_PREFIX, RedisSettings
from orchestrator.store import connect
from specrej.contracts import Generation

TIMEOUT_S = 5.0  # of each call
MAX_BYTES = 64 << 20  # of a value that is looked at
_BATCH = 500
_ANSWERS = f"{PREFIX}:v*"
_INDEXES = f"{PREFIX}:family:v*"
_FLIGHTS = f"{PREFIX}:flight:v*"
_BAD_USAGE, _UNREACHABLE = 2, 3

_GENERATION = TypeAdapter(Generation)


class AdminError(Exception):
    """What stops the command: one line, and the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer, but for its text; what cannot be read has only the first four."""

    key: str
    tenant: str  # a digest of its name
    bytes: int
    ttl_s: float  # left; -1: for ever
    age_s: float | None = None
    n: int | None = None
    score: float | None = None
    finish: str = ""
    vetoed: bool = False
    generator: str = ""
    reward: str = ""


def main() -> None:
    """The command line."""
    arguments = _arguments().parse_args()
    try:
        asyncio.run(_run(arguments))
    except AdminError as error:
        _note(str(error))
        raise SystemExit(error.code) from None
    except AuthenticationError:
        _note("Redis does not let us in: see redis_username and redis_password_file")
        raise SystemExit(1) from None
    except (TimeoutError, OSError, RedisConnectionError, RedisTimeoutError) as error:
        _note(f"Redis cannot be reached: {_line(error) or 'no answer'}")
        raise SystemExit(_UNREACHABLE) from None
    except RedisError as error:
        _note(f"Redis says: {_line(error)}")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


async def _run(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments)
    if not settings.redis_url:
        raise AdminError(f"no Redis: set {ENV_PREFIX}REDIS_URL or --redis-url", _BAD_USAGE)
    redis = connect(settings.redis_access, TIMEOUT_S)
    command: Callable[[Redis, argparse.Namespace], Awaitable[None]] = arguments.run
    try:
        await command(redis, arguments)
    finally:
        await redis.aclose()


def _settings(arguments: argparse.Namespace) -> RedisSettings:
    given = {name: value for name, value in vars(arguments).items() if name.startswith("redis_")}
    try:
        return RedisSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        # Not the values: they may hold a password.
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        raise AdminError(f"bad setting {'; '.join(problems)}", _BAD_USAGE) from None


async def _stats(redis: Redis, arguments: argparse.Namespace) -> None:
    """How much is stored, of what age, for how many tenants."""
    entries = [entry async for entry in _entries(redis, _ANSWERS)]
    ages = [entry.age_s for entry in entries if entry.age_s is not None]
    found = {
        "answers": len(entries),
        "unreadable": len(entries) - len(ages),
        "bytes": sum(entry.bytes for entry in entries),
        "tenants": len({entry.tenant for entry in entries}),
        "generators": len({entry.generator for entry in entries} - {""}),
        "rewards": len({entry.reward for entry in entries} - {""}),
        "youngest_s": min(ages, default=None),
        "oldest_s": max(ages, default=None),
        "indexes": await _count(redis, _INDEXES),
        "flights": await _count(redis, _FLIGHTS),
    }
    if arguments.json:
        _print_json(found)
        return
    for name, value in found.items():
        print(f"{name:<11} {'-' if value is None else f'{value:,.0f}'}")


async def _list(redis: Redis, arguments: argparse.Namespace) -> None:
    """All stored answers, without their texts."""
    entries = [entry async for entry in _entries(redis, _pattern(_ANSWERS, arguments.tenant))]
    entries.sort(key=lambda entry: (entry.age_s is None, entry.age_s))
    if arguments.json:
        _print_json([asdict(entry) for entry in entries])
        return
    print(_row("AGE", "TTL", "BYTES", "N", "SCORE", "END", "GENERATOR", "REWARD", "KEY"))
    for entry in entries:
        print(_entry_row(entry))


async def _show(redis: Redis, arguments: argparse.Namespace) -> None:
    """One stored answer, with its texts."""
    key = _answer_key(arguments.key)
    value, ttl_s = await _value(redis, key), await _ttl_s(redis, key)
    if value is None:
        raise AdminError(f"no such key: {key}", _BAD_USAGE)
    entry, envelope = _entry(key, value, ttl_s), _envelope(key, value)
    if envelope is None:
        raise AdminError(f"not an answer of format {FORMAT_VERSION}: {len(value)} bytes")
    if arguments.json:
        generation = _GENERATION.dump_python(envelope.generation, mode="json")
        _print_json({**asdict(entry), "generation": generation})
        return
    for name, value_of in asdict(entry).items():
        print(f"{name:<11} {value_of}")
    for ranked in envelope.generation.candidates:
        print(f"\n[{ranked.score:.4f}, candidate {ranked.id}] {ranked.text}")


async def _purge(redis: Redis, arguments: argparse.Namespace) -> None:
    """Forget one answer, those of a tenant, or all."""
    if arguments.key:
        what, keys = f"the answer {arguments.key}", [_answer_key(arguments.key)]
    else:
        named = arguments.tenant is not None  # "" is the tenant of callers without tokens
        what = f"all answers of tenant {arguments.tenant!r}" if named else "all answers"
        patterns = (_pattern(each, arguments.tenant) for each in (_ANSWERS, _INDEXES))
        keys = [key for pattern in patterns async for key in _scan(redis, pattern)]
    if not arguments.yes:
        _confirm(f"Purge {what}: {len(keys)} keys?")
    purged = 0
    for start in range(0, len(keys), _BATCH):
        purged += int(await _call(redis, "UNLINK", *keys[start : start + _BATCH]))
    if arguments.json:
        _print_json({"purged": purged})
    else:
        print(f"{purged} keys purged")
    if arguments.key and not purged:
        raise AdminError(f"no such key: {arguments.key}", _BAD_USAGE)


async def _entries(redis: Redis, pattern: str) -> AsyncIterator[Entry]:
    async for key in _scan(redis, pattern):
        value = await _value(redis, key)
        if value is not None:  # else it has just expired
            yield _entry(key, value, await _ttl_s(redis, key))


def _entry(key: str, value: bytes, ttl_s: float) -> Entry:
    parts = key.split(":")
    tenant = parts[2] if len(parts) > 2 else ""
    envelope = _envelope(key, value)
    if envelope is None:
        return Entry(key, tenant, len(value), ttl_s)
    generation = envelope.generation
    return Entry(
        key,
        tenant,
        len(value),
        ttl_s,
        age_s=time.time() - envelope.stored_at,
        n=generation.n,
        score=generation.best.score,
        finish=generation.best.finish.value,
        vetoed=generation.best.vetoed,
        generator=generation.generator_fingerprint,
        reward=generation.reward_fingerprint,
    )


def _envelope(key: str, value: bytes) -> Envelope | None:
    try:
        return unpack(key, value, MAX_BYTES)
    except ValueError:
        return None


def _entry_row(entry: Entry) -> str:
    return _row(
        "-" if entry.age_s is None else f"{entry.age_s:.0f}",
        f"{entry.ttl_s:.0f}",
        str(entry.bytes),
        "-" if entry.n is None else str(entry.n),
        "-" if entry.score is None else f"{entry.score:.4f}",
        ("vetoed" if entry.vetoed else entry.finish) or "-",
        entry.generator[:12] or "-",
        entry.reward[:12] or "-",
        entry.key,
    )


def _row(*cells: str) -> str:
    widths = (7, 7, 9, 5, 10, 6, 12, 12, 0)
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))


async def _scan(redis: Redis, pattern: str) -> AsyncIterator[str]:
    """Keys of a pattern, each once; SCAN may tell of one again."""
    seen: set[str] = set()
    cursor: object = 0
    while True:
        cursor, keys = await _call(redis, "SCAN", str(cursor), "MATCH", pattern, "COUNT", _BATCH)
        for raw in keys:
            key = raw.decode(errors="replace")
            if key not in seen:
                seen.add(key)
                yield key
        if int(str(cursor)) == 0:
            return


async def _count(redis: Redis, pattern: str) -> int:
    return sum([1 async for _ in _scan(redis, pattern)])


async def _value(redis: Redis, key: str) -> bytes | None:
    """None for a key that is not there; b"" for what is no string."""
    kind = await _call(redis, "TYPE", key)
    if kind == b"none":
        return None
    if kind != b"string":
        return b""
    value = await _call(redis, "GETRANGE", key, 0, MAX_BYTES)
    return bytes(value)


async def _ttl_s(redis: Redis, key: str) -> float:
    left_ms = int(await _call(redis, "PTTL", key))
    return left_ms / 1000 if left_ms >= 0 else -1.0


async def _call(redis: Redis, *command: str | int) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


def _pattern(pattern: str, tenant: str | None) -> str:
    return pattern if tenant is None else f"{pattern}:{tenant_digest(tenant)}:*"


def _answer_key(key: str) -> str:
    if not key.startswith(f"{PREFIX}:v"):
        raise AdminError(f"not the key of an answer: {key}", _BAD_USAGE)
    return key


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise AdminError("nobody to ask: say --yes", _BAD_USAGE)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise AdminError("nothing purged")


def _print_json(found: Mapping[str, object] | Sequence[object]) -> None:
    print(json.dumps(found, ensure_ascii=False, indent=2))


def _note(text: str) -> None:
    print(f"specrej cache: {text}", file=sys.stderr)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej cache", description="Look into the answer cache, and empty it."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON value")
    for name, field in RedisSettings.model_fields.items():
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        common.add_argument(flag, help=f"{field.description}; default: {variable}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., Awaitable[None]]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=run.__doc__)
        command.set_defaults(run=run)
        return command

    add("stats", _stats)
    add("list", _list).add_argument("--tenant", help="this tenant's only, by its name")
    add("show", _show).add_argument("key", metavar="KEY")
    purge = add("purge", _purge)
    chosen = purge.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", help="the answers of a tenant, by its name")
    chosen.add_argument("--key", help="one answer")
    chosen.add_argument("--all", action="store_true", help="every answer")
    purge.add_argument("--yes", action="store_true", help="do not ask")
    return parser


if __name__ == "__main__":
    main()
