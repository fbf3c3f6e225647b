"""Latency against N: `make latency-vs-n`, or `python -m loadtest.latency_vs_n --help`.

Measures Speculative Rejection and Best-of-N at every N with one request at a time, at a fixed rate
and at saturation. Writes latency_vs_n.json, .csv and .html, also when it is interrupted. The last
line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.local.machine import describe_machine
from deploy.local.processes import ProcessError
from deploy.local.stack import Stack
from loadtest.latency_vs_n.measure import Measured, MeasurementError, Settings, measure
from loadtest.latency_vs_n.report import print_table, write_page
from loadtest.latency_vs_n.results import Results, collate, write_csv, write_json
from loadtest.prompts import OWN_PROMPTS, read_prompts
from specrej import Client
from specrej.credentials import credentials_from
from specrej.errors import SpecrejError

# About a minute on the embedded models.
_QUICK = {"ns": (1, 2, 4), "minutes": 0.0, "max_tokens": 32, "rate": 2.0}
# Longer than any request takes: a deadline would make the service hurry its cuts.
_TIMEOUT_S = 600.0


def main() -> None:
    """Measure, write the files, print a table and a JSON object."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        settings = _settings(arguments)
        results, interrupted = asyncio.run(_measure(settings, arguments.address))
    except (MeasurementError, ProcessError, SpecrejError, OSError, ValueError) as error:
        parser.exit(1, f"latency-vs-n: {error}\n")
    files = {kind: arguments.out / f"latency_vs_n.{kind}" for kind in ("json", "csv", "html")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(results, files["json"])
    write_csv(results, files["csv"])
    write_page(results, files["html"])
    print_table(results)
    print(
        json.dumps(
            {
                "report": str(files["html"]),
                "requests": results.num_requests,
                "claim": asdict(results.claim) if results.claim else None,
                **describe_machine(),
            }
        )
    )
    sys.exit(130 if interrupted else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="latency-vs-n", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/latency-vs-n"), help="folder of the files"
    )
    parser.add_argument(
        "--address", default="", help="host:port of a service; default: start one on this machine"
    )
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="file, one per line")
    parser.add_argument("--quick", action="store_true", help=f"a small run: {_QUICK}")
    defaults = Settings(())
    parser.add_argument("--ns", type=int, nargs="+", help=f"default: {defaults.ns}")
    for name, kind, text in (
        ("minutes", float, "no measurement begins later; everything is measured at least once"),
        ("max_tokens", int, "most new tokens of a candidate"),
        ("alpha", float, "fraction rejected per round"),
        ("rate", float, "arrivals per second at a fixed rate"),
        ("patience_s", float, "seconds until a request at a fixed rate is cancelled"),
        ("slo_s", float, "seconds within which an answer is in time"),
    ):
        flag = "--" + name.replace("_", "-")
        default = getattr(defaults, name)
        parser.add_argument(flag, type=kind, help=f"{text}; default: {default:g}")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    """Flags go before the values of --quick, and those before the defaults.

    Raises:
        OSError, ValueError: the prompts cannot be read.
    """
    names = {field.name for field in fields(Settings)} - {"prompts"}
    given = {name: getattr(arguments, name) for name in names}
    values: dict[str, Any] = _QUICK if arguments.quick else {}
    values = values | {name: value for name, value in given.items() if value is not None}
    if "ns" in values:
        values["ns"] = tuple(sorted(values["ns"]))
    return Settings(read_prompts(arguments.prompts), **values)


async def _measure(settings: Settings, address: str) -> tuple[Results, bool]:
    """The results, and whether Ctrl-C ended the measurement early."""
    measured: list[Measured] = []
    started = time.perf_counter()
    async with _client(address) as client:
        facts = await _facts(client, settings, address)
        interrupted = False
        try:
            async with aclosing(measure(client, settings)) as blocks:
                async for block in blocks:
                    measured.append(block)
                    _log(block, time.perf_counter() - started)
        except asyncio.CancelledError:
            interrupted = True
            task = asyncio.current_task()
            assert task
            task.uncancel()
    if not measured:
        raise MeasurementError("interrupted before anything was measured")
    return collate(settings, facts, measured), interrupted


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[Client]:
    """A client of the service at `address`, or of a stack that runs as long as the context."""
    if address:
        async with Client(address, timeout_s=_TIMEOUT_S, **credentials_from(os.environ)) as client:
            yield client
        return
    print("starting the services", file=sys.stderr, flush=True)
    async with (
        Stack() as stack,
        Client(stack.orchestrator_address, timeout_s=_TIMEOUT_S) as client,
    ):
        yield client


async def _facts(client: Client, settings: Settings, address: str) -> dict[str, str]:
    service = await client.describe()
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "service": address or "all processes on the client's machine",
        "model": service.generator.model,
        "device": service.generator.device,
        "slots": service.generator.slots.capacity,
        "reward": service.rewards[0] if service.rewards else "likelihood",
        **describe_machine(),
        "N": ", ".join(map(str, settings.ns)),
        "new tokens": f"{settings.max_tokens} at most",
        "prompts": " / ".join(settings.prompts),
        "command": "python -m loadtest.latency_vs_n " + " ".join(sys.argv[1:]),
    }
    return {name: str(value) for name, value in facts.items()}


def _log(measured: Measured, elapsed_s: float) -> None:
    block = measured.block
    slowest = max(request.seconds for request in measured.requests)
    print(
        f"{elapsed_s / 60:.1f} min: repeat {block.repeat + 1}, {block.condition.value}, "
        f"{block.algorithm.value}, N={block.n}: {len(measured.requests)} requests, "
        f"slowest {slowest:.1f} s",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
