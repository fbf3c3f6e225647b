"""Write a function that passes hidden tests: candidates are ranked by the tests that they pass.

The server must have the reward `unit-tests` of rewards.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from specrej import SyncClient, WeightedReward

HERE = Path(__file__).parent
# Only code that passes no test is vetoed; text that may still become code has the score 1.
VETO_BELOW = 1e-6

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("task", type=Path, nargs="?", default=HERE / "task.md")
parser.add_argument("--tests", type=Path, default=HERE / "tests.json")
parser.add_argument("--n", type=int, default=32)
options = parser.parse_args()

reward = WeightedReward("unit-tests", veto_below=VETO_BELOW, data=options.tests.read_text("utf-8"))
task = options.task.read_text("utf-8")
with SyncClient(os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050")) as client:
    best = client.generate(
        task, n=options.n, max_tokens=256, temperature=0.8, rewards=[reward]
    ).best
print(best.text)
print(f"\n{best.score:.0%} of the hidden tests pass", file=sys.stderr)
sys.exit(best.score < 1)
