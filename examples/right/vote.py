"""Arithmetic by vote: the answer that most candidates agree on, and how many do.

Candidates begin in waves, and the request ends once the leading answer is safe.
"""

from __future__ import annotations

import argparse
import os
import sys

from specrej import SyncClient, Vote

TASK = "A book costs 12 dollars and a pen costs 3 dollars. What do 2 books and 4 pens cost?"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task", nargs="?", default=TASK)
parser.add_argument("--n", type=int, default=32)
options = parser.parse_args()

with SyncClient(os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")) as client:
    generation = client.generate(
        f"{options.task}\nThink step by step. End with the number.",
        n=options.n,
        waves=4,
        vote=Vote("number", stop_probability=0.95),
        max_tokens=160,
    )
for share in generation.votes:
    print(f"{share.share:6.0%} {'#' * share.count} {share.answer}", file=sys.stderr)
print(generation.best.vote or "no answer has a number")
print(f"{generation.num_begun} of {generation.n} candidates began", file=sys.stderr)
sys.exit(not generation.best.vote)
