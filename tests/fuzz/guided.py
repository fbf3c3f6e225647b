"""Fuzzes a target, guided by coverage: `python -m tests.fuzz.guided NAME SECONDS CORPUS`.

Exits with 0 after SECONDS. At the first finding it prints the traceback, stores the input in CORPUS
and exits with another code. Requires atheris (`make fuzz` installs it).
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

_OURS = ["specrej", "orchestrator", "reward_service", "gateway", "loadtest"]
_LONGEST = 4096


def main(name: str, seconds: str, corpus: str) -> None:
    """Run the target; does not return."""
    with atheris.instrument_imports(include=_OURS):
        from tests.fuzz.seeds import seeds
        from tests.fuzz.targets import TARGETS
    directory = Path(corpus)
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[name]):
        (directory / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-timeout=10"]
    quiet = ["-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={directory}/found-"]

    def run(data: bytes) -> None:
        """Run the target without its result, which libFuzzer would read as a code."""
        TARGETS[name](data)

    atheris.Setup([sys.argv[0], *limits, *quiet, str(directory)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
