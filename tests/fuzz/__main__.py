"""Runs every parser under libFuzzer: `make fuzz`, or `python -m tests.fuzz --seconds 60`.

Requires atheris (`make fuzz` installs it). Each target runs in a process of its own, because
libFuzzer ends its process. Prints a line per target; the last line on stdout is one JSON object.
The exit code is 1 after a finding, whose input is in build/fuzz: add it to seeds.py with the fix.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_OURS = ["specrej", "orchestrator", "generator_service", "reward_service", "gateway"]
_EXECUTED = re.compile(r"number_of_executed_units: (\d+)")
_ERROR = re.compile(r"^\w[\w.]*(?:Error|Exception|Exit|Violation)\b.*", re.MULTILINE)
_LATE_S = 120.0  # allowance for slow starts


def main() -> None:
    """Run one target after the other, or the one that --target names in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    parser.add_argument("--only", nargs="+", help="names of targets")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.target:
        _fuzz(given.target, given.seconds)
    from tests.fuzz.targets import TARGETS

    runs = []
    for target in given.only or TARGETS:
        executed, finding = _run(target, given.seconds)
        print(f"{target}: {executed} inputs, {finding or 'no finding'}", flush=True)
        runs.append({"target": target, "executed": executed, "finding": finding})
    print(json.dumps({"seconds": given.seconds, "runs": runs}))
    sys.exit(any(run["finding"] for run in runs))


def _run(target: str, seconds: int) -> tuple[int, str]:
    """The number of inputs, and the finding or an empty text."""
    command = (sys.executable, "-m", "tests.fuzz", "--target", target, "--seconds", str(seconds))
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


def _fuzz(target: str, seconds: int) -> None:
    """Run a target, guided by coverage; does not return."""
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

    with atheris.instrument_imports(include=_OURS):
        from tests.fuzz.seeds import seeds
        from tests.fuzz.targets import TARGETS
    folder = _ROOT / "build" / "fuzz" / target
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[target]):
        (folder / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10"]
    quiet = ["-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={folder}/found-"]

    def run(data: bytes) -> None:
        """Run the target without its result, which libFuzzer would read as a code."""
        TARGETS[target](data)

    atheris.Setup([sys.argv[0], *limits, *quiet, str(folder)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
