"""Throughput of both generators behind the same session verbs: `make bench-generators`.

The own engine and vLLM get the same weights, prompts, N, decision tokens and threads. Each runs in
a process and an environment of its own; they take turns. "whole": one extend to the end. "rounds":
half of the candidates are rejected at 16, 32, ... tokens, as by the default schedule. Tokens per
second count generated tokens, so they include the cost of pausing and cutting.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    MODEL,
    SETTLE_S,
    interleave,
    medians,
    parse_arguments,
    report,
    rounded,
)
from benchmarks.workers.process import WorkerProcess

ENGINES = {"own": Path(".venv/bin/python"), "vllm": Path(".vllm/bin/python")}
_FIRST_DECISION_TOKEN = 16
_PROMPT_WORDS = ("amber", "birch", "cloud", "delta", "ember", "field", "grove", "heath")


@dataclass(frozen=True, slots=True)
class Case:
    """N candidates, and the decision tokens; the last one is the end."""

    kind: str
    n: int
    decision_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all candidates; half of the candidates are rejected at each decision token."""
        total, previous, live = 0, 0, self.n
        for until in self.decision_tokens:
            total += live * (until - previous)
            previous, live = until, max(1, live // 2)
        return total


def main() -> None:
    """Measure and report."""
    arguments = parse_arguments(
        __doc__,
        model=(MODEL, "folder of the weights"),
        n=([16, 64, 128], "candidates"),
        words=(40, "words of the prompt"),
        new=(64, "new tokens of the last candidate"),
        rounds=(5, "measured rounds"),
        threads=(len(os.sched_getaffinity(0)), "threads of each engine"),
        eager=(False, "vLLM does not compile the model"),
    )
    cases = [
        Case(kind, n, tokens)
        for n in arguments.n
        for kind, tokens in (("whole", (arguments.new,)), ("rounds", geometric(arguments.new)))
    ]
    with ExitStack() as stack:
        workers = {name: _start(name, arguments) for name in ENGINES}
        for worker in workers.values():
            stack.callback(worker.stop)
        versions = {name: worker.ready() for name, worker in workers.items()}
        results = [_measure(workers, case, arguments) for case in cases]
    report(
        "tokens/s behind the session verbs (median of the rounds)",
        ("case", "N", "tokens", *ENGINES, "own / vllm"),
        map(_row, results),
        {
            "cases": results,
            "model": arguments.model.name,
            "prompt_words": arguments.words,
            "threads": arguments.threads,
            "vllm_compiles": not arguments.eager,
            "versions": versions,
        },
    )


def geometric(new_tokens: int) -> tuple[int, ...]:
    """Decision tokens 16, 32, ... and the end."""
    tokens = []
    until = _FIRST_DECISION_TOKEN
    while until < new_tokens:
        tokens.append(until)
        until *= 2
    return (*tokens, new_tokens)


def _start(name: str, arguments: argparse.Namespace) -> WorkerProcess:
    most = max(arguments.n)
    settings: dict[str, Any] = {
        "engine": name,
        "model": str(arguments.model),
        "device": "cpu",
        "threads": arguments.threads,
        # vLLM rounds a candidate's slots and its part of the prompt up to whole blocks.
        "kv_slots": most * (arguments.new + 64) + 4 * arguments.words + 64,
        "max_candidates": most,
    }
    if name == "vllm" and arguments.eager:
        settings["vllm_options"] = {"enforce_eager": True}
    project = Path(__file__).parents[1]
    build = project / "build" / "generators"
    return WorkerProcess(
        ENGINES[name],
        Path(__file__).with_name("workers") / "generator_worker.py",
        settings,
        {
            "OMP_NUM_THREADS": str(arguments.threads),
            "PYTHONPATH": str(project),
            # The environments have different versions of numba.
            "NUMBA_CACHE_DIR": str(build / f"numba-{name}"),
        },
        build / f"{name}.log",
    )


def _measure(
    workers: Mapping[str, WorkerProcess], case: Case, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The result of one case, as in the JSON line."""
    prompt = " ".join(_PROMPT_WORDS[at * at % len(_PROMPT_WORDS)] for at in range(arguments.words))
    request = {"n": case.n, "prompt": prompt, "decision_tokens": case.decision_tokens}
    runs = {name: partial(worker.measure, request) for name, worker in workers.items()}
    seconds = interleave(runs, arguments.rounds, SETTLE_S)
    speeds = {name: [case.num_tokens / s for s in values] for name, values in seconds.items()}
    return {
        "kind": case.kind,
        "n": case.n,
        "decision_tokens": case.decision_tokens,
        "num_tokens": case.num_tokens,
        **{
            name: {"tokens_per_s": round(median, 1), "rounds": rounded(speeds[name])}
            for name, median in medians(speeds).items()
        },
    }


def _row(result: Mapping[str, Any]) -> Sequence[object]:
    own, other = (result[name]["tokens_per_s"] for name in ENGINES)
    numbers = (result["kind"], result["n"], result["num_tokens"])
    return (*numbers, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}")


if __name__ == "__main__":
    main()
