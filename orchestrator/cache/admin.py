"""`specrej cache`: list and purge stored answers. It prints JSON lines.

Unlike the cache it reports errors of Redis. Exit codes: 0 success, 2 bad usage or no such key, 3
Redis cannot be reached, 1 any other error. It uses SCAN, as KEYS blocks the server.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from pydantic import ValidationError
from redis import ConnectionPool, Redis
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from orchestrator.cache.keys import PREFIX, hashed_tenant
from orchestrator.cache.redis_client import connection_options
from orchestrator.cache.secret import Secret
from orchestrator.settings import ENV_PREFIX, RedisSettings

TIMEOUT_S = 5.0  # of each call
_BATCH = 500
_BAD_USAGE, _UNREACHABLE = 2, 3


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
    try:
        pool = ConnectionPool(**connection_options(access, in_url, TIMEOUT_S))
        with Redis.from_pool(pool) as redis:
            arguments.run(redis, settings.cache_secret, arguments)
    except AuthenticationError:
        _exit("Redis refuses the credentials: see redis_url and redis_password_file", 1)
    except (OSError, RedisConnectionError, RedisTimeoutError) as error:
        _exit(f"Redis cannot be reached: {error or 'no answer'}", _UNREACHABLE)
    except RedisError as error:
        _exit(f"Redis error: {error}", 1)


def _list(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """All stored answers: their keys, sizes and seconds to live."""
    for key in _keys(redis, secret, arguments.tenant):
        size, left_ms = redis.strlen(key), redis.pttl(key)
        if size:  # else it has expired since the scan
            _print({"key": key, "bytes": size, "ttl_s": left_ms / 1000})


def _purge(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """Delete one answer, or the answers of a tenant, or all of them."""
    if (key := arguments.key) is None:
        keys = _keys(redis, secret, arguments.tenant)  # "": of callers without tokens
    elif key.startswith(f"{PREFIX}:v"):
        keys = [key]
    else:
        _exit(f"not the key of an answer: {key}", _BAD_USAGE)
    if not arguments.yes:
        _exit(f"confirm the purge of {len(keys)} keys with --yes", _BAD_USAGE)
    batches = [keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH)]
    purged = sum(int(redis.unlink(*batch)) for batch in batches)
    _print({"purged": purged})
    if key is not None and not purged:
        _exit(f"no such key: {key}", _BAD_USAGE)


def _keys(redis: Redis, secret: Secret, tenant: str | None) -> list[str]:
    """The keys of all answers, or of a tenant's, each once: SCAN may return one again."""
    owner = "*" if tenant is None else f"*:{hashed_tenant(tenant, secret)}:*"
    keys = redis.scan_iter(match=f"{PREFIX}:v{owner}", count=_BATCH)
    return list(dict.fromkeys(key.decode(errors="replace") for key in keys))


def _print(fields: dict[str, object]) -> None:
    print(json.dumps(fields, ensure_ascii=False))


def _exit(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    print("specrej cache:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej cache", description="List and purge stored answers, as JSON lines."
    )
    common = argparse.ArgumentParser(add_help=False)
    for name, field in RedisSettings.model_fields.items():
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        common.add_argument(flag, help=f"{field.description}; default: {variable}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", parents=[common], help=_list.__doc__)
    listing.set_defaults(run=_list)
    listing.add_argument("--tenant", help="only this tenant's, by its name")
    purging = commands.add_parser("purge", parents=[common], help=_purge.__doc__)
    purging.set_defaults(run=_purge)
    chosen = purging.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", help="answers of a tenant, by its name")
    chosen.add_argument("--key", help="one answer")
    chosen.add_argument("--all", action="store_true", help="all answers")
    purging.add_argument("--yes", action="store_true", help="needed: nothing is purged without it")
    return parser


if __name__ == "__main__":
    main()
