"""Runs the cases: `make faults`, or `python -m tests.faults --only redis kill`.

Prints a line per case; the last line on stdout is one JSON object. The exit code is 1 if a case
fails, hangs or does not recover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Sequence

from tests.faults import processes, redis_faults, rolling, wire
from tests.faults.case import Case, Result, examine
from tests.faults.world import world

_PARTS = (processes, redis_faults, wire, rolling)
CASES: tuple[Case, ...] = tuple(case for part in _PARTS for case in part.CASES)


def main() -> None:
    """Run the cases, print their results and a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of case names")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if case.name.startswith(tuple(arguments.only))]
    began = time.monotonic()
    results = asyncio.run(_examine_all(chosen))
    bad = [result.case for result in results if result.problem]
    recoveries = [r.recovery_s for r in results if r.recovery_s is not None]
    report = {
        "cases": len(chosen),
        "bad": bad,
        "hanging": sum(result.outcome == "HANGS" for result in results),
        "most_recovery_s": round(max(recoveries, default=0.0), 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    sys.exit(bool(bad))


async def _examine_all(cases: Sequence[Case]) -> list[Result]:
    """Run the cases in turn on one world; start a new one after a case that broke it."""
    pending = deque(cases)
    results: list[Result] = []
    while pending:
        async with world() as running:
            while pending:
                result = await examine(pending.popleft(), running)
                results.append(result)
                print(_line(result), file=sys.stderr, flush=True)
                if result.recovery_s is None:
                    print(running.stack.log_tails(), file=sys.stderr, flush=True)
                    break
    return results


def _line(result: Result) -> str:
    mark, problem = ("BAD", f" -- {result.problem}") if result.problem else ("ok ", "")
    recovery = "never" if result.recovery_s is None else f"{result.recovery_s:.2f} s"
    seconds = f"in {result.seconds:.1f} s, recovers: {recovery}"
    return f"{mark} {result.case}: {result.outcome} {seconds}{problem}"


if __name__ == "__main__":
    main()
