"""The cost of services and gRPC: `make bench-services`.

The same requests are answered through three processes and by `run()` within this process, by turns
and with the same seeds, so with the same tokens. Idle threads sleep in all of these processes. Then
one request of 1,024 candidates goes through the services.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import Any

from benchmarks.harness import (
    PROMPTS,
    SETTLE_S,
    alternate,
    full_length,
    medians,
    parse_arguments,
    report,
    rounded,
    running,
)
from experiments.models import Models, generation_of, in_process
from orchestrator.loop.run import run
from specrej import Client, threads
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
        rounds=(4, "measured rounds; in every second one the services come first"),
    )
    threads.bound_spinning()
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
    async with in_process((_REWARD,)) as models, running() as (_, client):
        calls = {
            "services": partial(_by_services, arguments, client),
            "in_process": partial(_in_process, arguments, models),
        }
        measured = await alternate(calls, arguments.rounds, SETTLE_S)
        many = await client.generate(PROMPTS[0], **full_length(_MANY, 16, seed=0))
    remote, local = ([generation for _, generation in of] for of in measured.values())
    tokens = [[generation.usage.generated_tokens for generation in of] for of in (remote, local)]
    assert tokens[0] == tokens[1]
    seconds = {name: rounded((s for s, _ in of), 3) for name, of in measured.items()}
    median = medians(seconds)
    shares = (generation.timings.score_ms / generation.timings.total_ms for generation in remote)
    return {
        "ratio": round(median["services"] / median["in_process"], 4),
        "seconds": seconds,
        "scoring_share": rounded(shares, 4),
        "many": {"n": many.n, "generated_tokens": many.usage.generated_tokens},
    }


async def _by_services(arguments: argparse.Namespace, client: Client, number: int) -> Generation:
    options = full_length(arguments.n, arguments.new, seed=number)
    return await client.generate(PROMPTS[number % len(PROMPTS)], **options)


async def _in_process(arguments: argparse.Namespace, models: Models, number: int) -> Generation:
    request = GenerationRequest(
        prompt=Prompt.from_user(PROMPTS[number % len(PROMPTS)]),
        sampling=Sampling(max_tokens=arguments.new, seed=number, ignore_eos=True),
        selection=Selection(n=arguments.n, rewards=(WeightedReward(_REWARD),)),
        cache=CacheControl.BYPASS,
    )
    return await generation_of(run(request, models.generator, models.scorers[_REWARD]))


if __name__ == "__main__":
    main()
