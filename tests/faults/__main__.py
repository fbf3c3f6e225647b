"""Every case on real processes: `make faults`, or `python -m tests.faults --only faults/redis`.

Prints a line per item of the checklist; the last line on stdout is one JSON object. Ends with 1 if
a case hangs, ends in a way that is not right, or leaves something behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.case import Case, Result, examine
from tests.faults.checklist import CASES
from tests.faults.world import world

_LONGEST_OUTCOME = 60


def main() -> None:
    """Run the cases, print a table and a JSON object."""
    arguments = _arguments()
    chosen = [case for case in CASES if any(case.name.startswith(o) for o in arguments.only)]
    began = time.monotonic()
    results = asyncio.run(_examine_all(chosen))
    _print_table(chosen, results)
    bad = [result.case for result in results if not result.is_good]
    recoveries = [r.recovery_s for r in results if r.recovery_s is not None]
    report = {
        "cases": len(chosen),
        "ran": len(results),
        "elsewhere": sum(bool(case.elsewhere) for case in chosen),
        "not_here": sum(bool(case.not_here) for case in chosen),
        "bad": bad,
        "hanging": sum(result.outcome == "HANGS" for result in results),
        "unknown": sum("UNKNOWN" in result.outcome for result in results),
        "most_recovery_s": round(max(recoveries, default=0.0), 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.report:
        rows = [result.as_row() for result in results]
        arguments.report.write_text(json.dumps({**report, "results": rows}, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(bool(bad))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of case names")
    parser.add_argument("--report", type=Path, help="JSON file with a row per case")
    return parser.parse_args()


async def _examine_all(cases: Sequence[Case]) -> list[Result]:
    """One after the other on one world; on a fresh one after a case that broke it."""
    left = deque(case for case in cases if case.play)
    results: list[Result] = []
    while left:
        async with world() as running:
            while left:
                result = await examine(left.popleft(), running)
                results.append(result)
                print(_line(result), file=sys.stderr, flush=True)
                if result.recovery_s is None:
                    print(running.stack.log_tails(), file=sys.stderr, flush=True)
                    break
    return results


def _line(result: Result) -> str:
    mark = "ok " if result.is_good else "BAD"
    recovery = "never" if result.recovery_s is None else f"{result.recovery_s:.2f}"
    return f"{mark} {result.case}: {result.outcome} in {result.seconds:.1f} s, {recovery} s" + (
        f" -- {result.problem}" if result.problem else ""
    )


def _print_table(cases: Sequence[Case], results: Sequence[Result]) -> None:
    """A row per item where all its variants are right, one per variant that is not."""
    table = Table("case", "variants", "outcome", "seconds", "recovery s")
    by_name = {result.case: result for result in results}
    for item, group in groupby(sorted(cases, key=lambda each: each.item), lambda each: each.item):
        variants = list(group)
        ran = [by_name[case.name] for case in variants if case.name in by_name]
        good = [result for result in ran if result.is_good]
        if good:
            table.add_row(item, str(len(good)), _outcomes(good), *_times(good))
        for result in ran:
            if not result.is_good:
                table.add_row(result.case, "", f"[red]{result.outcome}: {result.problem}", "", "")
        for case in variants:
            if case.play is None:
                where = f"see {case.elsewhere}" if case.elsewhere else case.not_here
                table.add_row(case.name, "", f"[dim]{where}", "", "")
    Console(width=150).print(table)


def _outcomes(results: Sequence[Result]) -> str:
    told = ", ".join(dict.fromkeys(result.outcome for result in results))
    return told if len(told) <= _LONGEST_OUTCOME else f"{told[:_LONGEST_OUTCOME]} ..."


def _times(results: Sequence[Result]) -> tuple[str, str]:
    recoveries = [result.recovery_s or 0.0 for result in results]
    return f"{max(result.seconds for result in results):.1f}", f"{max(recoveries):.2f}"


if __name__ == "__main__":
    main()
