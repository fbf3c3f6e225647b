"""What answers cost and buy: `make loadtest-report`, or `python -m loadtest.report --help`.

Runs Locust against the service at SPECREJ_ADDRESS (--address), or against all services started on
this machine: one user with both algorithms at each N in turn, then more and more users with
Speculative Rejection at one N, and with Best-of-N at the N that buys the same reward. Writes one
page, report.html, its picture report.svg, the figures as report.json, and Locust's CSV files. Other
arguments, such as --prompts FILE and --alpha, are Locust's.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from typing import Any

from deploy.local.machine import describe_machine
from deploy.local.processes import ProcessError
from loadtest.__main__ import run_locust, serving
from loadtest.bought import Bought, at_equal_reward, bought
from specrej.contracts import Algorithm

# Columns of Locust's CSV file, by their names on its page.
_CSV = {
    "method": "Type", "name": "Name", "num_requests": "Request Count",
    "median_response_time": "50%", "response_time_percentile_0.95": "95%",
    "avg_response_time": "Average Response Time", "avg_content_length": "Average Content Size",
    "total_rps": "Requests/s",
}  # fmt: skip
_OURS, _FULL = Algorithm.SPECULATIVE_REJECTION.value, Algorithm.BEST_OF_N.value


def main() -> None:
    """Measure, write the page, print its table and a JSON object; the exit code is Locust's."""
    parser = argparse.ArgumentParser(prog="make loadtest-report", description=__doc__)
    address = os.environ.get("SPECREJ_ADDRESS", "")
    parser.add_argument("--address", default=address, help="host:port [SPECREJ_ADDRESS]")
    several: dict[str, Any] = {"type": int, "nargs": "+", "default": [1, 4, 16, 64]}
    parser.add_argument("--n", **several, help="candidates, of one user")
    parser.add_argument("--users", **several, help="numbers of users")
    parser.add_argument("--users-n", type=int, default=16, help="candidates, one of --n")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="directory")
    given, given.more = parser.parse_known_args()
    if given.users_n not in given.n:
        parser.error("--users-n must be one of --n")
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        code, alone, loaded = asyncio.run(_measure(given))
    except ProcessError as error:
        parser.exit(1, f"loadtest-report: {error}\n")
    print(*("\t".join(row) for row in table([*alone, *loaded])), sep="\n")
    if not code:
        draw(given.out / "report.svg", alone, loaded)
        (given.out / "report.html").write_text(page(alone, loaded), "utf-8")
    rows = {"alone": [*map(asdict, alone)], "loaded": [*map(asdict, loaded)]}
    result = {**rows, "max_tokens": given.max_tokens, **describe_machine()}
    (given.out / "report.json").write_text(f"{json.dumps(result, indent=1)}\n", "utf-8")
    print(json.dumps(result))
    sys.exit(code)


async def _measure(given: argparse.Namespace) -> tuple[int, list[Bought], list[Bought]]:
    """Locust's exit code, and what was measured with one and with more users until it was not 0."""
    alone: list[Bought] = []
    loaded: list[Bought] = []
    async with serving(given.address) as address:

        async def run(users: int, algorithm: str, n: int) -> tuple[int, list[Bought]]:
            file = given.out / f"{algorithm}-{n}-{users}"
            load = (
                *("--headless", "--only-summary", "--csv", str(file)),
                *("--algorithm", algorithm, "--users", str(users), "--spawn-rate", "100"),
                *("--n", str(n), "--run-time", f"{math.ceil(given.step_seconds)}s"),
                *("--max-tokens", str(given.max_tokens), "--request-timeout", "600"),
                *("--stop-timeout", "600", *given.more),
            )
            return await run_locust(address, load), read_rows(Path(f"{file}_stats.csv"), users)

        for n in sorted(given.n):
            code, rows = await run(1, "both", n)
            alone += rows
            if code:
                return code, alone, loaded
        compared = of_equal_reward(alone, given.users_n)
        for users in given.users if compared else ():
            for one in compared:
                code, rows = await run(users, one.algorithm, one.n)
                loaded += rows
                if code or not rows:
                    return code or _no_answers(one.algorithm), alone, loaded
    return (0 if compared else _no_answers("one algorithm")), alone, loaded


def of_equal_reward(alone: Sequence[Bought], n: int) -> list[Bought]:
    """Speculative Rejection with n candidates and the Best-of-N of the nearest reward.

    Empty if one of them has no answer.
    """
    for ours in _of(_OURS, alone):
        if ours.n == n and (full := _of(_FULL, alone)):
            return [ours, min(full, key=lambda one: abs(one.reward - ours.reward))]
    return []


def _no_answers(of: str) -> int:
    """Say why there is no report; the exit code."""
    text = "has no answer in its time: try more --step-seconds or fewer --max-tokens"
    print(f"loadtest-report: {of} {text}", file=sys.stderr)
    return 1


def read_rows(path: Path, users: int) -> list[Bought]:
    """What Locust's CSV file says of answers; N without answers are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = ({key: row[of] for key, of in _CSV.items()} for row in csv.DictReader(file))
        return bought(rows, users)


def table(rows: Sequence[Bought]) -> list[list[str]]:
    """The measurements as text, names of columns first."""
    return [
        [field.name for field in fields(Bought)],
        *([*map(str, one.cells.values())] for one in rows),
    ]


def _of(algorithm: str, rows: Sequence[Bought]) -> list[Bought]:
    return [one for one in rows if one.algorithm == algorithm]


def draw(path: Path, alone: Sequence[Bought], loaded: Sequence[Bought]) -> None:
    """Write an SVG file: seconds against N; reward against tokens; answers per second against
    users."""
    from matplotlib.figure import Figure  # only here: to import it takes seconds

    figure = Figure(figsize=(13, 4), layout="constrained")
    seconds, rewards, rates = figure.subplots(1, 3)
    for color, algorithm in (("C0", _OURS), ("C1", _FULL)):
        mine, many = _of(algorithm, alone), _of(algorithm, loaded)
        ns, tokens = [one.n for one in mine], [one.tokens for one in mine]
        seconds.plot(ns, [one.median_s for one in mine], "o-", color=color, label=algorithm)
        seconds.plot(ns, [one.p95_s for one in mine], "o--", color=color)
        rewards.plot(tokens, [one.reward for one in mine], "o-", color=color, label=algorithm)
        for one in mine:
            rewards.annotate(f" N={one.n}", (one.tokens, one.reward), fontsize=8)
        label = f"{algorithm}, N={many[0].n}, reward {many[0].reward:.3f}"
        users, per_s = [one.users for one in many], [one.answers_per_s for one in many]
        rates.plot(users, per_s, "o-", color=color, label=label)
    for axes, across, up in (
        (seconds, "N, candidates per request", "seconds to the answer (dashed: 95 %)"),
        (rewards, "generated tokens per answer", "mean reward of the answer"),
        (rates, "users at a time", "answers per second, at equal reward"),
    ):
        axes.set(xlabel=across, ylabel=up, xscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    for axes, ticks in ((seconds, ns), (rates, users)):
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
    rates.set_ylim(bottom=0)
    figure.savefig(path, metadata={"Date": None})


def page(alone: Sequence[Bought], loaded: Sequence[Bought]) -> str:
    """The page: what an equal reward costs, the picture and the table."""
    items = []
    for one in _of(_OURS, alone):
        tokens, median_s = at_equal_reward(one, _of(_FULL, alone))
        ours = f"reward {one.reward:.3f} for {one.tokens:.0f} tokens in {one.median_s:.2f} s"
        items.append(f"N = {one.n}: {ours}; {_FULL}: {tokens:.0f} tokens, {median_s:.2f} s")
    rows = ("".join(f"<td>{escape(cell)}" for cell in row) for row in table([*alone, *loaded]))
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    return f"""<!doctype html><meta charset="utf-8"><title>specrej under load</title>
<style>body {{ font: 15px sans-serif }} img {{ width: 100% }} td {{ padding: .2em .8em }}</style>
<h1>What answers cost and buy</h1><p>{escape(machine)}</p>
<img src="report.svg" alt="Seconds, reward and answers per second of both algorithms">
<h2>{_OURS}, and {_FULL} of the same reward, between its N</h2><ul><li>{"<li>".join(items)}</ul>
<h2>All measurements</h2><table><tr>{"<tr>".join(rows)}</table>
"""


if __name__ == "__main__":
    main()
