"""Throughput of both engines behind the same session verbs: `make bench-backends`.

Same weights, prompts, N, decision tokens and threads, each engine in a process and an environment
of its own, asked in turn; the median of the rounds. "whole": one extend to the end. "rounds": the
candidates are halved at 16, 32, ... tokens, as the default schedule of Speculative Rejection has
it; per second count the tokens that were made, and so those that pausing and cutting cost.

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.workers.process import WorkerProcess

ENGINES = {"own": Path(".venv/bin/python"), "vllm": Path(".vllm/bin/python")}
_FIRST_DECISION_TOKEN = 16
_WORDS = ("amber", "birch", "cloud", "delta", "ember", "field", "grove", "heath")
# OpenMP's threads wait busily, for a fifth of a second at most, before they sleep.
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """N candidates, and where rounds end."""

    kind: str
    n: int
    decision_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Made in all; half of the candidates go at each decision token."""
        made, before, live = 0, 0, self.n
        for until in self.decision_tokens:
            made += live * (until - before)
            before, live = until, max(1, live // 2)
        return made


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
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
        speeds = _measure(workers, cases, arguments)
    _report(arguments, cases, speeds, versions)


def geometric(new_tokens: int) -> tuple[int, ...]:
    """Decision tokens 16, 32, ... and the end."""
    return (*_doubled(new_tokens), new_tokens)


def _doubled(new_tokens: int) -> Iterator[int]:
    until = _FIRST_DECISION_TOKEN
    while until < new_tokens:
        yield until
        until *= 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64, 128], help="candidates")
    parser.add_argument("--words", type=int, default=40, help="words of the prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of the last candidate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile the model")
    return parser.parse_args()


def _start(name: str, arguments: argparse.Namespace) -> WorkerProcess:
    most = max(arguments.n)
    # vLLM rounds what a candidate holds up to whole blocks, and so does its part of the prompt.
    slots = most * (arguments.new + 64) + 4 * arguments.words + 64
    settings: dict[str, Any] = {
        "engine": name,
        "model": str(arguments.model),
        "device": "cpu",
        "threads": arguments.threads,
        "kv_slots": slots,
        "max_candidates": most,
    }
    if name == "vllm" and arguments.eager:
        settings["vllm_options"] = {"enforce_eager": True}
    project = Path(__file__).parents[1]
    return WorkerProcess(
        ENGINES[name],
        Path(__file__).with_name("workers") / "session_worker.py",
        settings,
        {
            "OMP_NUM_THREADS": str(arguments.threads),
            "PYTHONPATH": str(project),
            # Each environment has a numba of its own.
            "NUMBA_CACHE_DIR": str(project / "build" / "backends" / f"numba-{name}"),
        },
        project / "build" / "backends" / f"{name}.log",
    )


def _measure(
    workers: Mapping[str, WorkerProcess], cases: Sequence[Case], arguments: argparse.Namespace
) -> dict[tuple[str, Case], list[float]]:
    """Tokens per second, by round; the first round warms up."""
    prompt = " ".join(_WORDS[at * at % len(_WORDS)] for at in range(arguments.words))
    speeds: dict[tuple[str, Case], list[float]] = {
        (name, case): [] for case in cases for name in workers
    }
    for number in range(arguments.rounds + 1):
        for case in cases:
            for name, worker in workers.items():
                time.sleep(_SETTLE_S)
                request = {"n": case.n, "prompt": prompt, "decision_tokens": case.decision_tokens}
                seconds = worker.ask(request)
                if number:
                    speeds[name, case].append(case.num_tokens / seconds)
    return speeds


def _report(
    arguments: argparse.Namespace,
    cases: Sequence[Case],
    speeds: Mapping[tuple[str, Case], Sequence[float]],
    versions: Mapping[str, Mapping[str, str]],
) -> None:
    median = {key: statistics.median(values) for key, values in speeds.items()}
    table = Table(title="tokens/s behind the session verbs (median of the rounds)")
    for heading in ("case", "N", "tokens", *ENGINES, "own / vllm"):
        table.add_column(heading)
    for case in cases:
        own, other = (median[name, case] for name in ENGINES)
        told = (case.n, case.num_tokens, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}")
        table.add_row(case.kind, *map(str, told))
    Console(width=100).print(table)
    print(json.dumps(_result(arguments, cases, speeds, versions)))


def _result(
    arguments: argparse.Namespace,
    cases: Sequence[Case],
    speeds: Mapping[tuple[str, Case], Sequence[float]],
    versions: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    def figures(name: str, case: Case) -> dict[str, Any]:
        values = speeds[name, case]
        return {
            "tokens_per_s": round(statistics.median(values), 1),
            "rounds": [round(value, 1) for value in values],
        }

    return {
        "cases": [
            {
                "kind": case.kind,
                "n": case.n,
                "decision_tokens": case.decision_tokens,
                "num_tokens": case.num_tokens,
                **{name: figures(name, case) for name in ENGINES},
            }
            for case in cases
        ],
        "model": arguments.model.name,
        "prompt_words": arguments.words,
        "threads": arguments.threads,
        "vllm_compiles": not arguments.eager,
        "versions": versions,
        **describe_machine(),
    }


if __name__ == "__main__":
    main()
