"""Which request comes next: prompts in turn, a new seed for each, both algorithms if asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.options import BOTH, counts
from loadtest.prompts import read_prompts
from specrej.client import Options
from specrej.contracts import Algorithm, CacheControl

# Seeds of one worker; the next worker's begin after them, so that no two ask the same.
_SEEDS = 10**9


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to answer it; `label` groups it with its like."""

    label: str
    prompt: str
    options: Options


def questions(parsed: Any, worker: int, began: float) -> Iterator[Question]:
    """Without end; `began` is when the test did, by time.perf_counter().

    With the cache on, the prompts come back with one seed, so that each is generated once.

    Raises:
        OSError, ValueError: the prompts cannot be read.
    """
    prompts, ns = read_prompts(Path(parsed.prompts)), counts(parsed.n)
    number = worker * _SEEDS
    while True:
        number += 1
        for algorithm in _algorithms(parsed.algorithm):
            n = n_of_step(ns, time.perf_counter() - began, parsed.step_seconds)
            yield Question(
                f"{algorithm.value} n={n}",
                prompts[number % len(prompts)],
                _options(parsed, algorithm, n, number),
            )


def n_of_step(ns: tuple[int, ...], elapsed_s: float, step_s: float) -> int:
    """Whose turn it is; the last stays."""
    return ns[min(int(elapsed_s / step_s), len(ns) - 1)]


def _algorithms(name: str) -> tuple[Algorithm, ...]:
    return tuple(Algorithm) if name == BOTH else (Algorithm(name),)


def _options(parsed: Any, algorithm: Algorithm, n: int, number: int) -> Options:
    cached = parsed.cache == "on"
    return Options(
        n=n,
        alpha=parsed.alpha,
        algorithm=algorithm,
        max_tokens=parsed.max_tokens,
        seed=0 if cached else number,
        cache=CacheControl.USE if cached else CacheControl.BYPASS,
    )
