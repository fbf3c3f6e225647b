"""Runs every parser under libFuzzer: `make fuzz`, or `python -m tests.fuzz --seconds 60`.

Prints a line per target; the last line on stdout is one JSON object. The exit code is 1 after a
finding, whose input is in build/fuzz: add it to seeds.py with the fix.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS

_ROOT = Path(__file__).parents[2]
_EXECUTED = re.compile(r"number_of_executed_units: (\d+)")
_ERROR = re.compile(r"^\w[\w.]*(?:Error|Exception|Exit)\b.*", re.MULTILINE)
_LATE_S = 120.0  # allowance for slow starts


def main() -> None:
    """Run one target after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    runs = []
    for target in arguments.only:
        executed, finding = _run(target, arguments.seconds)
        print(f"{target}: {executed} inputs, {finding or 'no finding'}", flush=True)
        runs.append({"target": target, "executed": executed, "finding": finding})
    print(json.dumps({"seconds": arguments.seconds, "runs": runs}))
    sys.exit(any(run["finding"] for run in runs))


def _run(target: str, seconds: int) -> tuple[int, str]:
    """Run a target in a separate process, because libFuzzer ends its process.

    Returns the number of inputs, and the finding or an empty text.
    """
    corpus = _ROOT / "build" / "fuzz" / target
    command = (sys.executable, "-m", "tests.fuzz.guided", target, str(seconds), str(corpus))
    try:
        result = subprocess.run(
            command,
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=seconds + _LATE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, "hangs"
    executed = _EXECUTED.search(result.stdout)
    finding = ""
    if result.returncode:
        print(result.stdout, file=sys.stderr)
        finding = (_ERROR.findall(result.stdout) or [f"exit code {result.returncode}"])[-1][:100]
    return int(executed.group(1)) if executed else 0, finding


if __name__ == "__main__":
    main()
