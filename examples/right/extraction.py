"""Extraction: JSON that conforms to a schema, and whose content a judge prefers.

The schema vetoes candidates while they are written. The judge, which costs most, grades only
complete answers that conform. The server must have the rewards of rewards.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from specrej import SyncClient, WeightedReward

TEXT = "Maria Lopez ordered three lamps on 4 May and asked for delivery to Lisbon."
KINDS = {"name": "string", "item": "string", "count": "integer", "city": "string"}
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in KINDS.items()},
    "required": [*KINDS],
    "additionalProperties": False,
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", default=TEXT)
parser.add_argument("--n", type=int, default=16)
parser.add_argument("--no-judge", action="store_true")
options = parser.parse_args()

data = json.dumps({"schema": SCHEMA, "extract": "first_object"})
rewards = [WeightedReward("schema", veto_below=1.0, data=data)]
if not options.no_judge:
    rubric = f"Whether each value of the JSON is what this text says: {options.text}"
    data = json.dumps({"rubric": rubric})
    rewards.append(WeightedReward("judge", stage="end", data=data))
prompt = f"Extract this as JSON with the keys {', '.join(KINDS)}.\n{options.text}"
with SyncClient(os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")) as client:
    generation = client.generate(
        prompt, n=options.n, rewards=rewards, min_answers=2, max_tokens=160
    )
print(generation.best.text)
print(f"score {generation.best.score:.2f} of {len(rewards)}", file=sys.stderr)
sys.exit(generation.best.vetoed)
