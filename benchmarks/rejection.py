"""Speculative Rejection against Best-of-N on the running stack: `python -m benchmarks.rejection`.

Starts all services, sends both kinds of request through the public API, interleaved, the same N,
prompts and seeds. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from specrej import Client, FinishReason, Generation, Schedule
from specrej.client import Options
from specrej.contracts import Algorithm, CacheControl
from specrej.stack import Stack

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short letter asking a neighbour to keep the noise down at night.",
    "What should I pack for three days of hiking in the mountains?",
)


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    runs = asyncio.run(_measure(arguments))
    _report(arguments, *runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=32, help="candidates")
    parser.add_argument("--new", type=int, default=128, help="most new tokens per candidate")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--first", type=int, default=16, help="first decision token, then doubling")
    return parser.parse_args()


async def _measure(
    arguments: argparse.Namespace,
) -> tuple[dict[str, list[Generation]], dict[str, list[float]], list[int]]:
    """Answers and wall seconds per algorithm, and slots still owned after each request."""
    slots_after: list[int] = []
    answers: dict[str, list[Generation]] = {}
    seconds: dict[str, list[float]] = {}
    async with Stack() as stack, Client(stack.orchestrator_address, timeout_s=600) as client:
        await client.generate("Warm up.", n=arguments.n, max_tokens=8)
        for seed, prompt in enumerate(PROMPTS, start=1):
            for algorithm in Algorithm:
                began = time.perf_counter()
                answer = await client.generate(prompt, **_options(arguments, algorithm, seed))
                seconds.setdefault(algorithm.value, []).append(time.perf_counter() - began)
                answers.setdefault(algorithm.value, []).append(answer)
                owned = (await client.describe()).generator.slots.owned
                slots_after.append(owned)
    return answers, seconds, slots_after


def _options(arguments: argparse.Namespace, algorithm: Algorithm, seed: int) -> Options:
    return Options(
        n=arguments.n,
        alpha=arguments.alpha,
        schedule=Schedule(first=arguments.first),
        algorithm=algorithm,
        max_tokens=arguments.new,
        seed=seed,
        cache=CacheControl.BYPASS,
    )


def _report(
    arguments: argparse.Namespace,
    answers: dict[str, list[Generation]],
    seconds: dict[str, list[float]],
    slots_after: list[int],
) -> None:
    table = Table(title=f"N={arguments.n}, {arguments.new} new tokens, alpha {arguments.alpha}")
    for heading in ("algorithm", "tokens", "seconds", "scoring share", "reward (mean)", "complete"):
        table.add_column(heading)
    rows = {}
    for name, generations in answers.items():
        rows[name] = row = {
            "tokens": sum(each.usage.generated_tokens for each in generations),
            "seconds": round(sum(seconds[name]), 2),
            "scoring_share": round(
                sum(each.timings.score_ms for each in generations) / sum(seconds[name]) / 1e3, 4
            ),
            "reward": round(statistics.mean(each.best.score for each in generations), 4),
            # A complete answer goes before a truncated one, whatever their rewards.
            "complete": sum(each.best.finish is FinishReason.STOP for each in generations),
        }
        table.add_row(name, *(str(value) for value in row.values()))
    Console(width=100).print(table)
    fast, full = (rows[each.value] for each in Algorithm)
    result = {
        "token_ratio": round(fast["tokens"] / full["tokens"], 4),
        "wall_ratio": round(fast["seconds"] / full["seconds"], 4),
        "slots_after": max(slots_after),
        "algorithms": rows,
        **describe_machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
