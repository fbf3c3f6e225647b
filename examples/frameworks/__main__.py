"""`make frameworks`: every agent of this folder against services with toys, on free ports."""

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
# The toy generator makes the calls that a question names.
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}
_BOUND_S = 300.0  # of one script


async def main() -> None:
    """Print a line per script; exit with 1 if one fails."""
    failed = []
    async with Stack(gateway=True, environment=TOYS) as stack:
        for script in sorted(FOLDER.glob("agent_*")):
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *("node" if script.suffix == ".mjs" else PYTHON, script),
                env={**os.environ, "SPECREJ_URL": f"{stack.gateway_url}/v1"},
                stdout=PIPE,
                stderr=STDOUT,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), _BOUND_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            printed = output.decode().strip()
            result = "failed" if process.returncode else "passed"
            last = printed.rpartition("\n")[2][:60]
            took = time.monotonic() - began
            print(f"{script.name:<24} {result} in {took:.1f} s: {last}", flush=True)
            if process.returncode:
                failed.append(script.name)
                print(printed, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    asyncio.run(main())
