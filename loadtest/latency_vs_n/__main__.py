"""Latency against N: `make latency-vs-n`, or `python -m loadtest.latency_vs_n --help`.

Measures the service at SPECREJ_ADDRESS (--address), or all services started on this machine.
"""

from __future__ import annotations

import asyncio
import os
import sys

from deploy.local.processes import ProcessError, run_python
from deploy.local.stack import Stack
from loadtest.latency_vs_n.options import parse

# Another process: Locust replaces functions of the standard library that asyncio needs.
_PROGRAM = ("-m", "loadtest.latency_vs_n.sweep", *sys.argv[1:])


def main() -> None:
    """Become the process that measures, or run it on a stack of its own."""
    if parse().address:
        os.execv(sys.executable, (sys.executable, *_PROGRAM))
    try:
        sys.exit(asyncio.run(_with_services()))
    except ProcessError as error:
        sys.exit(f"latency-vs-n: {error}")


async def _with_services() -> int:
    """The exit code of the process that measures."""
    print("starting the services", file=sys.stderr, flush=True)
    async with Stack() as stack:
        return await run_python(_PROGRAM, stack.orchestrator_address)


if __name__ == "__main__":
    main()
