"""Write a function that passes hidden tests: candidates are ranked by the tests that they pass.

The server must have the reward `unit-tests` of rewards.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from specrej import Client, SpecrejError, WeightedReward

HERE = Path(__file__).parent
# Only code that passes no test is vetoed; text that may still become code has the score 1.
VETO_BELOW = 1e-6


async def run(options: argparse.Namespace) -> int:
    """Print the candidate that passes most tests; returns the exit code.

    Raises:
        SpecrejError: the request failed.
    """
    async with Client(options.address, timeout_s=300) as client:
        generation = await client.generate(
            options.task.read_text("utf-8"),
            n=options.n,
            max_tokens=256,
            temperature=0.8,
            rewards=[
                WeightedReward(
                    "unit-tests", veto_below=VETO_BELOW, data=options.tests.read_text("utf-8")
                )
            ],
        )
    best = generation.best
    print(best.text)
    print(f"\n{best.score:.0%} of the hidden tests pass", file=sys.stderr)
    return 0 if best.score == 1 else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path, nargs="?", default=HERE / "task.md")
    parser.add_argument("--tests", type=Path, default=HERE / "tests.json")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    try:
        return asyncio.run(run(parser.parse_args()))
    except SpecrejError as error:
        sys.exit(f"coding: {error}")


if __name__ == "__main__":
    sys.exit(main())
