"""Latency against N: `make latency-vs-n`, or `python -m loadtest.latency_vs_n --help`.

Measures the service at SPECREJ_ADDRESS (--address), or all services started on this machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from deploy.local.processes import ProcessError
from deploy.local.stack import Stack
from loadtest.latency_vs_n.options import parse

# Another process: Locust replaces functions of the standard library that asyncio needs.
_COMMAND = (sys.executable, "-m", "loadtest.latency_vs_n.sweep", *sys.argv[1:])


def main() -> None:
    """Become the process that measures, or run it on a stack of its own."""
    if parse().address:
        os.execv(sys.executable, _COMMAND)
    try:
        sys.exit(asyncio.run(_with_services()))
    except ProcessError as error:
        sys.exit(f"latency-vs-n: {error}")


async def _with_services() -> int:
    """The exit code of the process that measures; Ctrl-C reaches it, too, and ends it."""
    print("starting the services", file=sys.stderr, flush=True)
    async with Stack() as stack:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        environment = {**os.environ, "SPECREJ_ADDRESS": stack.orchestrator_address}
        process = await asyncio.create_subprocess_exec(*_COMMAND, env=environment)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


if __name__ == "__main__":
    main()
