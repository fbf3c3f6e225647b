"""Record the streams of the reducer's tests: `python -m tests.gateway.page.record`.

Each file has the events of one request of the toys, with the milliseconds at which they arrived.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from deploy.local.stack import Stack
from specrej import contracts as c
from specrej.client import Client
from specrej.contracts import wire
from tests.gateway.conftest import TOYS

STREAMS = Path(__file__).with_name("streams")
_COMMON: Mapping[str, Any] = {"n": 12, "max_tokens": 80, "schedule": c.Schedule(first=8, factor=2)}
# Options of each stream; a stream in `_STOPPED` ends after that many rounds.
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "rejection": {"seed": 3},
    "cached": {"seed": 3, "cache": c.CacheControl.USE},
    "branching": {"seed": 5, "branching": c.Branching(10, 3)},
    "vetoed": {"seed": 6, "alpha": 0.2, "rewards": [c.WeightedReward("toy", veto_below=0.45)]},
    "stopped": {"seed": 7},
    "certain": {"n": 4, "seed": 8, "ignore_eos": True},
}
_STOPPED = {"stopped": 2}


async def recorded(client: Client, name: str) -> list[dict[str, Any]]:
    """The events of one request."""
    began, events, rounds = time.perf_counter(), list[dict[str, Any]](), 0
    options = {**_COMMON, "cache": c.CacheControl.REFRESH, **REQUESTS[name]}
    stream = client.stream("why?", progress=True, text_deltas=True, texts=True, **options)
    async with aclosing(stream):
        async for event in stream:
            ((kind, data),) = wire.to_plain(event).items()
            at = round((time.perf_counter() - began) * 1e3, 1)
            events.append({"at": at, "name": kind, "data": data})
            rounds += isinstance(event, c.RoundCompleted)
            if rounds == _STOPPED.get(name):
                events.append({"at": at + 1, "name": "stopped", "data": {}})
                break
    return events


async def main() -> None:
    STREAMS.mkdir(exist_ok=True)
    async with Stack(environment=TOYS) as stack, Client(stack.orchestrator_address) as client:
        for name in REQUESTS:
            text = json.dumps(await recorded(client, name), separators=(",", ":"))
            (STREAMS / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    asyncio.run(main())
