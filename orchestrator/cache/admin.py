"""`specrej cache`: list and purge stored answers. It prints JSON lines.

It reads the orchestrator's environment. Unlike the cache it reports errors of Redis. Exit codes:
0 success, 1 an error of Redis or a purge without --yes, 2 bad usage. It uses SCAN, as KEYS blocks
the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from orchestrator.cache.keys import PREFIX, hashed_tenant
from orchestrator.cache.redis_client import connect
from orchestrator.cache.secret import Secret
from orchestrator.settings import ENV_PREFIX, RedisSettings

TIMEOUT_S = 5.0  # of each call


def main() -> None:
    """Run the command line."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        settings = RedisSettings()
    except ValidationError as error:
        # Not the values: they may contain a password.
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        parser.error(f"bad setting {'; '.join(problems)}")
    if not settings.redis_url:
        parser.error(f"no Redis: set {ENV_PREFIX}REDIS_URL")
    try:
        asyncio.run(_run(settings, arguments))
    except (OSError, RedisError) as error:
        raise SystemExit(f"specrej cache: {error or type(error).__name__}") from None


async def _run(settings: RedisSettings, arguments: argparse.Namespace) -> None:
    async with connect(settings.redis_url, settings.password_path, TIMEOUT_S) as redis:
        await arguments.run(redis, settings.cache_secret, arguments)


async def _list(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """All stored answers: their keys, sizes and seconds to live."""
    for key in await _keys(redis, secret, arguments.tenant):
        size, left_ms = await redis.strlen(key), await redis.pttl(key)
        if size:  # else it has expired since the scan
            print(json.dumps({"key": key, "bytes": size, "ttl_s": left_ms / 1000}))


async def _purge(redis: Redis, secret: Secret, arguments: argparse.Namespace) -> None:
    """Delete the answers of a tenant, or all of them."""
    keys = await _keys(redis, secret, arguments.tenant)  # "": of callers without tokens
    if not arguments.yes:
        raise SystemExit(f"specrej cache: confirm the purge of {len(keys)} keys with --yes")
    print(json.dumps({"purged": sum([await redis.unlink(key) for key in keys])}))


async def _keys(redis: Redis, secret: Secret, tenant: str | None) -> list[str]:
    """The keys of all answers, or of a tenant's, each once: SCAN may return one again."""
    owner = "*" if tenant is None else f"*:{hashed_tenant(tenant, secret)}:*"
    keys = redis.scan_iter(match=f"{PREFIX}:v{owner}", count=500)
    return list(dict.fromkeys([key.decode(errors="replace") async for key in keys]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej cache", description="List and purge stored answers, as JSON lines."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help=_list.__doc__)
    listing.set_defaults(run=_list)
    listing.add_argument("--tenant", help="only this tenant's, by its name")
    purging = commands.add_parser("purge", help=_purge.__doc__)
    purging.set_defaults(run=_purge)
    chosen = purging.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", help="answers of a tenant, by its name")
    chosen.add_argument("--all", action="store_true", help="all answers")
    purging.add_argument("--yes", action="store_true", help="needed: nothing is purged without it")
    return parser


if __name__ == "__main__":
    main()
