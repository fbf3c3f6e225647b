"""The sequence of requests that a load test sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.options import BOTH, counts, read_prompts
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


def requests(parsed: Any, worker: int, started: float) -> Iterator[LoadRequest]:
    """Endless requests: prompts by turns, each with a new seed, for one algorithm or both.

    `started` is the start of the test by time.perf_counter().

    Raises:
        OSError, ValueError: the prompts cannot be read.
    """
    prompts, ns = read_prompts(Path(parsed.prompts)), counts(parsed.n)
    algorithms = tuple(Algorithm) if parsed.algorithm == BOTH else (Algorithm(parsed.algorithm),)
    number = worker * _SEEDS_PER_WORKER
    while True:
        number += 1
        for algorithm in algorithms:
            n = n_of_step(ns, time.perf_counter() - started, parsed.step_seconds)
            options = Options(
                n=n,
                alpha=parsed.alpha,
                algorithm=algorithm,
                max_tokens=parsed.max_tokens,
                seed=number,
                cache=CacheControl.BYPASS,
            )
            prompt = prompts[number % len(prompts)]
            yield LoadRequest(f"{algorithm.value}{_N}{n}", prompt, options)


def split_label(label: str) -> tuple[str, int]:
    """Algorithm and N of a request's label."""
    algorithm, _, n = label.rpartition(_N)
    return algorithm, int(n)


def n_of_step(ns: tuple[int, ...], elapsed_s: float, step_s: float) -> int:
    """The N of the current step; the last N after all steps."""
    return ns[min(int(elapsed_s / step_s), len(ns) - 1)]
