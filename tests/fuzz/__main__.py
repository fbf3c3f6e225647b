"""Every parser under libFuzzer for a while: `make fuzz`, or `python -m tests.fuzz --seconds 60`.

Prints a line per target; the last line on stdout is one JSON object. Ends with 1 at a finding,
whose input lies in build/fuzz: it belongs into seeds.py once it is mended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.targets import TARGETS

_ROOT = Path(__file__).parents[2]
_EXECUTED = re.compile(rb"number_of_executed_units: (\d+)")
_LATE_S = 120.0  # for what takes its time to start


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a target; `finding` is empty where nothing did."""

    target: str
    executed: int
    finding: str


def main() -> None:
    """One target after the other."""
    arguments = _arguments()
    runs = asyncio.run(_run_all(arguments.only or list(TARGETS), arguments.seconds))
    table = Table("target", "inputs", "finding")
    for run in runs:
        table.add_row(run.target, str(run.executed), run.finding or "none")
    Console(width=120).print(table)
    print(json.dumps({"seconds": arguments.seconds, "runs": [asdict(run) for run in runs]}))
    sys.exit(any(run.finding for run in runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    parser.add_argument("--only", nargs="+", choices=TARGETS)
    return parser.parse_args()


async def _run_all(names: list[str], seconds: int) -> list[Run]:
    return [await _run(name, seconds) for name in names]


async def _run(name: str, seconds: int) -> Run:
    """In a process of its own: libFuzzer ends the one it is in."""
    corpus = _ROOT / "build" / "fuzz" / name
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz.guided", name, str(seconds), str(corpus)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=_ROOT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), seconds + _LATE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return Run(name, 0, "hangs")
    executed = _EXECUTED.search(said)
    if process.returncode:
        print(said.decode(errors="replace"), file=sys.stderr)
    return Run(
        name,
        int(executed.group(1)) if executed else 0,
        _finding(said) if process.returncode else "",
    )


def _finding(said: bytes) -> str:
    lines = said.decode(errors="replace").splitlines()
    told = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception|Exit)\b", line)]
    return (told or [line for line in lines if line.strip()] or ["no word"])[-1][:100]


if __name__ == "__main__":
    main()
