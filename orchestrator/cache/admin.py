"""`specrej cache`: list, show and purge stored answers; list the purges. It prints JSON lines.

Unlike the cache it reports errors of Redis. Exit codes: 0 success, 2 bad usage or no such key, 3
Redis cannot be reached, 1 any other error. It uses SCAN, as KEYS blocks the server.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from redis import ConnectionPool, Redis
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.cache.answers import CacheEntry, unpack
from orchestrator.cache.keys import FORMAT_VERSION, PREFIX, hashed_tenant
from orchestrator.cache.redis_client import connection_options
from orchestrator.cache.secret import Secret
from orchestrator.settings import ENV_PREFIX, RedisSettings

TIMEOUT_S = 5.0  # of each call
MAX_BYTES = 64 << 20  # of a value that is read
_BATCH = 500
_AUDIT, _AUDIT_SIZE = f"{PREFIX}:audit", 10_000  # a stream of the latest purges
_BAD_USAGE, _UNREACHABLE = 2, 3
_ENTRY = TypeAdapter(CacheEntry)


def main() -> None:
    """Run the command line."""
    arguments = _parser().parse_args()
    given = {name: getattr(arguments, name) for name in RedisSettings.model_fields}
    try:
        settings = RedisSettings(**{k: value for k, value in given.items() if value is not None})
    except ValidationError as error:
        # Not the values: they may contain a password.
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        _exit(f"bad setting {'; '.join(problems)}", _BAD_USAGE)
    access = settings.redis_access
    if not access.url:
        _exit(f"no Redis: set {ENV_PREFIX}REDIS_URL or --redis-url", _BAD_USAGE)
    in_url: Any = parse_url(access.url)  # type: ignore[no-untyped-call]
    command: Callable[[Redis, Secret, argparse.Namespace], None] = arguments.run
    try:
        pool = ConnectionPool(**connection_options(access, in_url, TIMEOUT_S))
        with Redis.from_pool(pool) as redis:
            command(redis, settings.cache_secret, arguments)
    except AuthenticationError:
        _exit("Redis refuses the credentials: see redis_username and redis_password_file", 1)
    except (OSError, RedisConnectionError, RedisTimeoutError) as error:
        _exit(f"Redis cannot be reached: {error or 'no answer'}", _UNREACHABLE)
    except RedisError as error:
        _exit(f"Redis error: {error}", 1)


def _list(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """All stored answers, without their texts."""
    for key in _keys(redis, secret, arguments.tenant):
        if answer := _answer(redis, secret, key):  # else it has expired since the scan
            _print(answer[0])


def _show(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """One stored answer, with its texts."""
    answer = _answer(redis, secret, _answer_key(arguments.key))
    if answer is None:
        _exit(f"no such key: {arguments.key}", _BAD_USAGE)
    fields, entry = answer
    if entry is None:
        _exit(f"not an answer of format {FORMAT_VERSION}, with this secret", 1)
    _print({**fields, "generation": _ENTRY.dump_python(entry, mode="json")["generation"]})


def _purge(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """Delete one answer, or the answers of a tenant, or all of them."""
    if arguments.key is not None:
        what, keys = f"the answer {arguments.key}", [_answer_key(arguments.key)]
    else:
        # "" is the tenant of callers without tokens.
        is_tenant = arguments.tenant is not None
        owner = hashed_tenant(arguments.tenant, secret) if is_tenant else ""
        what = f"all answers of {owner}" if is_tenant else "all answers"
        keys = _keys(redis, secret, arguments.tenant)
    if not arguments.yes:
        if not sys.stdin.isatty():
            _exit("stdin is not a terminal: confirm with --yes", _BAD_USAGE)
        print(f"Purge {what}: {len(keys)} keys? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            _exit("nothing purged", 1)
    # Before the purge: without an entry nothing is deleted.
    by = f"{os.environ.get('USER') or os.getuid()}@{socket.gethostname()}"
    entry: Any = {"by": by, "purge": what, "keys": len(keys)}
    redis.xadd(_AUDIT, entry, maxlen=_AUDIT_SIZE)
    batches = [keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH)]
    purged = sum(int(redis.unlink(*batch)) for batch in batches)
    _print({"purged": purged})
    if arguments.key is not None and not purged:
        _exit(f"no such key: {arguments.key}", _BAD_USAGE)


def _audit(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """The latest purges, youngest first: when, by which user, and what."""
    rows: Any = redis.xrevrange(_AUDIT)
    for number, fields in rows:
        at = datetime.fromtimestamp(int(number.split(b"-")[0]) / 1000, UTC).isoformat()
        _print({"at": at} | {name.decode(): value.decode() for name, value in fields.items()})


def _keys(redis: Redis, secret: Secret, tenant: str | None) -> list[str]:
    """The keys of all answers, or of a tenant's, each once: SCAN may return one again."""
    owner = "*" if tenant is None else f"*:{hashed_tenant(tenant, secret)}:*"
    keys = redis.scan_iter(match=f"{PREFIX}:v{owner}", count=_BATCH)
    return list(dict.fromkeys(key.decode(errors="replace") for key in keys))


def _answer(
    redis: Redis, secret: Secret, key: str
) -> tuple[dict[str, object], CacheEntry | None] | None:
    """Fields and entry of a key; no entry for an unreadable value, None for no value."""
    with redis.pipeline(transaction=False) as pipe:
        pipe.getrange(key, 0, MAX_BYTES)
        pipe.pttl(key)
        value, left_ms = pipe.execute(raise_on_error=False)
    for reply in (value, left_ms):
        if isinstance(reply, NoPermissionError):
            raise reply
    if left_ms == -2:
        return None
    size = len(value) if isinstance(value, bytes) else 0  # an error: of another type
    fields: dict[str, object] = {"key": key, "bytes": size, "ttl_s": left_ms / 1000}
    try:
        entry = unpack(key, value, secret, MAX_BYTES)
    except ValueError:
        return fields, None
    generation = entry.generation
    fields |= {
        "age_s": time.time() - entry.stored_at,
        "n": generation.n,
        "score": generation.best.score,
        "finish": generation.best.finish.value,
        "generator": generation.generator_fingerprint,
        "reward": generation.reward_fingerprint,
    }
    return fields, entry


def _answer_key(key: str) -> str:
    if not key.startswith(f"{PREFIX}:v"):
        _exit(f"not the key of an answer: {key}", _BAD_USAGE)
    return key


def _print(fields: dict[str, object]) -> None:
    print(json.dumps(fields, ensure_ascii=False))


def _exit(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    print("specrej cache:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej cache", description="List, show and purge stored answers, as JSON lines."
    )
    common = argparse.ArgumentParser(add_help=False)
    for name, field in RedisSettings.model_fields.items():
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        common.add_argument(flag, help=f"{field.description}; default: {variable}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    added = {}
    for run in (_list, _show, _purge, _audit):
        name = run.__name__.removeprefix("_")
        added[name] = commands.add_parser(name, parents=[common], help=run.__doc__)
        added[name].set_defaults(run=run)
    added["list"].add_argument("--tenant", help="only this tenant's, by its name")
    added["show"].add_argument("key", metavar="KEY")
    chosen = added["purge"].add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", help="answers of a tenant, by its name")
    chosen.add_argument("--key", help="one answer")
    chosen.add_argument("--all", action="store_true", help="all answers")
    added["purge"].add_argument("--yes", action="store_true", help="skip the confirmation")
    return parser


if __name__ == "__main__":
    main()
