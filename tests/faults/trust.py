"""Trust: readers and writers of Redis, tenants, certificates and tokens."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.cache import Secret
from orchestrator.cache.keys import hashed_tenant, tenant_key
from specrej.contracts import CacheControl
from tests.faults.case import Case, here
from tests.faults.redis_faults import redis_client
from tests.faults.world import CACHE_S, CACHE_SECRET, World, until

_USE: Mapping[str, Any] = {"cache": CacheControl.USE, "max_tokens": 8}


async def guessed_owner(world: World) -> list[str]:
    """A reader of Redis without the secret can guess no part of a key; with it, it could."""
    secrets = {Secret(): False, Secret(Path(world.files, CACHE_SECRET)): True}
    async with redis_client(world) as client:
        await client.flushall()
        outcome = await world.generate(seed=1, **_USE)
        for secret, is_known in secrets.items():
            owner = hashed_tenant("", secret)
            # The answer, and the index of the tenant's answers, which its budget needs.
            assert bool(await client.keys(f"specrej:v*:{owner}:*")) == is_known
            assert bool(await client.exists(tenant_key(owner))) == is_known
    return [outcome.label]


async def stopped_loop(world: World) -> list[str]:
    """An orchestrator stopped during a call to Redis uses Redis at once when it continues."""
    first = [await world.generate(seed=seed, **_USE) for seed in (71, 72)]
    replies = world.proxies["redis"].replies
    replies.shut()
    call = world.call(seed=71, **_USE)
    await replies.held.wait()
    world.signal("orchestrator", signal.SIGSTOP)
    replies.open()
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 2 * CACHE_S)
    world.signal("orchestrator", signal.SIGCONT)
    outcomes = [await call.outcome(), await world.generate(seed=72, **_USE)]
    cached = [outcome.generation and outcome.generation.cached for outcome in outcomes]
    assert cached == [True, True], "the pause counted as a failure of Redis"
    return [outcome.label for outcome in (*first, *outcomes)]


_BAD_ENTRY = "orchestrator/test_cache.py::test_a_bad_entry_is_a_miss_and_is_replaced"
_SECURITY = "specrej/test_security.py"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("redis-forged-value", "redis-value-of-another-key"), _BAD_ENTRY),
    "redis-tenant-flood": "orchestrator/test_tenant_bytes.py"
    "::test_a_tenants_oldest_answers_make_room",
    "certificate-name": "specrej/test_tls.py::test_only_allowed_names_are_served",
    **dict.fromkeys(
        ("removed-token", "expired-token"),
        f"{_SECURITY}::test_a_token_that_ends_ends_its_running_calls",
    ),
    "two-tenants": f"{_SECURITY}::test_a_call_with_two_tenants_is_not_served",
}

CASES: tuple[Case, ...] = (
    here("trust/redis-guessed-owner", guessed_owner, "OK", fast=True),
    here("trust/redis-stopped-orchestrator", stopped_loop, "OK x 4", fast=True),
    *(Case(f"trust/{name}", elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
)
