"""`make loadtest-ui`: Locust's page on this machine, with our users and options.

Starts all services on the embedded models, or uses the service at SPECREJ_ADDRESS (--host). Other
arguments are Locust's own. Ctrl-C stops everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.local.processes import ProcessError, run_python
from deploy.local.stack import HOST, Stack

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def main() -> None:
    """Serve the page until Ctrl-C; the exit code is Locust's."""
    parser = argparse.ArgumentParser(prog="make loadtest-ui", description=__doc__)
    address = os.environ.get("SPECREJ_ADDRESS", "")
    parser.add_argument("--host", default=address, help="host:port of a service [SPECREJ_ADDRESS]")
    parser.add_argument("--web-port", type=int, default=8089, help="of the page; default 8089")
    given, more = parser.parse_known_args()
    page = ("--class-picker", "--web-host", HOST, "--web-port", str(given.web_port))
    try:
        sys.exit(asyncio.run(run_locust(given.host, (*page, *more))))
    except ProcessError as error:
        parser.exit(1, f"loadtest-ui: {error}\n")


async def run_locust(address: str, arguments: Sequence[str]) -> int:
    """Run Locust to its end, on services of its own without an address; its exit code."""
    command = ("-m", "locust", "-f", str(_LOCUSTFILE), "--stop-timeout", "120", *arguments)
    if address:
        return await run_python((*command, "--host", address), address)
    print("starting the services", file=sys.stderr, flush=True)
    async with Stack() as stack:
        address = stack.orchestrator_address
        return await run_python((*command, "--host", address), address)


if __name__ == "__main__":
    main()
