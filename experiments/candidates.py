"""All candidates of prompts, generated to their ends by a service that runs on this machine, in a
file of JSON lines that can be continued."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.local.stack import Stack
from experiments.recorded import Answer
from orchestrator.loop.composition import LIKELIHOOD
from specrej import Client
from specrej.contracts import Algorithm, CacheControl, Prompt, Sampling


@asynccontextmanager
async def serving(
    n: int, max_tokens: int, model: str, reward: Mapping[str, Any] | None = None
) -> AsyncIterator[Client]:
    """A client of services with room for `n` whole answers. `model`: empty for the embedded one;
    `reward`: the spec of one in place of the embedded ones."""
    environment = {"SPECREJ_GENERATOR_KV_SLOTS": str(n * max_tokens + 4096)}
    if reward:
        environment["SPECREJ_REWARD_REWARDS"] = json.dumps([reward])
    if model:
        environment["SPECREJ_GENERATOR_MODEL"] = model
    async with (
        Stack(environment=environment) as stack,
        Client(stack.orchestrator_address, timeout_s=3600) as client,
    ):
        yield client


async def record(client: Client, prompt: Prompt, n: int, sampling: Sampling) -> list[Answer]:
    """The candidates of a prompt, by their ids."""
    given = asdict(sampling)
    generation = await client.generate(
        prompt,
        n=n,
        return_candidates=n,
        algorithm=Algorithm.BEST_OF_N,
        rewards={LIKELIHOOD: 1.0},
        logprobs=True,
        top_logprobs=5,
        cache=CacheControl.BYPASS,
        **{name: given[name] for name in ("max_tokens", "temperature", "seed")},
    )
    return [Answer.of(one) for one in sorted(generation.candidates, key=lambda one: one.id)]


def lines(path: Path) -> list[dict[str, Any]]:
    """What is in the file; nothing if there is none."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def add(path: Path, line: dict[str, Any]) -> None:
    """Add a line to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "at") as file:
        file.write(json.dumps(line) + "\n")
