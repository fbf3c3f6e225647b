"""Speculative Rejection against Best-of-N through all services: `make bench-rejection`.

Both algorithms answer the same prompts with the same seeds and N, by turns. Rewards are those of
the answers, complete ones preferred, and the highest of any answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks.harness import PROMPTS, parse_arguments, report, running_client
from specrej import FinishReason, GeometricSchedule
from specrej.client import Options
from specrej.contracts import Algorithm, CacheControl, Generation
from specrej.contracts.requests import MAX_RETURN_CANDIDATES


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        n=(32, "candidates"),
        new=(128, "most new tokens per candidate"),
        alpha=(0.5, "fraction rejected per round"),
        first=(16, "first decision token; each next one is twice as far"),
    )
    answers, slots_after = asyncio.run(_measure(arguments))
    rows = {algorithm.value: _row(answers[algorithm]) for algorithm in Algorithm}
    fast, full = rows.values()
    report(
        f"N={arguments.n}, {arguments.new} new tokens, alpha {arguments.alpha}",
        (
            *("algorithm", "tokens", "seconds", "scoring share"),
            *("reward, complete preferred", "complete", "reward alone"),
        ),
        [(name, *row.values()) for name, row in rows.items()],
        {
            "token_ratio": round(fast["tokens"] / full["tokens"], 4),
            "wall_ratio": round(fast["seconds"] / full["seconds"], 4),
            "slots_after": slots_after,
            "algorithms": rows,
        },
    )


async def _measure(
    arguments: argparse.Namespace,
) -> tuple[dict[Algorithm, list[tuple[Generation, float]]], int]:
    """Answers with wall seconds, and the most slots that were owned after a request."""
    answers: dict[Algorithm, list[tuple[Generation, float]]] = {name: [] for name in Algorithm}
    slots_after = 0
    async with running_client() as client:
        await client.generate("Warm up.", n=arguments.n, max_tokens=8)
        for seed, prompt in enumerate(PROMPTS, start=1):
            for algorithm in Algorithm:
                options = Options(
                    n=arguments.n,
                    alpha=arguments.alpha,
                    schedule=GeometricSchedule(first=arguments.first),
                    algorithm=algorithm,
                    max_tokens=arguments.new,
                    seed=seed,
                    cache=CacheControl.BYPASS,
                    return_candidates=min(arguments.n, MAX_RETURN_CANDIDATES),
                )
                started = time.perf_counter()
                answer = await client.generate(prompt, **options)
                answers[algorithm].append((answer, time.perf_counter() - started))
                slots_after = max(slots_after, (await client.describe()).generator.slots.owned)
    return answers, slots_after


def _row(answers: list[tuple[Generation, float]]) -> dict[str, Any]:
    seconds = sum(wall_s for _, wall_s in answers)
    generations = [generation for generation, _ in answers]
    score_s = sum(generation.timings.score_ms for generation in generations) / 1e3
    return {
        "tokens": sum(generation.usage.generated_tokens for generation in generations),
        "seconds": round(seconds, 2),
        "scoring_share": round(score_s / seconds, 4),
        "reward": round(statistics.mean(g.best.score for g in generations), 4),
        "complete": sum(g.best.finish is FinishReason.STOP for g in generations),
        # Of the returned candidates, truncated or not.
        "reward_alone": round(
            statistics.mean(max(c.score for c in g.candidates) for g in generations), 4
        ),
    }


if __name__ == "__main__":
    main()
