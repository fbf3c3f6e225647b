"""Votes before one server, ours and those of its_hub: `python -m experiments.right_peer`.

llama.cpp's server with the embedded model answers the problems of the study "reasoning". its_hub
asks it for samples and stops by its own rules; specrej asks it through its remote engine. Tokens
are those that the answers report: its_hub does not know those of samples that it has cancelled,
so that its figures are lower bounds; ours have all.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import provenance
from deploy.local.stack import Stack
from experiments import right_tasks
from experiments.right import STUDIES, TEMPERATURE, store, table
from experiments.right_tasks import Task
from orchestrator.edge.extractors import extractor
from orchestrator.loop.composition import LIKELIHOOD
from specrej import Client
from specrej.contracts import Algorithm, CacheControl, Vote
from tests.servers.starting import llama_server

_STUDY = STUDIES["reasoning"]
_SLOTS = 4  # requests that the server computes at once; the others wait
_BASE = "its_hub, all samples"
# From a task, the answer's text and how many tokens were generated.
Method = Callable[[Task], Awaitable[tuple[str, int]]]


def peers(endpoint: str) -> Mapping[str, Method]:
    """its_hub's votes of all samples, and with its two stops."""
    sys.path.append(str(right_tasks.PACKAGES))
    names = ("adaptive_self_consistency", "beta_self_consistency", "self_consistency")
    adaptive, beta, plain = (import_module(f"its_hub.core.algorithms.{name}") for name in names)
    servers = import_module("its_hub.core.lms.openai_lm")
    model = servers.OpenAICompatibleLanguageModel(
        endpoint, "none", "model", max_completion_tokens=_STUDY.max_tokens, temperature=TEMPERATURE
    )
    extract = extractor(Vote(), {})

    def method(algorithm: Any) -> Method:
        async def answer(task: Task) -> tuple[str, int]:
            turns = [{"role": one.role, "content": one.text} for one in task.prompt.messages]
            result = await algorithm.ainfer(model, turns, _STUDY.n, return_response_only=False)
            return result.the_one["content"], result.usage.completion_tokens

        return answer

    def voted(text: str) -> str:
        return extract(text) or ""

    return {
        _BASE: method(plain.SelfConsistency(voted)),
        "its_hub, Beta stop at 0.95": method(beta.BetaSelfConsistency(0.95, voted)),
        "its_hub, doubling until 0.75 agree": method(adaptive.AdaptiveSelfConsistency(0.75, voted)),
    }


def ours(client: Client) -> Mapping[str, Method]:
    """specrej's votes in waves."""

    def method(vote: Vote) -> Method:
        async def answer(task: Task) -> tuple[str, int]:
            generation = await client.generate(
                task.prompt,
                n=_STUDY.n,
                algorithm=Algorithm.BEST_OF_N,
                rewards={LIKELIHOOD: 1.0},
                vote=vote,
                waves=4,
                max_tokens=_STUDY.max_tokens,
                temperature=TEMPERATURE,
                seed=task.number,
                cache=CacheControl.BYPASS,
            )
            return generation.best.text, generation.usage.generated_tokens

        return answer

    return {
        "specrej, exact stop, waves of 4": method(Vote()),
        "specrej, stop at 0.95, waves of 4": method(Vote(stop_probability=0.95)),
    }


async def compare(tasks: list[Task]) -> dict[str, Any]:
    """Every method on every task, in turns."""
    right: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[float]] = defaultdict(list)
    async with llama_server(slots=_SLOTS, tokens=_SLOTS * 1024, name="model") as url:
        environment = {
            "SPECREJ_GENERATOR_ENGINE": "remote",
            "SPECREJ_GENERATOR_MODEL": "model",
            "SPECREJ_GENERATOR_REMOTE_URL": f"{url}/v1",
        }
        async with (
            Stack(environment=environment) as stack,
            Client(stack.orchestrator_address, timeout_s=600) as client,
        ):
            methods = {**peers(f"{url}/v1"), **ours(client)}
            for number, task in enumerate(tasks, 1):
                assert task.is_right
                for name, method in methods.items():
                    text, generated = await method(task)
                    right[name].append(float(task.is_right(text, None)))
                    tokens[name].append(generated)
                print(f"[{number}/{len(tasks)}] {task.id}", file=sys.stderr, flush=True)
    return {"tasks": len(tasks), "n": _STUDY.n, "policies": table(right, tokens, _BASE)}


def main() -> None:
    """Ask, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=_STUDY.num_tasks)
    parser.add_argument("--out", type=Path, default=Path("build/right"), help="folder")
    options = parser.parse_args()
    result = asyncio.run(compare(right_tasks.reasoning(options.tasks)))
    result |= {"study": "right_peer", **provenance()}
    title = f"votes before one server: {result['tasks']} tasks, N = {_STUDY.n}"
    store(options.out / "peer.json", title, result)


if __name__ == "__main__":
    main()
