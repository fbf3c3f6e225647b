"""What services and gRPC cost: `python -m benchmarks.services`.

The same request through three processes and by `run()` with everything in this one, interleaved,
same seeds, so the same tokens; what part of it is scoring; then one request of 1,024 candidates
through the services. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.rejection import PROMPTS
from generator_service.loading import load_generator
from generator_service.settings import GeneratorSettings
from orchestrator.run import run
from reward_service.relevance import RelevanceReward
from reward_service.worker import Worker
from specrej import Client
from specrej.client import Options
from specrej.contracts import (
    CacheControl,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    Prompt,
    Sampling,
    Scorer,
    Selection,
    WeightedReward,
)
from specrej.stack import Stack

RELEVANCE = Path(".models/relevance")
_MANY = 1024


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    result = asyncio.run(_measure(arguments))
    table = Table(title=f"N={arguments.n}, {arguments.new} new tokens")
    for heading in ("where", "seconds (median)", "seconds"):
        table.add_column(heading)
    for name in ("services", "in_process"):
        seconds = result["seconds"][name]
        table.add_row(name, f"{statistics.median(seconds):.2f}", str(seconds))
    Console(width=100).print(table)
    print(f"services / in process {result['ratio']:.3f}; N={_MANY}: {result['many']}")
    print(f"scoring, as a share of a request's time: {result['scoring_share']}")
    print(json.dumps({**result, "n": arguments.n, **describe_machine()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=64, help="candidates")
    parser.add_argument("--new", type=int, default=128, help="new tokens per candidate")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    generator = await asyncio.to_thread(load_generator, GeneratorSettings())
    scorer = await Worker.start(lambda: RelevanceReward(RELEVANCE))
    seconds: dict[str, list[float]] = {"services": [], "in_process": []}
    shares: list[float] = []
    async with Stack() as stack, Client(stack.orchestrator_address, timeout_s=600) as client:
        for number in range(arguments.rounds + 1):
            request = _request(arguments, PROMPTS[number % len(PROMPTS)], seed=number)
            began = time.perf_counter()
            remote = await _through_services(client, request)
            between = time.perf_counter()
            local = await _in_process(request, generator, scorer)
            ended = time.perf_counter()
            assert remote.usage.generated_tokens == local.usage.generated_tokens
            if number:  # the first one warms up
                seconds["services"].append(round(between - began, 3))
                shares.append(round(remote.timings.score_ms / remote.timings.total_ms, 4))
                seconds["in_process"].append(round(ended - between, 3))
        many = await client.generate(
            PROMPTS[0], n=_MANY, max_tokens=16, cache=CacheControl.BYPASS, ignore_eos=True
        )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ratio": round(medians["services"] / medians["in_process"], 4),
        "seconds": seconds,
        "scoring_share": shares,
        "many": {"n": many.n, "generated_tokens": many.usage.generated_tokens},
    }


def _request(arguments: argparse.Namespace, prompt: str, seed: int) -> GenerationRequest:
    return GenerationRequest(
        prompt=Prompt.from_user(prompt),
        sampling=Sampling(max_tokens=arguments.new, seed=seed, ignore_eos=True),
        selection=Selection(n=arguments.n, rewards=(WeightedReward("relevance"),)),
        cache=CacheControl.BYPASS,
    )


async def _through_services(client: Client, request: GenerationRequest) -> Generation:
    options = Options(
        n=request.selection.n,
        max_tokens=request.sampling.max_tokens,
        seed=request.sampling.seed,
        ignore_eos=True,
        cache=request.cache,
    )
    return await client.generate(request.prompt.messages[0].content, **options)


async def _in_process(
    request: GenerationRequest, generator: Generator, scorer: Scorer
) -> Generation:
    async with aclosing(run(request, generator, scorer)) as events:
        last = [event async for event in events][-1]
    assert isinstance(last, Finished)
    return last.generation


if __name__ == "__main__":
    main()
