"""Each service of an earlier version among today's others: `make mixed-versions`.

All services run as processes on toys, one of them from the tree of a revision of this repository,
and answer a request by gRPC and one through the gateway. Last, that revision's command line calls
today's services. Prints a line per case; the exit code is 1 after a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import AsyncOpenAI

from benchmarks.harness import TOYS
from deploy.local.processes import Program
from deploy.local.stack import Stack
from specrej import Client
from specrej.contracts import CacheControl
from tests.programs import ROOT, run

MODULES = {**Stack.modules, "client": "specrej"}
_PROMPT = "What stays the same?"
_N = 8
_TIMEOUT_S = 60.0
_COMMAND_LINE = "from specrej.client.cli import main; main()"


class _MixedStack(Stack):
    """All services, those of one kind from another tree; of no kind, all are today's."""

    def __init__(self, kind: str, tree: Path) -> None:
        super().__init__(environment=TOYS, gateway=True)
        self._kind, self._tree = kind, tree

    def _replica(self, replica: Any) -> Program:
        program = super()._replica(replica)
        if replica.kind != self._kind:
            return program
        return replace(program, environment={**program.environment, **_environment(self._tree)})


def main() -> None:
    """Unpack the revision and try each of its services."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a revision with this schema's packages; the last release")
    base = parser.parse_args().base or last_release(ROOT)
    with TemporaryDirectory() as folder:
        _unpack(base, Path(folder))
        failed = asyncio.run(_failures(Path(folder)))
    print(json.dumps({"base": base, "cases": [*MODULES], "failed": failed}))
    sys.exit(bool(failed))


def last_release(repository: Path) -> str:
    """The last tag of a version before the present commit; HEAD without one."""
    describe = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    result = subprocess.run(describe, cwd=repository, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "HEAD"


def _unpack(revision: str, folder: Path) -> None:
    """Write the files of a revision."""
    archive = ["git", "archive", "--format=tar", revision]
    packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)


async def _failures(tree: Path) -> list[str]:
    """The parts of the tree that do not work with today's others."""
    failed = []
    for kind, module in MODULES.items():
        await _check_origin(module, tree)
        try:
            async with _MixedStack(kind, tree) as stack:
                answer = await (_command_line(stack, tree) if kind == "client" else _request(stack))
            print(f"{kind} of the earlier version: {answer}", flush=True)
        except Exception as error:
            failed.append(kind)
            print(f"{kind} of the earlier version: failed: {error!r}", flush=True)
    return failed


async def _request(stack: Stack) -> str:
    """A summary of the answer by gRPC, after one through the gateway.

    Raises:
        ValueError: the answer is degraded, or a part of it or of its record is missing.
    """
    http = AsyncOpenAI(base_url=f"{stack.gateway_url}/v1", api_key="none", timeout=_TIMEOUT_S)
    async with http, Client(stack.orchestrator_address, timeout_s=_TIMEOUT_S) as client:
        turn: Any = {"role": "user", "content": _PROMPT}
        model = (await http.models.list()).data[0].id
        chat = await http.chat.completions.create(model=model, messages=[turn], max_tokens=12)
        generation = await client.generate(
            _PROMPT, n=_N, max_tokens=64, seed=7, rewards={"toy": 1.0}, cache=CacheControl.BYPASS
        )
        record = await client.record(generation.request_id)
    made = {
        "text of the gateway": chat.choices[0].message.content,
        "text": generation.best.text,
        "rejected candidates": sum(trace.num_rejected for trace in generation.rounds),
        "reward tokens": generation.usage.reward_tokens,
        "times": generation.timings.total_ms and generation.rounds[0].extend_ms,
        "record": record.started_unix_s and record.rounds,
    }
    if missing := [name for name, value in made.items() if not value]:
        raise ValueError(f"without {', '.join(missing)}")
    if generation.degraded:
        raise ValueError(f"degraded: {generation.degradations}")
    return f"{len(generation.rounds)} rounds, score {generation.best.score:.4f}"


async def _command_line(stack: Stack, tree: Path) -> str:
    """A summary of the answer that the earlier command line prints."""
    arguments = ("generate", _PROMPT, "--json", "--n", str(_N), "--max-tokens", "64")
    address = ("--address", stack.orchestrator_address)
    output = await _python(tree, _COMMAND_LINE, *arguments, *address)
    answer = json.loads(output)
    return f"{len(answer['rounds'])} rounds, score {answer['score']:.4f}"


async def _check_origin(module: str, tree: Path) -> None:
    """Raises ValueError: the module would be today's."""
    path = await _python(tree, f"import {module}; print({module}.__file__)")
    if not Path(path.strip()).is_relative_to(tree):
        raise ValueError(f"{module} is not the earlier version's: {path}")


async def _python(tree: Path, code: str, *arguments: str) -> str:
    """The output of a program on the packages of a tree."""
    command = (sys.executable, "-c", code, *arguments)
    return await run(*command, folder=ROOT, bound_s=_TIMEOUT_S, **_environment(tree))


def _environment(tree: Path) -> dict[str, str]:
    """Without the working folder on the path, which has today's packages."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    main()
