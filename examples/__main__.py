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
OUTPUT = Path("build/examples")

# The command of each example, for Python in the repository's root.
COMMANDS: Mapping[str, Sequence[str]] = {
    "coding": ("-m", "examples.coding.coding"),
    "svg": ("-m", "examples.svg.svg", "--output", str(OUTPUT / "drawing.svg")),
    "vote": ("examples/right/vote.py",),
    "extraction": ("examples/right/extraction.py",),
    "rubric": ("examples/right/rubric.py",),
}
# The services' settings, where an example needs others than the defaults.
_JUDGED = ("extraction", "rubric")
_RIGHT = {"SPECREJ_REWARD_REWARDS": (HERE / "right/rewards.json").read_text()}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "coding": {"SPECREJ_REWARD_REWARDS": (HERE / "coding/rewards.json").read_text()},
    "extraction": _RIGHT,
    "rubric": _RIGHT,
    "svg": {"SPECREJ_REWARD_REWARDS": (HERE / "svg/rewards.json").read_text()},
}


async def with_services(name: str, arguments: Sequence[str]) -> int:
    """Start the services that the example needs, run it, stop them; returns its exit code."""
    print("starting the services", file=sys.stderr)
    ports = Ports.free()
    settings = SETTINGS.get(name, {}).items()
    # The judge is the generator itself, behind the gateway.
    environment = {key: text.replace(":8000", f":{ports.gateway}") for key, text in settings}
    async with Stack(ports, environment=environment, gateway=name in _JUDGED) as stack:
        code = await run_python((*COMMANDS[name], *arguments), stack.orchestrator_address)
    print("everything is stopped", file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="make example")
    parser.add_argument("name", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the example")
    options = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(with_services(options.name, options.arguments))
    except ProcessError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
