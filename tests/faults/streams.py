"""A client to be killed or stopped: `python -m tests.faults.streams ADDRESS NUMBER [--long]`.

Opens NUMBER streams, prints "open" once as many as can run are admitted, and goes on reading.
"""

from __future__ import annotations

import asyncio
import sys

from specrej.contracts import Schedule
from tests.faults.world import MAX_RUNNING, Call, until

# With --long: many rounds with large events, so that a client that does not read blocks the writer.
_ROUNDS = Schedule("tokens", tokens=tuple(range(1, 400)))


async def main(address: str, number: int, *, long: bool) -> None:
    """Hold the streams open until this process is ended."""
    options = {"n": 256, "alpha": 0.0, "schedule": _ROUNDS} if long else {"n": 8}
    calls = [
        Call(
            address,
            stream=True,
            narrow=long,
            timeout_s=4 if long else 60,
            max_tokens=400 if long else 2000,
            seed=seed,
            **options,
        )
        for seed in range(number)
    ]
    num_running = min(number, MAX_RUNNING)
    await until(lambda: sum(bool(call.events) for call in calls) >= num_running, bound_s=60)
    print("open", flush=True)
    await asyncio.gather(*(call.outcome() for call in calls))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), long="--long" in sys.argv))
