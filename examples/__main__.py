"""`make example NAME=vote`: start all services on free ports, run one example, stop them.

The examples themselves need an address only, and run against any specrej.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.processes import ProcessError, run_python
from deploy.local.stack import Ports, Stack

HERE = Path(__file__).parent
# The program of each example; the services have the rewards beside it.
PROGRAMS: Mapping[str, Path] = {
    "coding": HERE / "coding/coding.py",
    "svg": HERE / "svg/svg.py",
    **{name: HERE / f"right/{name}.py" for name in ("vote", "extraction", "rubric")},
}


async def with_services(program: Path, arguments: Sequence[str]) -> int:
    """Start the services, run the program, stop them; returns its exit code."""
    print("starting the services", file=sys.stderr)
    ports = Ports.free()
    # The judge is the generator itself, behind the gateway.
    rewards = program.with_name("rewards.json").read_text()
    rewards = rewards.replace(":8000", f":{ports.gateway}")
    async with Stack(ports, environment={"SPECREJ_REWARD_REWARDS": rewards}, gateway=True) as stack:
        code = await run_python((str(program), *arguments), stack.orchestrator_address)
    print("everything is stopped", file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="make example")
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the example")
    options = parser.parse_args()
    try:
        return asyncio.run(with_services(PROGRAMS[options.name], options.arguments))
    except ProcessError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
