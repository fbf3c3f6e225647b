"""The cost of services and gRPC: `make bench-services`.

The same requests are answered through three processes and by `run()` within this process, by turns
and with the same seeds, so with the same tokens. Then one request of 1,024 candidates goes through
the services.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks.harness import (
    PROMPTS,
    full_length,
    medians,
    parse_arguments,
    report,
    running,
)
from experiments.models import Models, generation_of, in_process
from orchestrator.loop.run import run
from specrej.contracts import (
    CacheControl,
    Generation,
    GenerationRequest,
    Prompt,
    Sampling,
    Selection,
    WeightedReward,
)

_MANY = 1024
_REWARD = "relevance"


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        n=(64, "candidates"),
        new=(128, "new tokens per candidate"),
        rounds=(3, "measured rounds"),
    )
    result = asyncio.run(_measure(arguments))
    seconds = result["seconds"]
    report(
        f"N={arguments.n}, {arguments.new} new tokens",
        ("where", "seconds (median)", "seconds"),
        [(name, f"{median:.2f}", seconds[name]) for name, median in medians(seconds).items()],
        {**result, "n": arguments.n},
        notes=(
            f"services / in process {result['ratio']:.3f}; N={_MANY}: {result['many']}",
            f"scoring, as a share of a request's time: {result['scoring_share']}",
        ),
    )


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"services": [], "in_process": []}
    shares: list[float] = []
    async with in_process((_REWARD,)) as models, running() as (_, client):
        for number in range(arguments.rounds + 1):
            prompt = PROMPTS[number % len(PROMPTS)]
            options = full_length(arguments.n, arguments.new, seed=number)
            started = time.perf_counter()
            remote = await client.generate(prompt, **options)
            between = time.perf_counter()
            local = await _in_process(arguments, prompt, number, models)
            ended = time.perf_counter()
            assert remote.usage.generated_tokens == local.usage.generated_tokens
            if number:  # the first round warms up
                seconds["services"].append(round(between - started, 3))
                seconds["in_process"].append(round(ended - between, 3))
                shares.append(round(remote.timings.score_ms / remote.timings.total_ms, 4))
        many = await client.generate(PROMPTS[0], **full_length(_MANY, 16, seed=0))
    median = medians(seconds)
    return {
        "ratio": round(median["services"] / median["in_process"], 4),
        "seconds": seconds,
        "scoring_share": shares,
        "many": {"n": many.n, "generated_tokens": many.usage.generated_tokens},
    }


async def _in_process(
    arguments: argparse.Namespace, prompt: str, seed: int, models: Models
) -> Generation:
    request = GenerationRequest(
        prompt=Prompt.from_user(prompt),
        sampling=Sampling(max_tokens=arguments.new, seed=seed, ignore_eos=True),
        selection=Selection(n=arguments.n, rewards=(WeightedReward(_REWARD),)),
        cache=CacheControl.BYPASS,
    )
    return await generation_of(run(request, models.generator, models.scorers[_REWARD]))


if __name__ == "__main__":
    main()
