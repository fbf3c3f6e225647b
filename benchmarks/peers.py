"""Throughput of the own engine, transformers, vLLM and llama.cpp: `make bench-peers`.

All engines get the same weights, prompts, N, lengths, sampling and threads. Each runs in a process
of its own; they take turns, so that one works at a time. An engine that is missing or fails is
reported, and the others go on. After each round the bound is measured: how fast the matrix products
of one step alone run on our weights.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.engines import Engine, WorkerError, WorkerProcess, generating
from benchmarks.harness import (
    MODEL,
    SETTLE_S,
    log,
    parse_arguments,
    prompt_ids,
    report,
    rounded,
)

ENGINES = ["specrej", "transformers", "vllm", "llamacpp"]
SESSIONS = ["specrej-verbs", "vllm-verbs"]  # of generators
OURS = "specrej"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """N candidates of `new_tokens` each, from one prompt."""

    n: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"n={self.n} prompt={self.prompt_tokens} new={self.new_tokens}"


@dataclass(slots=True)
class Measurements:
    """Tokens per second by engine and case, in every round; and what could not be measured."""

    speeds: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    bounds: dict[int, float] = field(default_factory=dict)  # tokens per second by N
    missing: dict[str, str] = field(default_factory=dict)  # reasons by engine
    failed: dict[tuple[str, Case], str] = field(default_factory=dict)  # reasons
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


class Bench:
    """Starts each engine's process before its first request, and measures."""

    def __init__(
        self, specs: Sequence[Engine], threads: int, num_rounds: int, settle_s: float = SETTLE_S
    ) -> None:
        self.measurements = Measurements()
        self._settle_s = settle_s
        self._specs = specs
        self._threads = threads
        self._num_rounds = num_rounds
        self._workers: dict[str, WorkerProcess] = {}
        self._num_prompts = itertools.count()

    def measure(self, case: Case) -> None:
        """Warm every engine up with a short request, then measure the rounds."""
        self._round(case, self._specs_left(case), min(case.new_tokens, _WARM_UP_TOKENS))
        rounds = []
        for number in range(1, self._num_rounds + 1):
            speeds = self._round(case, self._specs_left(case), case.new_tokens)
            rounds.append(speeds)
            self._measure_bound(case.n)
            figures = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            log(f"{case} round {number}/{self._num_rounds}: {figures} tokens/s")
        for name in rounds[0]:
            if all(name in speeds for speeds in rounds):
                self.measurements.speeds[name, case] = [speeds[name] for speeds in rounds]

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _specs_left(self, case: Case) -> Iterator[Engine]:
        """Engines that are not missing and have not failed in this case."""
        for spec in self._specs:
            failed = (spec.name, case) in self.measurements.failed
            if not failed and spec.name not in self.measurements.missing:
                yield spec

    def _round(self, case: Case, specs: Iterable[Engine], new_tokens: int) -> dict[str, float]:
        """Tokens per second of each engine that answered; all get the same new prompt."""
        request = {
            "n": case.n,
            "prompt_ids": prompt_ids(case.prompt_tokens, next(self._num_prompts)),
            "new_tokens": new_tokens,
        }
        speeds = {}
        for spec in specs:
            try:
                speeds[spec.name] = case.n * new_tokens / self._seconds(spec, request)
            except WorkerError as error:
                if spec.name not in self.measurements.missing:
                    self.measurements.failed[spec.name, case] = str(error)
                    log(f"{case}: {spec.name} failed: {error}")
        return speeds

    def _measure_bound(self, n: int) -> None:
        """Keep the highest bound of all rounds."""
        for spec in self._specs:
            if spec.name == OURS and OURS not in self.measurements.missing:
                try:
                    bound = n / self._seconds(spec, {"gemm_bound": n})
                except WorkerError as error:
                    log(f"no bound for n={n}: {error}")
                else:
                    bounds = self.measurements.bounds
                    bounds[n] = max(bound, bounds.get(n, 0.0))

    def _seconds(self, spec: Engine, request: dict[str, Any]) -> float:
        """The seconds of one request. A worker that ended is started again by the next request."""
        worker = self._workers.get(spec.name) or self._start(spec)
        time.sleep(self._settle_s)
        try:
            return worker.measure(request)
        except WorkerError:
            if worker.has_ended():
                self._workers.pop(spec.name).stop()
            raise

    def _start(self, spec: Engine) -> WorkerProcess:
        """Raises WorkerError if the engine cannot be started; from then on it is missing."""
        log(f"starting {spec.name}")
        try:
            worker = self._workers[spec.name] = spec.start(self._threads)
            self.measurements.versions[spec.name] = worker.ready()
        except WorkerError as error:
            if spec.name in self._workers:
                self._workers.pop(spec.name).stop()
            self.measurements.missing[spec.name] = str(error)
            log(f"{spec.name} is missing: {error}")
            raise
        return worker


def main() -> None:
    """Measure and report; Ctrl-C reports what is complete."""
    arguments = parse_arguments(
        __doc__,
        model=(MODEL, "folder of the weights"),
        n=([1, 16, 64, 128], "candidates"),
        prompt=([40], "tokens of the prompt"),
        new=([64], "new tokens per candidate"),
        engines=(ENGINES, f"engines to compare; also {', '.join(SESSIONS)}"),
        rounds=(3, "measured rounds"),
        threads=(len(os.sched_getaffinity(0)), "threads of each engine"),
    )
    lengths = itertools.product(arguments.prompt, arguments.new)
    cases = [Case(n, prompt, new) for prompt, new in lengths for n in arguments.n]
    if unknown := sorted({*arguments.engines} - {*ENGINES, *SESSIONS}):
        sys.exit(f"bench-peers: {unknown[0]}: must be one of {', '.join(ENGINES + SESSIONS)}")
    slots = max(case.n * case.new_tokens + case.prompt_tokens for case in cases)
    context_tokens = max(case.prompt_tokens + case.new_tokens for case in cases)
    most = max(case.n for case in cases)
    engines = generating(arguments.model, slots, context_tokens, most)
    specs = [spec for spec in engines if spec.name in arguments.engines]
    bench = Bench(specs, arguments.threads, arguments.rounds)
    interrupted = False
    try:
        for case in cases:
            bench.measure(case)
    except KeyboardInterrupt:
        interrupted = True
        log("interrupted: the report holds the complete cases")
    finally:
        bench.stop()
    report(
        "tokens/s, median of the rounds; in brackets ours as a multiple",
        ("N", "prompt", "new", *(spec.name for spec in specs), "products alone"),
        table_rows(bench.measurements, specs),
        {
            **as_json(bench.measurements, specs),
            "threads": arguments.threads,
            "num_rounds": arguments.rounds,
        },
        notes=notes(bench.measurements, specs),
    )
    sys.exit(130 if interrupted else int(not bench.measurements.speeds))


def as_json(measurements: Measurements, specs: Iterable[Engine]) -> dict[str, Any]:
    """The content of the JSON line."""
    return {
        "results": [
            {
                "engine": name,
                **asdict(case),
                "tokens_per_s": round(statistics.median(speeds), 1),
                "rounds": rounded(speeds),
            }
            for (name, case), speeds in measurements.speeds.items()
        ],
        "gemm_bound_tokens_per_s": {str(n): round(s, 1) for n, s in measurements.bounds.items()},
        "missing": measurements.missing,
        "failed": [
            {"engine": name, **asdict(case), "reason": reason}
            for (name, case), reason in measurements.failed.items()
        ],
        "settings": {spec.name: spec.settings for spec in specs},
        "versions": measurements.versions,
    }


def table_rows(measurements: Measurements, specs: Sequence[Engine]) -> Iterator[Sequence[object]]:
    """One row per case; after a peer's figure comes ours as a multiple of it."""
    speeds = {key: statistics.median(values) for key, values in measurements.speeds.items()}
    for case in dict.fromkeys(case for _, case in speeds):
        ours = speeds.get((OURS, case))
        cells = []
        for spec in specs:
            speed = speeds.get((spec.name, case))
            ratio = f" ({ours / speed:.2f}x)" if ours and speed and spec.name != OURS else ""
            cells.append(f"{speed:.0f}{ratio}" if speed else "-")
        bound = measurements.bounds.get(case.n)
        numbers = (case.n, case.prompt_tokens, case.new_tokens)
        yield (*numbers, *cells, f"{bound:.0f}" if bound else "-")


def notes(measurements: Measurements, specs: Iterable[Engine]) -> Iterator[str]:
    """Settings of the engines, and what could not be measured."""
    for spec in specs:
        yield f"{spec.name}: {spec.settings}"
    for name, reason in measurements.missing.items():
        yield f"{name} is missing: {reason}"
    for (name, case), reason in measurements.failed.items():
        yield f"{name} failed at {case}: {reason}"


if __name__ == "__main__":
    main()
