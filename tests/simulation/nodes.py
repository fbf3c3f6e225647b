"""The processes around the orchestrators: generators and rewards of toys, clients' ways, and Redis.

Each has a `fault`, a text; empty: it works.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from orchestrator.backends.resolving import Target
from reward_service.kinds.toy import ToyReward
from reward_service.servicer import RewardServicer
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores, SessionSpec
from specrej.contracts.errors import Unavailable
from tests.simulation.loop import Violation, note_change
from tests.simulation.wire import Server

REWARDS = ("toy", "other")
OTHER_VERSION = {40: 12, 12: 40}  # `end_every` of the toys: their texts end elsewhere
LEASE_S = 10.0
_REWARD = ToyReward()


class Node:
    """A process that serves, and the network to it."""

    # "down", "upgrade" (down, then of another version), "refuse" (new calls), "stall", "slow"
    fault = ""

    def __init__(self, rng: random.Random, address: str, *services: Any) -> None:
        self.target = Target(address, "node")
        self.server = Server(*services, max_deadline_s=None)
        self._draw = rng.random
        self.had_faults: set[str] = set()

    async def travel(self) -> None:
        """One way to the node or back, in whole milliseconds so that events coincide."""
        await asyncio.sleep(int(self._draw() ** 2 * 8) / (50 if self.fault == "slow" else 1e3))
        while self.fault == "stall":  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def num_open(self) -> int:
        """Sessions."""
        raise NotImplementedError

    def set_fault(self, fault: str) -> None:
        """Begin or, with an empty text, end a fault."""
        self.fault = fault
        self.had_faults |= {fault} - {""}
        if fault in ("down", "upgrade"):
            self.server.crash()
        else:
            self.server.is_down = False
        self.server.refuses = fault == "refuse"


def seeded(spec: SessionSpec, version: int) -> SessionSpec:
    """With another seed, the only thing the toy's texts depend on: so prompt, tenant and version
    count."""
    text = spec.prompt.turns[-1].content
    key = f"{spec.cache_salt}/{text}/{spec.sampling.seed}/{version}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
    return replace(spec, sampling=replace(spec.sampling, seed=seed))


class _Toy(ToyGenerator):
    def open(self, spec: SessionSpec) -> Any:
        return super().open(seeded(spec, self.end_every))


class GeneratorNode(Node):
    """The generator's servicer on a toy."""

    def __init__(self, rng: random.Random, address: str, slots: int, step_s: float = 0.0) -> None:
        self.toy = _Toy(slots, step_s=step_s, on_step=lambda _: note_change(self))
        servicer = GeneratorServicer(lease_s=LEASE_S)
        servicer.load(self.toy)
        super().__init__(rng, address, servicer.service())

    def set_fault(self, fault: str) -> None:
        super().set_fault(fault)
        if fault == "upgrade":
            self.toy.end_every = OTHER_VERSION[self.toy.end_every]

    def num_open(self) -> int:
        return self.toy.ledger.num_sessions

    def check(self) -> None:
        """Raises Violation, AssertionError: slots do not add up, or closed sessions own some."""
        ledger = self.toy.ledger
        ledger.check_integrity()
        if ledger.owned and not ledger.num_sessions:
            raise Violation(f"{ledger.owned} slots are owned by closed sessions")


class RewardNode(Node):
    """The reward service's servicer. Faults of its scores: "error", "nan" or "short"."""

    def __init__(self, rng: random.Random, address: str) -> None:
        self._num_open = 0
        servicer = RewardServicer(max_batch=64, lease_s=10 * LEASE_S)
        workers: Any = [
            SimpleNamespace(
                description=RewardDescription(name, name, "a toy"), max_batch=64, open=self._open
            )
            for name in REWARDS
        ]
        servicer.serve(workers)
        super().__init__(rng, address, servicer.service())

    def num_open(self) -> int:
        return self._num_open

    @asynccontextmanager
    async def _open(self, prompt: Prompt, data: str) -> AsyncIterator[Any]:
        self._num_open += 1
        try:
            yield SimpleNamespace(score=self._score)
        finally:
            self._num_open -= 1

    async def _score(self, candidates: Sequence[Candidate]) -> Scores:
        if self.fault == "error":
            raise Unavailable("the reward fails")
        values = _REWARD.score(Prompt(), candidates).values
        wrong = {"nan": (float("nan"),) * len(values), "short": values[1:]}
        return Scores(wrong.get(self.fault, values), len(values))


class SimulatedRedis:
    """The server and its keys. Faults: "down", "hangs", "slow" or "full" (it refuses to store)."""

    fault = ""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._values: dict[Any, tuple[Any, float]] = {}  # with their expiry

    def set_fault(self, fault: str) -> None:
        self.fault = fault

    def num_leases(self) -> int:
        """Flights that a process leads."""
        return sum(":flight:" in key and len(self._get(key, b"")) > 4 for key in [*self._values])

    def delay_s(self) -> float:
        """One way, in whole milliseconds."""
        return int(self._rng.random() ** 3 * (500 if self.fault == "slow" else 10)) / 1e3

    def run(self, command: Sequence[Any]) -> Any:
        """The reply, or an error of Redis."""
        if self.fault == "full" and command[0] == "SET":
            return ResponseError("OOM command not allowed")
        match command:
            case ("PING",):
                return True
            case ("SET", key, value, *options):
                is_free = "NX" not in options or self._get(key) is None
                life_ms = options[options.index("PX") + 1]
                return self._put(key, value, life_ms) if is_free else None
            case ("GET", key):
                return self._get(key)
            case ("GETRANGE", key, 0, end):
                return self._get(key, b"")[: end + 1]
            case ("EVALSHA", _, 1, key, token):  # the release of a lock
                is_own = self._get(key) == token
                return int(is_own and bool(self._values.pop(key)))
            case ("EVALSHA", _, 1, key, token, life_ms):  # its renewal
                is_own = self._get(key) == token
                return int(is_own and self._put(key, token, int(life_ms)))
        raise Violation(f"the simulated Redis lacks {command[0]}")

    def _get(self, key: Any, default: Any = None) -> Any:
        value, until_s = self._values.get(key, (default, float("inf")))
        return value if until_s > asyncio.get_running_loop().time() else default

    def _put(self, key: Any, value: Any, life_ms: int) -> bool:
        stored = value.encode() if isinstance(value, str) else value
        self._values[key] = stored, asyncio.get_running_loop().time() + life_ms / 1e3
        return True


class Link(Redis):
    """One process's connections to Redis; with a fault, nothing arrives."""

    fault = ""

    def __init__(self, server: SimulatedRedis) -> None:
        super().__init__()
        self._server = server

    def set_fault(self, fault: str) -> None:
        self.fault = fault

    async def execute_command(self, *command: Any, **_: Any) -> Any:
        """The reply; a sent command is executed even if its caller no longer waits."""
        server, loop = self._server, asyncio.get_running_loop()
        reply: Any = loop.create_future()
        deliver = lambda value: reply.done() or reply.set_result(value)  # noqa: E731

        def arrive() -> None:
            if server.fault == "down" and not reply.done():
                reply.set_exception(ConnectionError("refused"))
            elif not self.fault and server.fault not in ("down", "hangs"):
                loop.call_later(server.delay_s(), deliver, server.run(command))

        loop.call_later(server.delay_s(), arrive)
        value = await reply
        if isinstance(value, ResponseError):
            raise value
        return value
