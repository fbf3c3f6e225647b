"""A rolling restart: two of each service restart one at a time under load, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from deploy.local.stack import Stack
from specrej import Client
from specrej.contracts import CacheControl
from specrej.contracts.errors import SpecrejError
from tests.faults.case import Case
from tests.faults.world import World, until
from tests.toys import TOYS

_NUM_CLIENTS = 3
_ANSWERS = 3 * _NUM_CLIENTS  # between two restarts
_BOUND_S = 120.0


async def rolling_restart(_: World) -> list[str]:
    """Clients have the published retry policy."""
    stack = Stack(environment=TOYS, orchestrators=2, generators=2, reward_services=2, grace_s=60)
    labels: list[str] = []
    async with stack:
        target = f"ipv4:{stack.orchestrator_addresses}"
        clients = [
            asyncio.ensure_future(_send(target, number, labels)) for number in range(_NUM_CLIENTS)
        ]
        try:
            for name in ("", *(name for name in stack.processes if name != "redis")):
                if name:
                    await stack.restart(name)
                await _answered(len(labels) + _ANSWERS, labels)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
    return labels


async def _answered(number: int, labels: Sequence[str]) -> None:
    await until(lambda: len(labels) >= number, bound_s=_BOUND_S)


async def _send(target: str, number: int, labels: list[str]) -> None:
    """Requests without end."""
    async with Client(target, timeout_s=_BOUND_S) as client:
        for index in count(1000 * number):
            try:
                answer = await client.generate(
                    "Why?", n=8, max_tokens=24, seed=index, cache=CacheControl.BYPASS
                )
                labels.append("OK degraded" if answer.degraded else "OK")
            except SpecrejError as error:
                labels.append(f"{type(error).__name__}: {error}")


CASES: tuple[Case, ...] = (Case("rolling-restart", rolling_restart, "OK", limit_s=600),)
