"""`make loadtest-ui`: Locust's page on this machine, with our users, shapes and options.

Starts all services on the embedded models, or uses the service at SPECREJ_ADDRESS (--host). Other
arguments are Locust's own. Ctrl-C stops everything that was started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from deploy.local.processes import ProcessError, Processes, Program
from deploy.local.stack import HOST, Stack, check_free
from specrej.client.cli import note, run_to_end

_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_LOGS = Path("build/loadtest-ui")


def main() -> None:
    """Serve the page until Ctrl-C.

    Raises:
        SystemExit: it failed.
    """
    parser = argparse.ArgumentParser(prog="make loadtest-ui", description=__doc__)
    address = os.environ.get("SPECREJ_ADDRESS", "")
    parser.add_argument("--host", default=address, help="host:port of a service [SPECREJ_ADDRESS]")
    parser.add_argument("--web-port", type=int, default=8089, help="of the page; default 8089")
    given, more = parser.parse_known_args()
    _LOGS.mkdir(parents=True, exist_ok=True)
    try:
        run_to_end(_serve(given.host, given.web_port, more))
    except ProcessError as error:
        parser.exit(1, f"loadtest-ui: {error}\n")


async def _serve(address: str, port: int, more: list[str]) -> None:
    check_free(port, "page")
    async with AsyncExitStack() as running:
        if not address:
            note("starting the services")
            address = (await running.enter_async_context(Stack())).orchestrator_address
        locust = Program(
            "locust",
            (
                *(str(Path(sys.executable).with_name("locust")), "-f", str(_LOCUSTFILE)),
                *("--class-picker", "--web-host", HOST, "--web-port", str(port)),
                *("--host", address, "--stop-timeout", "120", *more),
            ),
            is_ready=lambda: _answers(port),
        )
        page = await running.enter_async_context(Processes([locust], _LOGS))
        note(f"page  http://{HOST}:{port}\nlogs  {_LOGS}\nCtrl-C stops everything")
        try:
            await page.keep_alive(note)
        except asyncio.CancelledError:
            note("stopping")  # Ctrl-C and SIGTERM are the normal end of this command


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


if __name__ == "__main__":
    main()
