"""Arithmetic by vote: the answer that most candidates agree on, and how many do.

Candidates begin in waves, and the request ends once the leading answer is safe.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from specrej import Client, SpecrejError, Vote

TASK = "A book costs 12 dollars and a pen costs 3 dollars. What do 2 books and 4 pens cost?"


async def run(options: argparse.Namespace) -> int:
    """Print the votes and the answer; returns the exit code.

    Raises:
        SpecrejError: the request failed.
    """
    async with Client(options.address, timeout_s=300) as client:
        generation = await client.generate(
            f"{options.task}\nThink step by step. End with the number.",
            n=options.n,
            waves=4,
            vote=Vote("number", stop_probability=0.95),
            max_tokens=160,
        )
    for share in generation.votes:
        print(f"{share.share:6.0%} {'#' * share.count} {share.answer}", file=sys.stderr)
    print(generation.best.vote or "no answer has a number")
    begun, n = generation.num_begun, generation.n
    print(f"{begun} of {n} candidates began", file=sys.stderr)
    return 0 if generation.best.vote else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", default=TASK)
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    try:
        return asyncio.run(run(parser.parse_args()))
    except SpecrejError as error:
        sys.exit(f"vote: {error}")


if __name__ == "__main__":
    sys.exit(main())
