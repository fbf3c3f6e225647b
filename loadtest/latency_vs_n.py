"""Latency against N: `make latency-vs-n`, or `python -m loadtest.latency_vs_n --help`.

Runs Locust with both algorithms at each N in turn against the service at SPECREJ_ADDRESS
(--address), or against all services started on this machine. Writes Locust's CSV files and one
plot of the latency of whole answers.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from deploy.local.machine import describe_machine
from deploy.local.processes import ProcessError
from loadtest.__main__ import run_locust
from loadtest.options import counts
from loadtest.thresholds import Kind
from loadtest.workload import split_label

# Milliseconds at 50 % and 95 % by series and N.
Latencies = Mapping[str, Mapping[int, tuple[float, float]]]


def main() -> None:
    """Measure, plot and print a table and a JSON object; the exit code is Locust's."""
    parser = argparse.ArgumentParser(prog="make latency-vs-n", description=__doc__)
    address = os.environ.get("SPECREJ_ADDRESS", "")
    parser.add_argument("--address", default=address, help="host:port [SPECREJ_ADDRESS]")
    parser.add_argument("--n", default="1,2,4,8,16,32,64,128,256", help="candidates per request")
    parser.add_argument("--step-seconds", type=float, default=120.0, help="duration of each N")
    parser.add_argument("--users", type=int, default=1, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens")
    parser.add_argument("--rate", type=float, default=0.0, help="open loop: arrivals per second")
    parser.add_argument("--out", type=Path, default=Path("build/latency-vs-n"), help="directory")
    arguments = parser.parse_args()
    try:
        run_time_s = math.ceil(len(counts(arguments.n)) * arguments.step_seconds)
    except argparse.ArgumentTypeError as error:
        parser.error(f"--n: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    load = (
        *("--headless", "--only-summary", "--csv", str(arguments.out / "latency_vs_n")),
        *("--algorithm", "both", "--users", str(arguments.users), "--spawn-rate", "100"),
        *("--n", arguments.n, "--step-seconds", str(arguments.step_seconds)),
        *("--run-time", f"{run_time_s}s"),
        *("--max-tokens", str(arguments.max_tokens), "--rate", str(arguments.rate)),
        *("--request-timeout", "600", "StreamingUser"),
    )
    try:
        code = asyncio.run(run_locust(arguments.address, load))
    except ProcessError as error:
        parser.exit(1, f"latency-vs-n: {error}\n")
    latencies = read_latencies(arguments.out / "latency_vs_n_stats.csv")
    plot(latencies).savefig(arguments.out / "latency_vs_n.svg", metadata={"Date": None})
    print(f"{'algorithm':24}{'N':>6}{'median, ms':>12}{'95 %, ms':>12}")
    for series, by_n in latencies.items():
        for n, (median, p95) in sorted(by_n.items()):
            print(f"{series:24}{n:>6}{median:>12.0f}{p95:>12.0f}")
    print(json.dumps({"out": str(arguments.out), "ms": latencies, **describe_machine()}))
    sys.exit(code)


def read_latencies(path: Path) -> Latencies:
    """Latencies of answers from Locust's CSV file; N without answers are left out."""
    latencies: dict[str, dict[int, tuple[float, float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["Type"] == Kind.ANSWER and int(row["Request Count"]):
                series, n = split_label(row["Name"])
                latencies.setdefault(series, {})[n] = float(row["50%"]), float(row["95%"])
    return latencies


def plot(latencies: Latencies) -> Figure:
    """Median (solid) and 95th percentile (dashed) against N, both axes logarithmic."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ns: Sequence[int] = sorted({n for by_n in latencies.values() for n in by_n})
    for number, (series, by_n) in enumerate(latencies.items()):
        own = sorted(by_n)
        for at, style, label in ((0, "o-", series), (1, "o--", None)):
            seconds = [by_n[n][at] / 1e3 for n in own]
            axes.plot(own, seconds, style, color=f"C{number}", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ns, map(str, ns))
    axes.set(xlabel="N, candidates per request", ylabel="seconds to the whole answer", yscale="log")
    axes.grid(alpha=0.3)
    if latencies:
        axes.legend(title="solid: median; dashed: 95 %")
    return figure


if __name__ == "__main__":
    main()
