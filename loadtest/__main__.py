"""`make loadtest-ui`: Locust's page on this machine, with our users and options.

Starts all services on the embedded models, or uses the service at SPECREJ_ADDRESS (--host). Other
arguments are Locust's own. Ctrl-C stops everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
    page = ("--web-host", HOST, "--web-port", str(given.web_port))
    try:
        sys.exit(asyncio.run(_show(given.host, (*page, *more))))
    except ProcessError as error:
        parser.exit(1, f"loadtest-ui: {error}\n")


async def _show(host: str, arguments: Sequence[str]) -> int:
    async with serving(host) as address:
        return await run_locust(address, arguments)


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[str]:
    """The address of a service: the given one, or without one that of all services, started here.

    Raises:
        ProcessError: they did not start.
    """
    if address:
        yield address
        return
    print("starting the services", file=sys.stderr, flush=True)
    async with Stack() as stack:
        yield stack.orchestrator_address


async def run_locust(address: str, arguments: Sequence[str]) -> int:
    """Run Locust to its end; its exit code."""
    command = ("-m", "locust", "-f", str(_LOCUSTFILE), "--stop-timeout", "120", *arguments)
    return await run_python((*command, "--host", address), address)


if __name__ == "__main__":
    main()
