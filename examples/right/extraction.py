"""Extraction: JSON that conforms to a schema, and whose content a judge prefers.

The schema vetoes candidates while they are written. The judge, which costs most, grades only
complete answers that conform. The server must have the rewards of rewards.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from specrej import Client, SpecrejError, WeightedReward

TEXT = "Maria Lopez ordered three lamps on 4 May and asked for delivery to Lisbon."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "item": {"type": "string"},
        "count": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "item", "count", "city"],
    "additionalProperties": False,
}


async def run(options: argparse.Namespace) -> int:
    """Print the JSON; returns the exit code: 1 if no candidate conforms.

    Raises:
        SpecrejError: the request failed.
    """
    rubric = f"Whether each value of the JSON is what this text says: {options.text}"
    rewards = [
        WeightedReward(
            "schema", veto_below=1.0, data=json.dumps({"schema": SCHEMA, "extract": "first_object"})
        )
    ]
    if not options.no_judge:
        data = json.dumps({"rubric": rubric})
        rewards.append(WeightedReward("judge", stage="end", data=data))
    prompt = f"Extract this as JSON with the keys name, item, count and city.\n{options.text}"
    async with Client(options.address, timeout_s=300) as client:
        generation = await client.generate(
            prompt, n=options.n, rewards=rewards, min_answers=2, max_tokens=160
        )
    best = generation.best
    print(best.text)
    print(f"score {best.score:.2f} of {len(rewards)}", file=sys.stderr)
    return int(best.vetoed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--no-judge", action="store_true")
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    try:
        return asyncio.run(run(parser.parse_args()))
    except SpecrejError as error:
        sys.exit(f"extraction: {error}")


if __name__ == "__main__":
    sys.exit(main())
