"""`make frameworks`: runs every script of this folder against services on free ports.

Agents ask the toy generator, a test double that makes the calls that a question names; the others
ask the embedded models.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterable
from pathlib import Path

from deploy.local.stack import Stack

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".frameworks" / "bin" / "python"
TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}
_BOUND_S = 300.0  # of one script


async def main() -> None:
    """Print a line per script; exit with 1 if one fails."""
    scripts = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".mjs"))
    failed: list[str] = []
    for kind, environment in (("agent", TOYS), ("openai", {})):
        async with Stack(gateway=True, environment=environment) as stack:
            chosen = [script for script in scripts if script.name.startswith(f"{kind}_")]
            failed += await _failed(chosen, f"{stack.gateway_url}/v1")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


async def _failed(scripts: Iterable[Path], url: str) -> list[str]:
    """Run these scripts; the names of those that fail."""
    failed = []
    for script in scripts:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *("node" if script.suffix == ".mjs" else PYTHON, script),
            env={**os.environ, "SPECREJ_URL": url},
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
        print(f"{script.name:<24} {result} in {time.monotonic() - began:.1f} s: {last}", flush=True)
        if process.returncode:
            failed.append(script.name)
            print(printed, flush=True)
    return failed


if __name__ == "__main__":
    asyncio.run(main())
