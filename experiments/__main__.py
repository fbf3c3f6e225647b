"""The experiments' command line: `specrej experiment`, or `python -m experiments`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from experiments import collecting, commands, everything, live
from experiments.collect import CollectError
from specrej.errors import SpecrejError


def main() -> None:
    """One command; what stops it is one line on stderr."""
    parser = argparse.ArgumentParser(prog="specrej experiment", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (everything, collecting, commands, live):
        module.add_to(subparsers)
    arguments = parser.parse_args()
    try:
        asyncio.run(arguments.command(arguments))
    except (CollectError, SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"specrej experiment: {error}\n")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        parser.exit(130)


if __name__ == "__main__":
    main()
