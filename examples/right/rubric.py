"""A rubric: candidates are cut by relevance, and a judge chooses among those that are complete.

The server must have the rewards of rewards.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from specrej import SyncClient, WeightedReward

TASK = "Explain to a child why the sky is blue."
RUBRIC = "A child of eight must understand every word. No formulas. At most five sentences."

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task", nargs="?", default=TASK)
parser.add_argument("--rubric", default=RUBRIC)
parser.add_argument("--n", type=int, default=16)
options = parser.parse_args()

rewards = [
    WeightedReward("relevance", stage="cuts"),
    WeightedReward("judge", stage="end", data=json.dumps({"rubric": options.rubric})),
]
with SyncClient(os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")) as client:
    generation = client.generate(
        options.task, n=options.n, rewards=rewards, min_answers=4, max_tokens=120
    )
print(generation.best.text)
print(f"the judge's grade: {generation.best.score:.2f}", file=sys.stderr)
