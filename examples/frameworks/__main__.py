"""Starts all services on free ports and runs every script of this folder: `make frameworks`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

from deploy.local.stack import Stack

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".frameworks" / "bin" / "python"
_BOUND_S = 300.0  # of one script


async def main() -> None:
    """Print a line per script; exit with 1 if one fails."""
    failed = []
    async with Stack(gateway=True) as stack:
        scripts = sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*.mjs")])
        for script in scripts:
            command = "node" if script.suffix == ".mjs" else PYTHON
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *(command, script),
                # LiteLLM would fetch a list of prices.
                env={
                    **os.environ,
                    "SPECREJ_URL": f"{stack.gateway_url}/v1",
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                },
                stdout=PIPE,
                stderr=STDOUT,
            )
            try:
                printed, _ = await asyncio.wait_for(process.communicate(), _BOUND_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            result = "failed" if process.returncode else "passed"
            print(f"{script.name:<22} {result} in {time.monotonic() - began:.1f} s", flush=True)
            if process.returncode:
                failed.append(script.name)
                print(printed.decode(), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    asyncio.run(main())
