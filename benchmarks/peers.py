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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.engines import Engine, WorkerError, WorkerProcess, generating
from benchmarks.harness import MODEL, SETTLE_S, log, parse_arguments, prompt_ids, report

ENGINES = ["specrej", "transformers", "vllm", "llamacpp"]
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


class Bench:
    """Starts each engine's process before its first request, and measures.

    speeds: tokens per second by engine and case, in every round. bounds: tokens per second by N.
    missing: reasons by engine. failed: reasons by engine and case.
    """

    def __init__(
        self, engines: Sequence[Engine], threads: int, num_rounds: int, settle_s: float = SETTLE_S
    ) -> None:
        self.engines = engines
        self.speeds: dict[tuple[str, Case], list[float]] = {}
        self.bounds: dict[int, float] = {}
        self.missing: dict[str, str] = {}
        self.failed: dict[tuple[str, Case], str] = {}
        self._versions: dict[str, dict[str, str]] = {}
        self._settle_s = settle_s
        self._threads = threads
        self._num_rounds = num_rounds
        self._workers: dict[str, WorkerProcess] = {}
        self._num_prompts = itertools.count()

    def measure(self, case: Case) -> None:
        """Warm every engine up with a short request, then measure the rounds."""
        self._round(case, min(case.new_tokens, _WARM_UP_TOKENS))
        rounds = []
        for number in range(1, self._num_rounds + 1):
            speeds = self._round(case, case.new_tokens)
            rounds.append(speeds)
            self._measure_bound(case.n)
            figures = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            log(f"{case} round {number}/{self._num_rounds}: {figures} tokens/s")
        for name in rounds[-1]:  # an engine that failed is not in later rounds
            self.speeds[name, case] = [speeds[name] for speeds in rounds]

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def _round(self, case: Case, new_tokens: int) -> dict[str, float]:
        """Tokens per second of each engine that answered; all get the same new prompt."""
        request = {
            "n": case.n,
            "prompt_ids": prompt_ids(case.prompt_tokens, next(self._num_prompts)),
            "new_tokens": new_tokens,
        }
        speeds = {}
        for engine in self.engines:
            if engine.name in self.missing or (engine.name, case) in self.failed:
                continue
            try:
                speeds[engine.name] = case.n * new_tokens / self._seconds(engine, request)
            except WorkerError as error:
                if engine.name not in self.missing:
                    self.failed[engine.name, case] = str(error)
                    log(f"{case}: {engine.name} failed: {error}")
        return speeds

    def _measure_bound(self, n: int) -> None:
        """Keep the highest bound of all rounds."""
        for engine in self.engines:
            if engine.name == OURS and OURS not in self.missing:
                try:
                    bound = n / self._seconds(engine, {"gemm_bound": n})
                except WorkerError as error:
                    log(f"no bound for n={n}: {error}")
                else:
                    self.bounds[n] = max(bound, self.bounds.get(n, 0.0))

    def _seconds(self, engine: Engine, request: dict[str, Any]) -> float:
        """The seconds of one request. A worker that ended is started again by the next request."""
        worker = self._workers.get(engine.name) or self._start(engine)
        time.sleep(self._settle_s)
        try:
            return worker.measure(request)
        except WorkerError:
            if worker.has_ended():
                self._workers.pop(engine.name).stop()
            raise

    def _start(self, engine: Engine) -> WorkerProcess:
        """Raises WorkerError if the engine cannot be started; from then on it is missing."""
        log(f"starting {engine.name}")
        try:
            worker = self._workers[engine.name] = engine.start(self._threads)
            self._versions[engine.name] = worker.ready()
        except WorkerError as error:
            if engine.name in self._workers:
                self._workers.pop(engine.name).stop()
            self.missing[engine.name] = str(error)
            log(f"{engine.name} is missing: {error}")
            raise
        return worker

    def result(self) -> dict[str, Any]:
        """The content of the JSON line."""
        return {
            "results": [
                {
                    "engine": name,
                    **asdict(case),
                    "tokens_per_s": round(statistics.median(speeds), 1),
                    "rounds": [round(speed, 1) for speed in speeds],
                }
                for (name, case), speeds in self.speeds.items()
            ],
            "gemm_bound_tokens_per_s": {str(n): round(s, 1) for n, s in self.bounds.items()},
            "missing": self.missing,
            "failed": [
                {"engine": name, **asdict(case), "reason": reason}
                for (name, case), reason in self.failed.items()
            ],
            "settings": {engine.name: engine.settings for engine in self.engines},
            "versions": self._versions,
            "threads": self._threads,
            "num_rounds": self._num_rounds,
        }

    def rows(self) -> Iterator[Sequence[object]]:
        """One row per case; after a peer's figure comes ours as a multiple of it."""
        speeds = {key: statistics.median(values) for key, values in self.speeds.items()}
        for case in dict.fromkeys(case for _, case in speeds):
            ours = speeds.get((OURS, case))
            cells = []
            for engine in self.engines:
                speed = speeds.get((engine.name, case))
                ratio = f" ({ours / speed:.2f}x)" if ours and speed and engine.name != OURS else ""
                cells.append(f"{speed:.0f}{ratio}" if speed else "-")
            bound = self.bounds.get(case.n)
            numbers = (case.n, case.prompt_tokens, case.new_tokens)
            yield (*numbers, *cells, f"{bound:.0f}" if bound else "-")

    def notes(self) -> Iterator[str]:
        """Settings of the engines, and what could not be measured."""
        for engine in self.engines:
            yield f"{engine.name}: {engine.settings}"
        for name, reason in self.missing.items():
            yield f"{name} is missing: {reason}"
        for (name, case), reason in self.failed.items():
            yield f"{name} failed at {case}: {reason}"


def main() -> None:
    """Measure and report; Ctrl-C reports what is complete."""
    arguments = parse_arguments(
        __doc__,
        model=(MODEL, "folder of the weights"),
        n=([1, 16, 64, 128], "candidates"),
        prompt=([40], "tokens of the prompt"),
        new=([64], "new tokens per candidate"),
        engines=(ENGINES, "engines to compare"),
        rounds=(3, "measured rounds"),
        threads=(len(os.sched_getaffinity(0)), "threads of each engine"),
    )
    lengths = itertools.product(arguments.prompt, arguments.new)
    cases = [Case(n, prompt, new) for prompt, new in lengths for n in arguments.n]
    if unknown := sorted({*arguments.engines} - {*ENGINES}):
        sys.exit(f"bench-peers: unknown engine {unknown[0]}; available: {', '.join(ENGINES)}")
    slots = max(case.n * case.new_tokens + case.prompt_tokens for case in cases)
    context_tokens = max(case.prompt_tokens + case.new_tokens for case in cases)
    most = max(case.n for case in cases)
    engines = generating(arguments.model, slots, context_tokens, most)
    compared = [engine for engine in engines if engine.name in arguments.engines]
    bench = Bench(compared, arguments.threads, arguments.rounds)
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
        ("N", "prompt", "new", *(engine.name for engine in compared), "products alone"),
        bench.rows(),
        bench.result(),
        bench.notes(),
    )
    sys.exit(130 if interrupted else int(not bench.speeds))


if __name__ == "__main__":
    main()
