"""Attacks on real processes behind the real Envoy: `make attacks`, or with ARGS="--only h2 hold".

Another tenant sends small requests over gRPC and HTTP, alone and during each attack. The table has
its p95 and failed requests, and how much each process grew. An attack is withstood if no request
fails, the p95 is within three times and 0.15 s of alone, and no process grows beyond its bound.
With --without each runs a second time, on the services' own ports: the last column says what is
found there.
The last line on stdout is one JSON object; the exit code is 1 if an attack is not withstood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import psutil  # type: ignore[import-untyped]

from deploy.local.stack import Stack
from specrej import Client
from specrej.contracts import CacheControl, Options
from specrej.contracts.errors import SpecrejError
from tests.attacks.wire import ATTACKS
from tests.deploy.test_edge import inner_ports
from tests.gateway.gateways import MODELS, response_to
from tests.toys import TOYS

Ports = tuple[int, int]  # gRPC and HTTP
_MIB = 2**20
# How much a process may grow, and stays bounded at.
_BOUNDS_MIB = {"orchestrator": 40, "gateway": 40, "generator": 40, "reward": 40, "edge": 200}
_CALL_S = 10.0
_OTHER = (("specrej-tenant", "other"),)
_SMALL = Options(n=4, max_tokens=8, cache=CacheControl.BYPASS)


@dataclass(frozen=True, slots=True)
class Seen:
    """What another tenant and the operator see of one attack."""

    p95_s: float
    failed: tuple[str, ...]
    requests: int
    grown_mib: dict[str, float]

    def problem(self, alone: Seen) -> str:
        """Why it is not withstood; empty: it is."""
        if self.failed:
            return f"{len(self.failed)} of {self.requests} failed: {self.failed[0]}"
        if self.p95_s > max(3 * alone.p95_s, alone.p95_s + 0.15):
            return f"p95 {self.p95_s:.2f} s"
        grown = [
            f"{k} +{v:.0f} MiB" for k, v in self.grown_mib.items() if v > _BOUNDS_MIB.get(k, 40)
        ]
        return ", ".join(grown)


async def attacked(stack: Stack, ports: Ports, name: str, seconds: float) -> Seen:
    """Run an attack (empty: none) on these ports; measure until it is over."""
    processes = {key: psutil.Process(pid) for key, pid in stack.processes.items()}
    before = {key: process.memory_info().rss for key, process in processes.items()}
    most = dict(before)
    arguments = (name, *map(str, ports), str(seconds))
    attack = None
    if name:
        attack = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.attacks.wire", *arguments
        )
        await asyncio.sleep(1)  # it imports
    took: list[float] = []
    failed: list[str] = []
    end = time.monotonic() + seconds
    try:
        async with Client(f"127.0.0.1:{ports[0]}") as client:
            while time.monotonic() < end:
                for call in (_generate, _models):
                    began = time.monotonic()
                    try:
                        async with asyncio.timeout(_CALL_S):
                            await call(client, ports[1])
                    except (SpecrejError, OSError, TimeoutError, EOFError, AssertionError) as error:
                        failed.append(f"{call.__name__[1:]} {type(error).__name__}")
                    took.append(time.monotonic() - began)
                for key, process in processes.items():
                    most[key] = max(most[key], process.memory_info().rss)
    finally:
        if attack:
            await attack.wait()
    grown = {key: (most[key] - before[key]) / _MIB for key in most}
    return Seen(quantiles(took, n=20)[-1], tuple(failed), len(took), grown)


async def _generate(client: Client, port: int) -> None:
    question = "Why is the sky blue?"
    await client.generate(question, **_SMALL, timeout_s=_CALL_S, metadata=_OTHER)


async def _models(client: Client, port: int) -> None:
    assert (await response_to(port, MODELS + b"\r\n"))[0] == 200


async def run(names: Sequence[str], seconds: float, without: bool) -> dict[str, str]:
    """Print the table; return the problem of each attack that is not withstood."""
    print(
        _row("attack", "p95 s", "failed", "edge", "orch.", "gateway", "verdict", "without the edge")
    )
    problems: dict[str, str] = {}
    opened: dict[str, str] = {}
    if without:
        for name in names:  # each on a new stack, which the last one may have broken
            async with _stack() as stack:
                alone = await attacked(stack, inner_ports(stack), "", seconds)
                seen = await attacked(stack, inner_ports(stack), name, seconds)
            opened[name] = seen.problem(alone) or "ok"
    async with _stack() as stack:
        ports = (stack.ports.orchestrator, stack.ports.gateway)
        await attacked(stack, ports, "", 2)  # warm
        alone = await attacked(stack, ports, "", 2 * seconds)
        for name in ("", *names):
            seen = await attacked(stack, ports, name, seconds) if name else alone
            verdict = seen.problem(alone)
            if verdict:
                problems[name] = verdict
            cells = [f"{seen.p95_s:.3f}", f"{len(seen.failed)}/{seen.requests}"]
            cells += [f"+{seen.grown_mib[key]:.0f}" for key in ("edge", "orchestrator", "gateway")]
            print(_row(name or "(none)", *cells, verdict or "ok", opened.get(name, "")), flush=True)
    return problems


def _stack() -> Stack:
    return Stack(environment=TOYS, gateway=True, edge=True)


def _row(name: str, *cells: str) -> str:
    widths = (6, 9, 6, 6, 8, 28, 28)
    return f"{name:24}" + " ".join(
        f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False)
    )


def main() -> None:
    """Run the chosen attacks."""
    parser = argparse.ArgumentParser(prog=Path(__file__).parent.name, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--without", action="store_true", help="also without the edge")
    given = parser.parse_args()
    names = [name for name in ATTACKS if name.startswith(tuple(given.only))]
    problems = asyncio.run(run(names, given.seconds, given.without))
    print(json.dumps({"attacks": len(names), "not_withstood": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
