"""Preference pairs by rejection sampling: the best and the worst of N answers to each prompt.

Each output line is a conversational preference example of TRL, as its DPOTrainer and RewardTrainer
read, with the scores of both answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrej import Algorithm, Client, FinishReason, RankedCandidate, SpecrejError


def pair_of(
    prompt: str, candidates: tuple[RankedCandidate, ...], min_margin: float
) -> dict[str, Any] | None:
    """The best and the worst complete answer; None if their scores differ by less than the margin.

    Answers cut off at `max_tokens` are left out: the pair would teach length.
    """
    complete = [c for c in candidates if c.finish is FinishReason.STOP and c.text.strip()]
    if len(complete) < 2:
        return None
    best = max(complete, key=lambda candidate: candidate.score)
    worst = min(complete, key=lambda candidate: candidate.score)
    if best.score - worst.score < min_margin or best.text == worst.text:
        return None
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": best.text}],
        "rejected": [{"role": "assistant", "content": worst.text}],
        "score_chosen": best.score,
        "score_rejected": worst.score,
    }


async def run(options: argparse.Namespace) -> None:
    with options.prompts.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    work, num_pairs = iter(prompts), 0
    part = options.pairs.with_name(f"{options.pairs.name}.part")  # a failure keeps earlier pairs
    with part.open("w", encoding="utf-8") as file:

        async def worker(client: Client, work: Iterator[str]) -> None:
            nonlocal num_pairs
            for prompt in work:  # shared by all workers
                generation = await client.generate(
                    prompt,
                    n=options.n,
                    # Speculative Rejection never completes the worst.
                    algorithm=Algorithm.BEST_OF_N,
                    return_candidates=options.n,
                    max_tokens=128,
                    temperature=0.8,
                )
                if pair := pair_of(prompt, generation.candidates, options.min_margin):
                    file.write(json.dumps(pair, ensure_ascii=False) + "\n")
                    num_pairs += 1

        async with Client(options.address, timeout_s=300) as client, asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(worker(client, work))
    part.replace(options.pairs)
    print(f"{num_pairs} pairs of {len(prompts)} prompts in {options.pairs}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--n", type=int, default=8, help="answers to each prompt, 2 .. 64")
    parser.add_argument(
        "--min-margin", type=float, default=0.1, help="between the scores of a pair"
    )
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    options = parser.parse_args()
    if options.concurrency < 1 or options.n < 2:
        parser.error("--concurrency must be 1 or more, --n 2 or more")
    try:
        asyncio.run(run(options))
    except* SpecrejError as failed:
        sys.exit(f"preferences: {failed.exceptions[0]}")


if __name__ == "__main__":
    main()
