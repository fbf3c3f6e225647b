"""Attacks on real processes behind the real Envoy: `make attacks`, or with ARGS="--only h2 hold".

Another tenant sends small requests over gRPC and HTTP, alone and during each attack. The table has
its p95 and failed requests, and how many MiB each process grew. An attack is withstood if no
request fails, the p95 is within three times and 0.15 s of alone, nothing grows beyond its bound
(descriptors, logs and metrics, too), and no more of its own requests are answered than may be. With
--without each runs first without its defence, and the last column says what is found: on the
services' own ports, without Envoy, or on a copy of the code without the line of `DEFENCES`.
The last line on stdout is one JSON object; the exit code is 1 if an attack is not withstood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import psutil  # type: ignore[import-untyped]

from deploy.local.stack import Stack
from specrej import Client
from specrej.contracts import CacheControl, Options
from specrej.contracts.errors import SpecrejError
from tests.attacks.wire import ATTACKS, FAILING
from tests.deploy.test_edge import inner_ports
from tests.endpoints import scrape
from tests.gateway.gateways import MODELS, response_to
from tests.simulation.defects import changed

Ports = tuple[int, int]  # gRPC and HTTP
_MIB = 2**20
# How much may grow, and stays bounded at: MiB of a process and of all logs, thousands of series,
# descriptors, slots that nobody frees, and answers beyond those that an attack may have.
_FILES = ("orchestrator files", "gateway files")
_BOUNDS = {"edge": 200, "logs": 5, "series": 0.5, "answers": 0, **dict.fromkeys(_FILES, 300)}
_BOUNDS |= {"slots": 0}
_BOUND_MIB = 40
# Attacks none of whose requests may be answered; for others the edge's rate is the bound.
REFUSED = (
    *("trust/two-tenants", "trust/two-identities", "trust/host", "trust/other-type"),
    *("framing/cl-te", "framing/underscores", "framing/old"),
)
BURST, PER_S = 256, 100
_BEYOND = (
    "orchestrator/edge/admission.py",
    "if has_running or self._beyond >= most // 4:",
    "if True:",
)
_LENGTHS = (
    "specrej/contracts/validation.py",
    "_MOST_FIELDS = 1 << 16, 1 << 14",
    "_MOST_FIELDS = 1 << 60, 0; MAX_ITEMS = dict.fromkeys(MAX_ITEMS, 1 << 60)",
)
_SESSIONS = (  # that end with their streams
    "generator_service/servicer.py",
    "async with AsyncExitStack() as resources:",
    "globals().setdefault('left', []).append(resources := AsyncExitStack())\n        if True:",
)
# Defences in the services: a file, its text and the text without.
DEFENCES: Mapping[str, tuple[str, str, str]] = {
    "hold/unread-stream": _BEYOND,
    "hold/unread-http": _BEYOND,
    "fairness/one-queue": _BEYOND,
    "fairness/new-tenants": (
        "orchestrator/edge/admission.py",
        "self._newest if is_first else 0.0",
        "0.0",
    ),
    "fairness/long": _BEYOND,
    "amplify/many-turns": _LENGTHS,
    "amplify/many-tools": _LENGTHS,
    "amplify/many-biases": _LENGTHS,
    "amplify/slow-parsing": _LENGTHS,
    "amplify/many-values": ("gateway/bodies.py", "if _has_too_many_values(body):", "if False:"),
    "amplify/image": ("specrej/images.py", "if width * height > most:", "if False:"),
    "amplify/compressed": (
        "specrej/server/serving.py",
        '("grpc.compression_enabled_algorithms_bitset", 1)',
        '("grpc.compression_enabled_algorithms_bitset", 7)',
    ),
    "amplify/schedule": (
        "specrej/contracts/validation.py",
        "MIN_FACTOR = 1.01",
        "MIN_FACTOR = 1.0",
    ),
    "order/leaving": _SESSIONS,
    "order/deadlines": _SESSIONS,
    # The run of a caller that has left goes on, or keeps its permit.
    "order/leaving-streams": ("orchestrator/edge/servicer.py", "await ended(run)", "pass"),
    "order/deadlines-of-many": (
        "orchestrator/edge/admission.py",
        "yield permit\n            finally:",
        "yield permit\n            except ():\n                pass\n            else:",
    ),
    # The error of one session counts as the loss of its backend.
    "shared/failing-step": (
        "orchestrator/backends/generators.py",
        "except Unavailable as error:",
        "except Exception as error:",
    ),
    "shared/slow-reward": (
        "reward_service/worker.py",
        "return await asyncio.wrap_future(request.future)",
        "return request.future.result()",
    ),
    "shared/exiting-reward": (
        "reward_service/worker.py",
        "if isinstance(error, misread) or not isinstance(error, Exception):",
        "if isinstance(error, misread):",
    ),
    "trust/two-tenants": ("specrej/security.py", "if len(tenants) > 1:", "if False:"),
    "trust/two-identities": (
        "gateway/app.py",
        "if len(given) > 1:",
        "given = given[:1]\n        if False:",
    ),
    "trust/host": ("gateway/app.py", "if not self._settings.needs_no_token(host):", "if False:"),
    "trust/other-type": ("gateway/bodies.py", 'if kind != "application/json":', "if False:"),
    "observation/methods": (
        "specrej/server/interceptor.py",
        'details.method if handler else "unknown"',
        "details.method",
    ),
    "observation/http-methods": (
        "specrej/telemetry/traces.py",
        'method = method if method in _HTTP_METHODS else "_OTHER"',
        "",
    ),
    "observation/paths": (
        "gateway/app.py",
        'told = scope["method"], self._route, scope["scheme"]',
        'told = scope["method"], scope["path"], scope["scheme"]',
    ),
    "observation/names": (
        "orchestrator/observe/requests.py",
        "tenant=tenant_digest(tenant)",
        "tenant=tenant",
    ),
    "observation/baggage": (
        "specrej/telemetry/traces.py",
        "_CONTEXT = TraceContextTextMapPropagator()",
        '_CONTEXT = __import__("opentelemetry.propagate").propagate.get_global_textmap()',
    ),
}
_SETTINGS = {
    "SPECREJ_GENERATOR_MODEL": f"toy:step_ms=10,failing_seed={FAILING}",
    "SPECREJ_REWARD_REWARDS": json.dumps(
        [
            {"name": "toy", "kind": "toy"},
            *(
                {"name": name, "kind": "function", "function": f"tests.faults.rewards:{name}"}
                for name in ("slow", "exiting")
            ),
        ]
    ),
}
_CALL_S = 10.0
_FREED_S = 2.0  # for the slots of the last callers
_SHOWN = ("edge", "orchestrator", "gateway", "generator", "reward")
_OTHER = (("specrej-tenant", "other"),)
_SMALL = Options(n=4, max_tokens=8, cache=CacheControl.BYPASS)


@dataclass(frozen=True, slots=True)
class Seen:
    """What another tenant and the operator see of one attack."""

    p95_s: float
    failed: tuple[str, ...]
    requests: int
    grown: dict[str, float]

    def problem(self, alone: Seen) -> str:
        """Why it is not withstood; empty: it is."""
        if self.failed:
            return f"{len(self.failed)} of {self.requests} failed: {self.failed[0]}"
        if self.p95_s > max(3 * alone.p95_s, alone.p95_s + 0.15):
            return f"p95 {self.p95_s:.2f} s"
        bounds = {key: _BOUNDS.get(key, _BOUND_MIB) for key in self.grown}
        return ", ".join(f"{k} +{v:.1f}" for k, v in self.grown.items() if v > bounds[k])


async def attacked(stack: Stack, ports: Ports, name: str, seconds: float) -> Seen:
    """Run an attack (empty: none) on these ports; measure until it is over."""
    before, observed = _sizes(stack), await _observed(stack)
    most = dict(before)
    following = asyncio.create_task(_follow(stack, most))
    arguments = (name, *map(str, ports), str(seconds))
    attack = None
    if name:
        attack = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.attacks.wire", *arguments), stdout=PIPE
        )
        assert attack.stdout
        await attack.stdout.readline()  # it begins
    took: list[float] = []
    failed: list[str] = []
    printed = b""
    end = time.monotonic() + seconds
    try:
        async with Client(f"127.0.0.1:{ports[0]}") as client:
            while not took or time.monotonic() < end:
                for call in (_generate, _models):
                    began = time.monotonic()
                    try:
                        async with asyncio.timeout(_CALL_S):
                            await call(client, ports[1])
                    except (SpecrejError, OSError, EOFError, AssertionError) as error:
                        failed.append(f"{call.__name__[1:]} {type(error).__name__} {error}")
                    took.append(time.monotonic() - began)
    finally:
        following.cancel()
        if attack:
            printed, _ = await attack.communicate()
    grown = {key: most[key] - before[key] for key in most}
    after, until = await _observed(stack), time.monotonic() + _FREED_S
    while after["slots"] > observed["slots"] and time.monotonic() < until:
        await asyncio.sleep(0.1)
        after = await _observed(stack)
    grown |= {key: count - observed[key] for key, count in after.items()}
    allowed = 0 if name in REFUSED else BURST + PER_S * (seconds + 1)
    grown["answers"] = max(0, int(printed or 0) - allowed)
    return Seen(quantiles(took, n=20)[-1], tuple(failed), len(took), grown)


def _sizes(stack: Stack) -> dict[str, float]:
    """MiB of each process that runs, and descriptors of those with public ports."""
    sizes: dict[str, float] = {}
    for key, pid in stack.processes.items():
        with suppress(psutil.NoSuchProcess):  # else requests fail
            process = psutil.Process(pid)
            sizes[key] = process.memory_info().rss / _MIB
            if (files := f"{key} files") in _FILES:
                sizes[files] = process.num_fds()
    return sizes


async def _follow(stack: Stack, most: dict[str, float]) -> None:
    """Note the most of each size, until cancelled: peaks may be short."""
    while True:
        await asyncio.sleep(0.1)
        for key, size in _sizes(stack).items():
            most[key] = max(most[key], size)


async def _observed(stack: Stack) -> dict[str, float]:
    """MiB of logs, thousands of series of all services, and KV slots that are not free; the last
    two are infinite if a service does not answer."""
    series = slots = math.inf
    with suppress(OSError):
        page = await scrape(stack.metrics_urls)
        series = sum(map(len, page.values.values())) / 1e3
        slots = page.sum("specrej_slots", state="owned")
    logs = sum(path.stat().st_size for path in stack.log_dir.iterdir()) / _MIB
    return {"logs": logs, "series": series, "slots": slots}


async def _generate(client: Client, port: int) -> None:
    question = "Why is the sky blue?"
    await client.generate(question, **_SMALL, timeout_s=_CALL_S, metadata=_OTHER)


async def _models(client: Client, port: int) -> None:
    assert (await response_to(port, MODELS + b"\r\n"))[0] == 200


async def run(names: Sequence[str], seconds: float, without: bool) -> dict[str, str]:
    """Print the table; return the problem of each attack that is not withstood."""
    print(_row("attack", "p95 s", "failed", *_SHOWN, "verdict", "without its defence"))
    problems: dict[str, str] = {}
    opened: dict[str, str] = {}
    if without:
        for name in names:  # each on a new stack, which the last one may have broken
            async with _without(name) as (stack, ports):
                await attacked(stack, ports, "", 2)  # warm
                alone = await attacked(stack, ports, "", seconds)
                seen = await attacked(stack, ports, name, seconds)
            opened[name] = seen.problem(alone) or "ok"
            print(f"without its defence: {name:24} {opened[name]}", flush=True)
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
            cells += [f"+{seen.grown[key]:.0f}" for key in _SHOWN]
            print(_row(name or "(none)", *cells, verdict or "ok", opened.get(name, "")), flush=True)
    return problems


def _stack(**environment: str) -> Stack:
    return Stack(environment={**_SETTINGS, **environment}, gateway=True, edge=True)


@asynccontextmanager
async def _without(name: str) -> AsyncIterator[tuple[Stack, Ports]]:
    """A stack without an attack's defence, and the ports to attack.

    Raises ValueError: the entry of `DEFENCES` is stale.
    """
    if name not in DEFENCES:
        async with _stack() as stack:
            yield stack, inner_ports(stack)
        return
    with changed(*DEFENCES[name]) as path:
        async with _stack(PYTHONPATH=path, PYTHONSAFEPATH="1") as stack:
            yield stack, (stack.ports.orchestrator, stack.ports.gateway)


def _row(name: str, *cells: str) -> str:
    widths = (6, 9, 6, 12, 8, 9, 6, 28, 28)
    return f"{name:24}" + " ".join(
        f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False)
    )


def main() -> None:
    """Run the chosen attacks."""
    parser = argparse.ArgumentParser(prog=Path(__file__).parent.name, description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--without", action="store_true", help="also without each one's defence")
    given = parser.parse_args()
    names = [name for name in ATTACKS if name.startswith(tuple(given.only))]
    problems = asyncio.run(run(names, given.seconds, given.without))
    print(json.dumps({"attacks": len(names), "not_withstood": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
