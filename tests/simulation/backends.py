"""Toys in place of generators, reward services and Redis: late, stalled, crashed or refusing.

Each has a `fault`, a text; empty: it works.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from grpc_health.v1 import health_pb2
from redis.exceptions import ResponseError

from generator_service.toy import ToyGenerator
from orchestrator.backends.resolving import Target
from reward_service.kinds.toy import ToyReward
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores, SessionSpec
from specrej.contracts.errors import Unavailable
from tests.simulation.loop import Violation, note_change

REWARDS = ("toy", "other")
_DESCRIBED = tuple(RewardDescription(name, name, "a toy") for name in REWARDS)
OTHER_VERSION = {40: 12, 12: 40}  # `end_every` of the toys: their texts end elsewhere
_REWARD = ToyReward()
_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class Node:
    """A process that serves, and the channel to it. `life` is the number of its crashes."""

    fault = ""  # "down", "upgrade" (down, then of another version), "stall", "slow"
    num_open = 0  # sessions

    def __init__(self, rng: random.Random, address: str) -> None:
        self.target = Target(address, "node")
        method = lambda *_, **__: lambda _: self.call(lambda: _SERVING)  # noqa: E731
        closed = partial(asyncio.sleep, 0)
        self.channel = SimpleNamespace(unary_unary=method, unary_stream=method, close=closed)
        self.life = 0
        self.draw = rng.random

    async def travel(self) -> None:
        """One way to the node or back, in whole milliseconds so that events coincide."""
        await asyncio.sleep(int(self.draw() ** 2 * 8) / (50 if self.fault == "slow" else 1e3))
        while self.fault == "stall":  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def call(self, work: Callable[[], Any], life: int | None = None) -> Any:
        """The result of a call. Raises Unavailable: the node has crashed since it began `life`."""
        life, result = self.life if life is None else life, None
        for is_way_back in (False, True):
            await self.travel()
            if self.life != life or self.fault in ("down", "upgrade"):
                raise Unavailable("the node has crashed")
            result = result if is_way_back else work()
        return result


def at_once(coroutine: Any, changed: Any = None) -> Any:
    """The result of a coroutine that never waits; it may change `changed`."""
    if changed:
        note_change(changed)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise Violation("the toy waits")


def seeded(spec: SessionSpec) -> SessionSpec:
    """With another seed, the only thing the toy's texts depend on: so prompt and tenant count."""
    key = f"{spec.cache_salt}/{spec.prompt.text}/{spec.sampling.seed}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
    return replace(spec, sampling=replace(spec.sampling, seed=seed))


class SimulatedGenerator(Node):
    """A toy; the sessions of an earlier life fail."""

    def __init__(self, rng: random.Random, address: str, capacity_slots: int) -> None:
        super().__init__(rng, address)
        self.toy = ToyGenerator(capacity_slots)

    def check(self) -> None:
        """Raises Violation, AssertionError: slots do not add up, or closed sessions own some."""
        ledger = self.toy.ledger
        ledger.check_integrity()
        self.num_open = ledger.num_sessions
        if ledger.owned and not self.num_open:
            raise Violation(f"{ledger.owned} slots are owned by closed sessions")

    async def describe(self) -> Any:
        return await self.call(lambda: at_once(self.toy.describe()))

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[Any]:
        """A session; a cancelled one ends later at the generator."""
        life, late_s, opened = self.life, self.draw() / 100, list[Any]()
        opening, version = self.toy.open(seeded(spec)), frozenset({f"toy-{self.toy.end_every}"})

        async def call(verb: str, *arguments: Any) -> Any:
            work = lambda: at_once(getattr(opened[0], verb)(*arguments), self)  # noqa: E731
            result = await self.call(work, life)
            return replace(result, made_by=version) if verb == "extend" else result

        try:
            await self.call(lambda: opened.append(at_once(opening.__aenter__(), self)), life)
            verbs = {verb: partial(call, verb) for verb in ("extend", "prune")}
            sizes = {name: getattr(opened[0], name) for name in ("n", "prompt_tokens", "reduced")}
            yield SimpleNamespace(**sizes, **verbs)
            await self.travel()
            late_s = 0.0
        finally:
            if opened:
                closing = lambda: at_once(opening.__aexit__(None, None, None), self)  # noqa: E731
                asyncio.get_running_loop().call_later(late_s, closing)


class SimulatedRewards(Node):
    """A reward service. Faults of its scores: "error", "nan" or "short"."""

    async def describe(self) -> Any:
        return await self.call(lambda: _DESCRIBED)

    @asynccontextmanager
    async def open(self, name: str, prompt: Prompt) -> AsyncIterator[Any]:
        life = await self.call(lambda: self.life)
        self.num_open += 1
        try:
            score = lambda batch: self.call(partial(self._scores, name, batch), life)  # noqa: E731
            yield SimpleNamespace(score=score)
        finally:
            self.num_open -= 1

    def _scores(self, name: str, candidates: Sequence[Candidate]) -> Scores:
        if self.fault == "error":
            raise Unavailable("the reward fails")
        values = _REWARD.score(Prompt(), candidates).values
        wrong = {"nan": (float("nan"),) * len(values), "short": values[1:]}
        return Scores(wrong.get(self.fault, values), len(values), name)


class SimulatedRedis:
    """The server and its keys. Faults: "down", "hangs", "slow" or "full" (it refuses to store)."""

    fault = ""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._values: dict[Any, tuple[Any, float]] = {}  # with their expiry

    def num_leases(self) -> int:
        """Flights that a process leads."""
        return sum(":flight:" in key and len(self._get(key, b"")) > 4 for key in [*self._values])

    def delay_s(self) -> float:
        """One way, in whole milliseconds."""
        return int(self._rng.random() ** 3 * (500 if self.fault == "slow" else 10)) / 1e3

    def run(self, command: Sequence[Any]) -> Any:
        """The reply, or an error of Redis."""
        if self.fault == "full" and command[0] in ("SET", "EVAL", "HSET"):
            return ResponseError("OOM command not allowed")
        match command:
            case ("SET", key, value, *options):
                is_free = "NX" not in options or self._get(key) is None
                return self._put(key, value, options[-1]) if is_free else None
            case ("GETRANGE", key, 0, end):
                return self._get(key, b"")[: end + 1]
            case ("PEXPIRE", key, life_ms):
                return self._get(key) is not None and self._put(key, self._get(key), life_ms)
            case ("EVAL", _, 1, key, token, left, left_ms):  # the release of a lease
                if self._get(key) != token.encode():
                    return 0
                return self._put(key, left, left_ms) if left else self._values.pop(key)[1]
            case ("EVAL", _, 2, key, _, record, _, life_ms, _):  # of an ended request
                return self._put(key, record, life_ms)
            case ("HSET", key, name, value):
                return self._values.setdefault(key, ({}, float("inf")))[0].update({name: value})
            case ("HLEN", key):
                return len(self._get(key, {}))
        raise Violation(f"the simulated Redis lacks {command[0]}")

    def _get(self, key: Any, default: Any = None) -> Any:
        value, until_s = self._values.get(key, (default, float("inf")))
        return value if until_s > asyncio.get_running_loop().time() else default

    def _put(self, key: Any, value: Any, life_ms: int) -> bool:
        stored = value.encode() if isinstance(value, str) else value
        self._values[key] = stored, asyncio.get_running_loop().time() + life_ms / 1e3
        return True


class Link:
    """One process's connections, in place of redis-py's client; with a fault, nothing arrives."""

    fault = ""

    def __init__(self, server: SimulatedRedis) -> None:
        self._server = server

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> Any:
        """The replies; sent commands are executed even if their caller no longer waits."""
        server, loop = self._server, asyncio.get_running_loop()
        replies: Any = loop.create_future()
        deliver = lambda values: replies.done() or replies.set_result(values)  # noqa: E731

        def arrive() -> None:
            if server.fault == "down" and not replies.done():
                replies.set_exception(ConnectionError("refused"))
            elif not self.fault and server.fault not in ("down", "hangs"):
                loop.call_later(server.delay_s(), deliver, [server.run(one) for one in commands])

        loop.call_later(server.delay_s(), arrive)
        return await replies
