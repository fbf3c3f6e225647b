"""Throughput of our engine against transformers, vLLM and llama.cpp: `make bench-peers`.

Same weights, prompts, N, lengths, sampling and threads, every engine in a process of its own; asked
in turn, so that one works at a time; the median of the rounds. Peers are installed when they are
first needed; one that is missing, or fails, is reported and the rest goes on. Between the engines
of a round comes the bound: how fast one step's matrix products alone run on our weights.

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.workers.engines import EngineSpec, Limits, all_engines
from benchmarks.workers.process import WorkerError

CASE_VALUES = {"n": (1, 16, 64, 128, 256), "prompt": (40, 512), "new": (64, 256)}
OURS = "specrej"
_WARM_UP_TOKENS = 16
# OpenMP's threads wait busily, for a fifth of a second at most, before they sleep.
_SETTLE_S = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """N candidates of `new_tokens` each, from one prompt."""

    n: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"n={self.n} prompt={self.prompt_tokens} new={self.new_tokens}"


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second of an engine in a case, by round."""

    engine: str
    case: Case
    rounds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rounds)


class Worker(Protocol):
    """What the measuring needs of `benchmarks.workers.process.WorkerProcess`."""

    def ready(self) -> dict[str, str]: ...
    def ask(self, request: dict[str, Any]) -> float: ...
    def has_ended(self) -> bool: ...
    def stop(self) -> None: ...


class Spec(Protocol):
    """What it needs of `benchmarks.workers.engines.EngineSpec`."""

    @property
    def name(self) -> str: ...
    def install(self) -> None: ...
    def start(self, threads: int) -> Worker: ...


@dataclass(slots=True)
class Report:
    """What there is to tell, complete or not."""

    results: list[Result] = field(default_factory=list)
    bounds: dict[int, float] = field(default_factory=dict)  # tokens per second by N
    missing: dict[str, str] = field(default_factory=dict)  # why, by engine
    failed: list[tuple[str, Case, str]] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


class Bench:
    """The engines' processes, started when they are first asked, and what they measured."""

    def __init__(
        self,
        specs: Sequence[Spec],
        threads: int,
        num_rounds: int,
        settle_s: float = _SETTLE_S,
    ) -> None:
        self.report = Report()
        self._settle_s = settle_s
        self._specs = specs
        self._threads = threads
        self._num_rounds = num_rounds
        self._workers: dict[str, Worker] = {}
        self._num_prompts = itertools.count()

    def install(self) -> None:
        for spec in self._specs:
            try:
                spec.install()
            except (WorkerError, OSError) as error:
                self._miss(spec, str(error))

    def measure(self, case: Case) -> None:
        """One request of each engine to warm up, then the rounds."""
        self._round(case, self._specs_left(), min(case.new_tokens, _WARM_UP_TOKENS))
        rounds: dict[str, list[float]] = {}
        for number in range(1, self._num_rounds + 1):
            speeds = self._round(case, self._specs_left(case), case.new_tokens)
            for name, speed in speeds.items():
                rounds.setdefault(name, []).append(speed)
            self._bound(case.n)
            told = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            _say(f"{case} round {number}/{self._num_rounds}: {told} tokens/s")
        for name, values in rounds.items():
            if len(values) == self._num_rounds:
                self.report.results.append(Result(name, case, tuple(values)))

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _specs_left(self, case: Case | None = None) -> Iterator[Spec]:
        """Those that are not missing, and have not failed in this case."""
        out = {name for name, failed, _ in self.report.failed if failed == case}
        return (spec for spec in self._specs if spec.name not in out | self.report.missing.keys())

    def _round(self, case: Case, specs: Iterable[Spec], new_tokens: int) -> dict[str, float]:
        """Tokens per second of every engine that could; all get the same, fresh prompt."""
        request = {
            "n": case.n,
            "prompt_ids": prompt_ids(case.prompt_tokens, next(self._num_prompts)),
            "new_tokens": new_tokens,
        }
        speeds = {}
        for spec in specs:
            try:
                speeds[spec.name] = case.n * new_tokens / self._ask(spec, request)
            except WorkerError as error:
                if spec.name not in self.report.missing:
                    self.report.failed.append((spec.name, case, str(error)))
                    _say(f"{case}: {spec.name} failed: {error}")
        return speeds

    def _bound(self, n: int) -> None:
        """The fastest that was ever seen is the bound."""
        for spec in self._specs_left():
            if spec.name == OURS:
                try:
                    bound = n / self._ask(spec, {"gemm_bound": n})
                except WorkerError as error:
                    _say(f"no bound for n={n}: {error}")
                else:
                    self.report.bounds[n] = max(bound, self.report.bounds.get(n, 0.0))

    def _ask(self, spec: Spec, request: dict[str, Any]) -> float:
        """Seconds; a worker that ended is started again by the next request."""
        worker = self._workers.get(spec.name) or self._start(spec)
        time.sleep(self._settle_s)
        try:
            return worker.ask(request)
        except WorkerError:
            if worker.has_ended():
                self._workers.pop(spec.name).stop()
            raise

    def _start(self, spec: Spec) -> Worker:
        """Raises WorkerError if it does not start: then it is missing from here on."""
        _say(f"starting {spec.name}")
        worker = self._workers[spec.name] = spec.start(self._threads)
        try:
            self.report.versions[spec.name] = worker.ready()
        except WorkerError as error:
            self._workers.pop(spec.name).stop()
            self._miss(spec, str(error))
            raise
        return worker

    def _miss(self, spec: Spec, reason: str) -> None:
        self.report.missing[spec.name] = reason
        _say(f"{spec.name} is missing: {reason}")


def main() -> None:
    """Measure, print a table and a JSON object."""
    arguments = _arguments()
    specs = all_engines(arguments.model, _limits(arguments.cases))
    bench = Bench(specs, arguments.threads, arguments.rounds)
    interrupted = False
    try:
        bench.install()
        for case in arguments.cases:
            bench.measure(case)
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted: this is what was complete")
    finally:
        bench.stop()
    Console(width=120).print(table(bench.report, specs))
    setup = {"threads": arguments.threads, "num_rounds": arguments.rounds, **describe_machine()}
    print(json.dumps({**as_json(bench.report, specs), **setup}))
    sys.exit(130 if interrupted else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument(
        "--cases",
        type=parse_cases,
        default=parse_cases(""),
        help='such as "n=64,prompt=40,new=64;n=128"; what is left out takes all its values',
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def parse_cases(text: str) -> list[Case]:
    """Cases of `key=value,...;...`, each once; nothing means all.

    Raises:
        argparse.ArgumentTypeError: it reads otherwise.
    """
    parts = [part for part in text.split(";") if part.strip()] or [""]
    cases = (Case(*values) for part in parts for values in itertools.product(*_values(part)))
    return list(dict.fromkeys(cases))


def _values(part: str) -> list[Sequence[int]]:
    """The values of n, prompt and new that one part of CASES allows."""
    values: dict[str, Sequence[int]] = {}
    for item in filter(None, map(str.strip, part.split(","))):
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in CASE_VALUES:
            raise argparse.ArgumentTypeError(f'"{item}" in CASES: not one of n=, prompt=, new=')
        if key in values:
            raise argparse.ArgumentTypeError(f'"{part}" in CASES: {key} is there twice')
        if not value.isdecimal() or int(value) < 1:
            raise argparse.ArgumentTypeError(f'"{item}" in CASES: {key} is a whole number from 1')
        values[key] = (int(value),)
    return [values.get(key, every) for key, every in CASE_VALUES.items()]


def prompt_ids(length: int, number: int) -> list[int]:
    """The `number`-th prompt: no two begin alike, so no engine can reuse what it read before."""
    return [1 + 37 * (position + number) % 40_000 for position in range(length)]


def _limits(cases: Sequence[Case]) -> Limits:
    return Limits(
        slots=max(case.n * case.new_tokens + case.prompt_tokens for case in cases),
        context_tokens=max(case.prompt_tokens + case.new_tokens for case in cases),
    )


def as_json(report: Report, specs: Sequence[EngineSpec]) -> dict[str, Any]:
    """The report for machines."""
    return {
        "results": [
            {
                "engine": result.engine,
                **asdict(result.case),
                "tokens_per_s": round(result.tokens_per_s, 1),
                "rounds": [round(value, 1) for value in result.rounds],
            }
            for result in report.results
        ],
        "gemm_bound_tokens_per_s": {str(n): round(s, 1) for n, s in report.bounds.items()},
        "missing": report.missing,
        "failed": [
            {"engine": name, **asdict(case), "reason": reason}
            for name, case, reason in report.failed
        ],
        "settings": {spec.name: spec.settings for spec in specs},
        "versions": report.versions,
    }


def table(report: Report, specs: Sequence[EngineSpec]) -> Table:
    """The report for people: a row per case; after a peer's figure, ours as a multiple of it."""
    speeds = {(result.case, result.engine): result.tokens_per_s for result in report.results}
    names = [spec.name for spec in specs]
    out = Table(title="tokens/s, median of the rounds; in brackets ours as a multiple")
    for heading in ("N", "prompt", "new", *names, "products alone"):
        out.add_column(heading, justify="right")
    for case in dict.fromkeys(result.case for result in report.results):
        cells = (_cell(speeds.get((case, name)), speeds.get((case, OURS)), name) for name in names)
        bound = report.bounds.get(case.n)
        numbers = map(str, (case.n, case.prompt_tokens, case.new_tokens))
        out.add_row(*numbers, *cells, f"{bound:.0f}" if bound else "-")
    notes = [f"{spec.name}: {spec.settings}" for spec in specs]
    notes += [f"{name} is missing: {reason}" for name, reason in report.missing.items()]
    notes += [f"{name} failed at {case}: {reason}" for name, case, reason in report.failed]
    out.caption = "\n".join(notes)
    out.caption_justify = "left"
    return out


def _cell(speed: float | None, ours: float | None, name: str) -> str:
    if speed is None:
        return "-"
    ratio = f" ({ours / speed:.2f}x)" if ours and name != OURS else ""
    return f"{speed:.0f}{ratio}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
