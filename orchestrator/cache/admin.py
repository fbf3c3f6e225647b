"""`specrej cache`: list, show and purge stored answers; list the purges.

Unlike the cache it reports errors of Redis. Exit codes: 0 success, 2 bad usage or no such key, 3
Redis cannot be reached, 1 any other error. It uses SCAN, as KEYS blocks the server.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
_ANSWERS = f"{PREFIX}:v*"
_INDEXES = f"{PREFIX}:comparable:v*"
_TENANTS = f"{PREFIX}:tenant:v*"
_RECORDS = f"{PREFIX}:record:v*"
_LEASES = f"{PREFIX}:flight:v*"
_BAD_USAGE, _UNREACHABLE = 2, 3
# The columns of `list`, with their widths.
_COLUMNS = {"age_s": 7, "ttl_s": 7, "bytes": 9, "n": 5, "score": 10, "finish": 6}
_COLUMNS |= {"vetoed": 6, "generator": 12, "reward": 12}

_ENTRY = TypeAdapter(CacheEntry)

# The fields of an answer in JSON output; an unreadable value has only the first four.
Fields = dict[str, str | int | float | bool | None]


def main() -> None:
    """Run the command line."""
    try:
        _run(_parser().parse_args())
    except AuthenticationError:
        _exit("Redis refuses the credentials: see redis_username and redis_password_file", 1)
    except (OSError, RedisConnectionError, RedisTimeoutError) as error:
        _exit(f"Redis cannot be reached: {error or 'no answer'}", _UNREACHABLE)
    except RedisError as error:
        _exit(f"Redis error: {error}", 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run(arguments: argparse.Namespace) -> None:
    flags = {name: getattr(arguments, name) for name in RedisSettings.model_fields}
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        settings = RedisSettings(**given)
    except ValidationError as error:
        # Not the values: they may contain a password.
        problems = (f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
        _exit(f"bad setting {'; '.join(problems)}", _BAD_USAGE)
    access = settings.redis_access
    if not access.url:
        _exit(f"no Redis: set {ENV_PREFIX}REDIS_URL or --redis-url", _BAD_USAGE)
    in_url: Any = parse_url(access.url)  # type: ignore[no-untyped-call]
    options = connection_options(access, in_url, TIMEOUT_S)
    with Redis.from_pool(ConnectionPool(**options)) as redis:
        command: Callable[[_Store, argparse.Namespace], None] = arguments.run
        command(_Store(redis, settings.cache_secret), arguments)


class _Store:
    """The keys and answers in a Redis."""

    def __init__(self, redis: Redis, secret: Secret) -> None:
        self.redis = redis
        self._secret = secret

    def keys(self, pattern: str, tenant: str | None = None) -> list[str]:
        """The keys of a pattern, of a tenant or all, each once: SCAN may return one again."""
        if tenant is not None:
            pattern = f"{pattern}:{self.tenant(tenant)}*"
        keys = self.redis.scan_iter(match=pattern, count=_BATCH)
        return list(dict.fromkeys(key.decode(errors="replace") for key in keys))

    def tenant(self, name: str) -> str:
        """The keyed hash of a tenant's name, as in keys."""
        return hashed_tenant(name, self._secret)

    def answers(
        self, pattern: str, tenant: str | None = None
    ) -> Iterator[tuple[Fields, CacheEntry | None]]:
        """Fields and entry of each answer."""
        for key in self.keys(pattern, tenant):
            if answer := self.answer(key):  # else it has expired since the scan
                yield answer

    def answer(self, key: str) -> tuple[Fields, CacheEntry | None] | None:
        """Fields and entry of a key; no entry for an unreadable value, None for no value."""
        with self.redis.pipeline(transaction=False) as pipe:
            pipe.getrange(key, 0, MAX_BYTES)
            pipe.pttl(key)
            value, left_ms = pipe.execute(raise_on_error=False)
        for reply in (value, left_ms):
            if isinstance(reply, NoPermissionError):
                raise reply
        if left_ms == -2:
            return None
        try:
            entry = unpack(key, value, self._secret, MAX_BYTES)
        except ValueError:
            entry = None
        return _fields(key, value, left_ms, entry), entry


def _stats(store: _Store, arguments: argparse.Namespace) -> None:
    """How many answers, bytes and tenants are stored, and the answers' ages."""
    answers = [fields for fields, _ in store.answers(_ANSWERS)]
    ages = [float(fields["age_s"]) for fields in answers if fields["age_s"] is not None]
    stats = {
        "answers": len(answers),
        "unreadable": len(answers) - len(ages),
        "bytes": sum(int(fields["bytes"] or 0) for fields in answers),
        "tenants": len({fields["tenant"] for fields in answers}),
        "generators": len({fields["generator"] for fields in answers} - {""}),
        "rewards": len({fields["reward"] for fields in answers} - {""}),
        "youngest_s": min(ages, default=None),
        "oldest_s": max(ages, default=None),
        "indexes": len(store.keys(_INDEXES)),
        "flights": len(store.keys(_LEASES)),
    }
    _print_fields(stats, as_json=arguments.json)


def _list(store: _Store, arguments: argparse.Namespace) -> None:
    """All stored answers, youngest first, without their texts."""
    answers = [fields for fields, _ in store.answers(_ANSWERS, arguments.tenant)]
    answers.sort(key=lambda fields: (fields["age_s"] is None, fields["age_s"]))
    if arguments.json:
        print(json.dumps(answers, indent=2))
        return
    print(*(f"{name:<{width}}" for name, width in _COLUMNS.items()), "key")
    for fields in answers:
        cells = (_cell(fields[name])[:width].ljust(width) for name, width in _COLUMNS.items())
        print(*cells, fields["key"])


def _show(store: _Store, arguments: argparse.Namespace) -> None:
    """One stored answer, with its texts."""
    key = _answer_key(arguments.key)
    answer = store.answer(key)
    if answer is None:
        _exit(f"no such key: {key}", _BAD_USAGE)
    fields, entry = answer
    if entry is None:
        _exit(f"not an answer of format {FORMAT_VERSION}, with this secret", 1)
    if arguments.json:
        generation = _ENTRY.dump_python(entry, mode="json")["generation"]
        _print_fields({**fields, "generation": generation}, as_json=True)
        return
    _print_fields(fields)
    for ranked in entry.generation.candidates:
        print(f"\n[{ranked.score:.4f}, candidate {ranked.id}] {ranked.text}")


def _purge(store: _Store, arguments: argparse.Namespace) -> None:
    """Delete one answer, or the answers and request records of a tenant, or all of them."""
    if arguments.key is not None:
        what, keys = f"the answer {arguments.key}", [_answer_key(arguments.key)]
    else:
        # "" is the tenant of callers without tokens.
        is_tenant = arguments.tenant is not None
        what = f"all answers of {store.tenant(arguments.tenant)}" if is_tenant else "all answers"
        kinds = (_ANSWERS, _INDEXES, _TENANTS, _RECORDS)
        keys = [key for kind in kinds for key in store.keys(kind, arguments.tenant)]
    if not arguments.yes:
        _confirm(f"Purge {what}: {len(keys)} keys?")
    # Before the purge: without an entry nothing is deleted.
    entry: Any = {"by": f"{_user()}@{socket.gethostname()}", "purge": what, "keys": len(keys)}
    store.redis.xadd(_AUDIT, entry, maxlen=_AUDIT_SIZE)
    batches = [keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH)]
    purged = sum(int(store.redis.unlink(*batch)) for batch in batches)
    _print_fields({"purged": purged}, as_json=arguments.json)
    if arguments.key is not None and not purged:
        _exit(f"no such key: {arguments.key}", _BAD_USAGE)


def _user() -> str:
    """The name of this process's user, or its number: in a container it may have no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _audit(store: _Store, arguments: argparse.Namespace) -> None:
    """The latest purges, youngest first: when, by which user, and what."""
    rows: Any = store.redis.xrevrange(_AUDIT)
    entries = [
        {"at": datetime.fromtimestamp(int(number.split(b"-")[0]) / 1000, UTC).isoformat()}
        | {name.decode(): value.decode() for name, value in fields.items()}
        for number, fields in rows
    ]
    if arguments.json:
        print(json.dumps(entries, indent=2))
        return
    for entry in entries:
        print(*entry.values(), sep="  ")


def _fields(key: str, value: object, left_ms: int, entry: CacheEntry | None) -> Fields:
    generation = entry and entry.generation
    return {
        "key": key,
        "tenant": key.split(":")[2] if key.count(":") > 1 else "",  # a keyed hash of its name
        "bytes": len(value) if isinstance(value, bytes) else 0,  # an error: of another type
        "ttl_s": left_ms / 1000 if left_ms >= 0 else -1.0,  # left; -1: without expiry
        "age_s": time.time() - entry.stored_at if entry else None,
        "n": generation.n if generation else None,
        "score": generation.best.score if generation else None,
        "finish": generation.best.finish.value if generation else "",
        "vetoed": generation.best.vetoed if generation else False,
        "generator": generation.generator_fingerprint if generation else "",
        "reward": generation.reward_fingerprint if generation else "",
    }


def _answer_key(key: str) -> str:
    if not key.startswith(f"{PREFIX}:v"):
        _exit(f"not the key of an answer: {key}", _BAD_USAGE)
    return key


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        _exit("stdin is not a terminal: confirm with --yes", _BAD_USAGE)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        _exit("nothing purged", 1)


def _cell(value: object) -> str:
    if value in (None, ""):
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _print_fields(fields: Mapping[str, object], *, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(fields, ensure_ascii=False, indent=2))
        return
    for name, value in fields.items():
        print(f"{name:<11} {_cell(value)}")


def _exit(message: str, code: int) -> NoReturn:
    """End the command with one line on stderr."""
    print("specrej cache:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrej cache", description="List, show and purge stored answers."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON value")
    for name, field in RedisSettings.model_fields.items():
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        common.add_argument(flag, help=f"{field.description}; default: {variable}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    added = {}
    for run in (_stats, _list, _show, _purge, _audit):
        name = run.__name__.removeprefix("_")
        added[name] = commands.add_parser(name, parents=[common], help=run.__doc__)
        added[name].set_defaults(run=run)
    added["list"].add_argument("--tenant", help="only this tenant's, by its name")
    added["show"].add_argument("key", metavar="KEY")
    chosen = added["purge"].add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", help="answers and request records of a tenant, by its name")
    chosen.add_argument("--key", help="one answer")
    chosen.add_argument("--all", action="store_true", help="all answers and request records")
    added["purge"].add_argument("--yes", action="store_true", help="skip the confirmation")
    return parser


if __name__ == "__main__":
    main()
