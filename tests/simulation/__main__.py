"""Runs seeds: `make simulation`, `python -m tests.simulation --seed 7 --requests 500`.

Prints a line per violation, and last one JSON object; the exit code is 1 after a violation. With
`--defects` it prints which seed and invariant find each seeded defect; the exit code is 1 if more
than a fifth of all are not found.
"""

import argparse
import gc
import json
import sys
import time
from collections import Counter

from tests.simulation.defects import listed, print_table
from tests.simulation.loop import Violation
from tests.simulation.run import Simulation

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--requests", type=int, default=500, help="per seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="0: one seed")
    parser.add_argument("--defects", nargs="?", const="", metavar="PART", help="of their names")
    arguments = parser.parse_args()
    if arguments.defects is not None:
        sys.exit(print_table(arguments.defects) > len(listed()) // 5)
    gc.freeze()  # what is imported needs no further collections
    until_s, began_s = time.monotonic() + arguments.minutes * 60, time.process_time()
    seed, digest, bad, outcomes = arguments.seed, "", list[int](), Counter[str]()
    while seed == arguments.seed or (time.monotonic() < until_s and len(bad) < 10):
        simulation = Simulation(seed, arguments.requests)
        try:
            digest = simulation.run()
        except Violation as violation:
            bad.append(seed)
            print(violation, flush=True)
        outcomes += simulation.outcomes
        seed += 1
    per_minute = round(outcomes.total() / (time.process_time() - began_s) * 60)
    summary = {"seeds": [arguments.seed, seed - 1], "bad": bad, "digest_of_last": digest}
    print(json.dumps({**summary, "requests_per_cpu_minute": per_minute, "outcomes": outcomes}))
    sys.exit(bool(bad))
