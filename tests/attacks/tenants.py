"""Attacks of one tenant on another's answers, over the wire, on real processes.

`python -m tests.attacks.tenants rows --seconds 45` prints a table, and as its last line one JSON
object. The victim sends one request after the other, alone and then beside the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc.aio

from deploy.local.stack import Stack
from specrej.client.channel import open_channel
from specrej.client.client import build_request
from specrej.contracts import CacheControl, JsonSchema
from specrej.security import TENANT_METADATA
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc

_CALL_S = {"victim": 60.0, "attacker": 20.0}
_PAUSE_S = 0.02  # after a refusal: a client of the attack does not wait as long as it is asked to
_PROMPT = "Name three uses of a paper clip."


@dataclass(frozen=True, slots=True)
class Attack:
    """Clients of one tenant that send `request(number)` one after the other."""

    clients: int
    request: Callable[[int], orchestrator_pb2.GenerateRequest]
    victim: Callable[[int], orchestrator_pb2.GenerateRequest]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Load:
    """What a tenant's calls ended with."""

    seconds: list[float] = field(default_factory=list)  # of answers
    codes: Counter[str] = field(default_factory=Counter)

    def summary(self, lasted_s: float) -> dict[str, Any]:
        times = sorted(self.seconds) or [float("inf")]
        return {
            "p50_s": round(statistics.median(times), 3),
            "p95_s": round(times[int(0.95 * (len(times) - 1))], 3),
            "per_s": round(len(self.seconds) / lasted_s, 2),
            "codes": dict(self.codes),
        }


def _request(prompt: str = _PROMPT, **options: Any) -> orchestrator_pb2.GenerateRequest:
    return build_request(prompt, cache=CacheControl.BYPASS, **options)


def _schema(number: int) -> JsonSchema:
    """A schema whose compilation never ends within the generator's budget; each is new."""
    return JsonSchema(json.dumps({"type": "array", "maxItems": 10**9 + number}))


ATTACKS: Mapping[str, Attack] = {
    # Rows: cheap by candidate-tokens, wide in every step.
    "rows": Attack(
        12,
        lambda number: _request(n=64, max_tokens=2, seed=number, ignore_eos=True),
        lambda number: _request(n=4, max_tokens=24, seed=number, ignore_eos=True),
    ),
    # The same with prompts, which nobody stored.
    "prompts": Attack(
        12,
        lambda number: _request(f"{number} " + "uses of a clip " * 400, n=1, max_tokens=1),
        lambda number: _request(n=4, max_tokens=24, seed=number, ignore_eos=True),
    ),
    "grammars": Attack(
        20,
        lambda number: _request(n=1, max_tokens=2, structured_output=_schema(number)),
        lambda number: _request(n=2, max_tokens=4, seed=number, ignore_eos=True),
    ),
    "characters": Attack(
        16,
        lambda number: _request(f"{number} " + "uses of a clip " * 66_600, n=1, max_tokens=1),
        lambda number: _request(n=4, max_tokens=24, seed=number, ignore_eos=True),
    ),
}


async def attack(name: str, seconds: float) -> dict[str, Any]:
    """The victim's times and codes alone and beside the attack, and the attackers' codes."""
    plan = ATTACKS[name]
    async with Stack(environment=plan.environment) as stack:
        address = stack.orchestrator_address
        await _load(address, "victim", 1, plan.victim, 3.0)  # first steps do more
        alone = await _load(address, "victim", 1, plan.victim, seconds / 2)
        attacking = asyncio.create_task(
            _load(address, "attacker", plan.clients, plan.request, seconds + 3)
        )
        await asyncio.sleep(3.0)
        beside = await _load(address, "victim", 1, plan.victim, seconds, others=(attacking,))
        attackers = await attacking
    return {"attack": name, "alone": alone, "beside": beside, "attackers": attackers}


async def _load(
    address: str,
    tenant: str,
    clients: int,
    request: Callable[[int], orchestrator_pb2.GenerateRequest],
    seconds: float,
    others: tuple[asyncio.Task[Any], ...] = (),
) -> dict[str, Any]:
    load, numbers, began = Load(), count(time.time_ns() % 10**6 * 1000), time.monotonic()

    async def send() -> None:
        channel = await stack.enter_async_context(open_channel(address))
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        while time.monotonic() - began < seconds:
            started = time.monotonic()
            try:
                message, metadata = request(next(numbers)), ((TENANT_METADATA, tenant),)
                await stub.Generate(message, timeout=_CALL_S[tenant], metadata=metadata)
                load.seconds.append(time.monotonic() - started)
                load.codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                load.codes[error.code().name] += 1
                await asyncio.sleep(_PAUSE_S)

    async with AsyncExitStack() as stack:
        await asyncio.gather(*(send() for _ in range(clients)))
    return load.summary(time.monotonic() - began)


def main() -> None:
    """Run attacks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*ATTACKS], metavar="ATTACK")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each attack")
    given = parser.parse_args()
    results = []
    for name in given.names:
        results.append(result := asyncio.run(attack(name, given.seconds)))
        for who in ("alone", "beside", "attackers"):
            print(f"{name:12} {who:10} {result[who]}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
