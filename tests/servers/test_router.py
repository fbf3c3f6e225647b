"""The engine behind the real vllm-router and two unmodified vLLM servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from generator_service.settings import GeneratorSettings
from specrej.contracts import Generator, Prompt, Sampling, SessionSpec
from tests.endpoints import scrape
from tests.servers.starting import MODEL, router, vllm_server

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
# By a hash of their keys; all on one of two servers in one of 2^9 runs.
_SESSIONS, _CANDIDATES, _ROUNDS = 10, 4, (16, 32, 64)
_KINDS = ("hits", "queries")
_HEADER = GeneratorSettings.model_fields["remote_affinity_header"].default


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(vllm_server()) for _ in range(2))
        yield list(await asyncio.gather(*opening))


@asynccontextmanager
async def _generator(url: str, header: str) -> AsyncIterator[Generator]:
    # Only here: it imports torch, and all processes of the tests would.
    from generator_service.stock.endpoint import open_endpoint

    own: dict[str, Any] = {
        "model": str(MODEL),
        "remote_url": f"{url}/v1",
        "remote_affinity_header": header,
    }
    generator = await open_endpoint(GeneratorSettings(engine="remote", **own))
    try:
        yield generator
    finally:
        await generator.close()


async def _session(generator: Generator, name: str) -> None:
    """A session of rounds, with cuts to half between."""
    prompt = Prompt(
        text=f"{name}. " + "The history of bridges, from wood over stone to steel. " * 6
    )
    sampling = Sampling(max_tokens=_ROUNDS[-1], seed=1, ignore_eos=True)
    spec = SessionSpec(prompt, _CANDIDATES, sampling, _ROUNDS[0])
    async with generator.open(spec) as session:
        for until_tokens in _ROUNDS:
            live = [candidate.id for candidate in (await session.extend(until_tokens)).candidates]
            if until_tokens < _ROUNDS[-1]:
                await session.prune(live[: len(live) // 2])


async def _found(url: str, servers: Sequence[str], name: str, header: str) -> float:
    """The share of prompt tokens that the servers' caches had; all servers receive some."""

    async def counts() -> list[list[float]]:
        scrapes = [await scrape([f"{server}/metrics"]) for server in servers]
        return [[one.sum(f"vllm:prefix_cache_{kind}_total") for one in scrapes] for kind in _KINDS]

    async with _generator(url, header) as generator:
        before = np.array(await counts())
        await asyncio.gather(*(_session(generator, f"{name} {i}") for i in range(_SESSIONS)))
        hits, queries = np.array(await counts()) - before
    assert all(queries), queries
    return float(hits.sum() / queries.sum())


async def test_rounds_of_a_session_meet_their_prefixes(
    servers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a session's rounds at several servers, and all sessions at one."""
    one = await _found(servers[0], servers[:1], "One", _HEADER)
    async with router(*servers) as url:
        with_key = await _found(url, servers, "Keyed", _HEADER)
        without = await _found(url, servers, "Keyless", "")
    with capsys.disabled():
        print(f"\nfound {one:.3f} by one server, {with_key:.3f} by two, {without:.3f} without keys")
    assert with_key >= 0.8 * one
    assert with_key > (one + without) / 2  # else the header has no effect
