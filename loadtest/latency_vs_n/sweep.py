"""The process that measures the service at an address: `python -m loadtest.latency_vs_n.sweep`."""

from __future__ import annotations

import locust  # noqa: F401 - first: it replaces functions of the standard library

# isort: split
import json
import os
import signal
import sys
import time
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime

import gevent  # type: ignore[import-untyped]

from deploy.local.machine import describe_machine
from loadtest.calls import Caller
from loadtest.latency_vs_n.driver import Driver, MeasurementError
from loadtest.latency_vs_n.measure import Measured, Settings
from loadtest.latency_vs_n.options import parse, settings_of
from loadtest.latency_vs_n.report import print_table, write_page
from loadtest.latency_vs_n.results import Results, collate, write_csv, write_json
from specrej.contracts import ServiceDescription
from specrej.contracts.errors import SpecrejError
from specrej.security import credentials_from

# Longer than any request takes: a deadline would make the service hurry its cuts.
_TIMEOUT_S = 600.0


def main() -> None:
    """Measure, write the files, print a table and a JSON object."""
    # By default KeyboardInterrupt is raised in any greenlet, and some of them lose it.
    gevent.signal_handler(signal.SIGINT, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)
    arguments = parse()
    try:
        settings = settings_of(arguments)
        results, ended = _measure(settings, arguments.address)
    except (MeasurementError, SpecrejError, OSError, ValueError) as error:
        sys.exit(f"latency-vs-n: {error}")
    files = {kind: arguments.out / f"latency_vs_n.{kind}" for kind in ("json", "csv", "html")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(results, files["json"])
    write_csv(results, files["csv"])
    write_page(results, files["html"])
    print_table(results)
    summary = {
        "report": str(files["html"]),
        "requests": results.num_requests,
        "claim": asdict(results.claim) if results.claim else None,
        **describe_machine(),
    }
    print(json.dumps(summary))
    if isinstance(ended, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(f"latency-vs-n: {ended}" if ended else 0)


def _measure(settings: Settings, address: str) -> tuple[Results, BaseException | None]:
    """The results, and what ended the measurement early: an error or Ctrl-C."""
    measured: list[Measured] = []
    started = time.perf_counter()
    ended: BaseException | None = None
    with closing(Caller(address, _TIMEOUT_S, **credentials_from(os.environ))) as caller:
        facts = _facts(caller.describe(), settings, address)
        try:
            for block in Driver(caller, settings).measure():
                measured.append(block)
                _log(block, time.perf_counter() - started)
        except (MeasurementError, SpecrejError) as error:
            if not measured:
                raise
            ended = error
        except KeyboardInterrupt as error:
            ended = error
    if not measured:
        raise MeasurementError("interrupted before anything was measured")
    return collate(settings, facts, measured), ended


def _facts(service: ServiceDescription, settings: Settings, address: str) -> dict[str, str]:
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "service": address,
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
