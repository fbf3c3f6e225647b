"""The sequence of requests that a load test sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.options import BOTH, read_prompts
from specrej.contracts import Algorithm, CacheControl, Options

# Worker k uses seeds from k times this number, so that no two workers send equal requests.
_SEEDS_PER_WORKER = 10**9
_N = " n="


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt and its options. `label` names the row of Locust's tables: algorithm and N."""

    label: str
    prompt: str
    options: Options


def requests(parsed: Any, worker: int) -> Iterator[LoadRequest]:
    """Endless requests: prompts by turns, each with a new seed, for one algorithm or both.

    Raises:
        OSError, ValueError: the prompts cannot be read.
    """
    prompts = read_prompts(Path(parsed.prompts))
    algorithms = tuple(Algorithm) if parsed.algorithm == BOTH else (Algorithm(parsed.algorithm),)
    number = worker * _SEEDS_PER_WORKER
    while True:
        number += 1
        for algorithm in algorithms:
            options = Options(
                n=parsed.n,
                alpha=parsed.alpha,
                algorithm=algorithm,
                max_tokens=parsed.max_tokens,
                seed=number,
                cache=CacheControl.BYPASS,
            )
            prompt = prompts[number % len(prompts)]
            yield LoadRequest(f"{algorithm.value}{_N}{parsed.n}", prompt, options)


def split_label(label: str) -> tuple[str, int]:
    """Algorithm and N of a request's label."""
    algorithm, _, n = label.rpartition(_N)
    return algorithm, int(n)
