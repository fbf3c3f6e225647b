"""What the engine owes its users beside raw speed: `python -m benchmarks.engine`.

Four figures on the embedded model: decode throughput as a share of what its matrix products alone
allow; eight sessions at once against the same eight one after another; a step after a long prompt
against one after a short; and the resident memory of a run in a quarter of the slots it could use.
Compared runs are interleaved, figures are medians. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from generator_service.engine import Engine, OpenCommand, PrefixBatch
from generator_service.model import CausalLM
from specrej.contracts import RoundEnd, Sampling

_MODEL = Path(".models/SmolLM2-135M-Instruct")


def main() -> None:
    """Measure, print a table and a JSON object."""
    rounds = _arguments().rounds
    model = CausalLM.load(_MODEL, "cpu")
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "gemm": lambda: _gemm(model, rounds),
        "sessions": lambda: _sessions(model, rounds),
        "prompt": lambda: _prompt(model, rounds),
        "memory": lambda: _in_own_process(_memory),
    }
    results = {}
    for name, measure in measures.items():
        results[name] = measure()
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    table = Table(title="the engine on the embedded model")
    for heading in ("what", "figure", "details"):
        table.add_column(heading)
    for name, (figure, text) in _FIGURES.items():
        table.add_row(text, f"{results[name][figure]:.3f}", str(results[name]))
    Console(width=140).print(table)
    print(json.dumps({**results, **describe_machine()}))


_FIGURES = {
    "gemm": ("share_of_bound", "N=128: decode throughput / what the products alone allow"),
    "sessions": ("speed_up", "8 sessions of N=16 at once / one after another"),
    "prompt": ("ratio", "N=128: step after 512 prompt tokens / after 40"),
    "memory": ("peak_over_computed", "a quarter of the slots: peak memory / weights + capacity"),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def products_seconds(products: Sequence[Any], rows: int, seconds: float = 1.0) -> float:
    """The fastest of several passes through all matrix products of one step.

    Every layer has its own weights, so they come from memory as they do in a step.
    """
    passes: list[float] = []
    while len(passes) < 6 or sum(passes) < seconds:
        passes += _passes(products, rows, 6)
    return min(passes)


def _passes(products: Sequence[Any], rows: int, count: int) -> list[float]:
    """Seconds of each of some passes."""
    sizes = {layer.in_features for layer in products}
    data = {size: torch.randn(1, rows, size) for size in sizes}
    passes: list[float] = []
    with torch.inference_mode():
        for _ in range(count):
            began = time.perf_counter()
            for layer in products:
                layer(data[layer.in_features])
            passes.append(time.perf_counter() - began)
    return passes


def generate(engine: Engine, prompt_ids: Sequence[int], n: int, new_tokens: int) -> None:
    """One session to its end, without cuts."""
    sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
    session_id, opened = engine.open(OpenCommand(prompt_ids, n, sampling, 1))
    opened.result()
    batch = engine.extend(session_id, new_tokens).result()
    assert sum(prefix.num_new for prefix in batch.prefixes) == n * new_tokens
    engine.close(session_id).result()


def _prompt_ids(tokens: int, offset: int = 0) -> list[int]:
    return [1 + (37 * i + offset) % 40_000 for i in range(tokens)]


def _timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _gemm(model: CausalLM, rounds: int, n: int = 128, new_tokens: int = 64) -> dict[str, float]:
    """Steps and passes through their products alone in turn, a few at a time.

    So both are as fast as the machine then is, which other machines may share.
    """
    at_once = 4

    def round_seconds() -> tuple[float, float]:
        grow = _Growing(engine, [_prompt_ids(40)], n, new_tokens)
        steps = alone = 0.0
        for _ in range(0, new_tokens, at_once):
            steps += _timed(lambda: grow.by(at_once))
            alone += sum(_passes(model.products, n, at_once))
        grow.close()
        return steps, alone

    with _Running(model, n * new_tokens + 40) as engine:
        seconds = [round_seconds() for _ in range(rounds + 1)]
    del seconds[0]  # the first warms up
    steps, alone = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "share_of_bound": round(statistics.median(b / a for a, b in seconds), 3),
        "tokens_per_s": round(n * new_tokens / steps, 1),
        "bound_tokens_per_s": round(n * new_tokens / alone, 1),
    }


def _sessions(
    model: CausalLM, rounds: int, sessions: int = 8, n: int = 16, new_tokens: int = 32
) -> dict[str, float]:
    """Different prompts, so that nothing is shared; while one runs alone, those at once wait."""
    prompts = [_prompt_ids(40, offset=number) for number in range(2 * sessions)]

    def round_seconds() -> tuple[float, float]:
        grow = _Growing(engine, prompts[:sessions], n, new_tokens)
        joint = serial = 0.0
        for prompt in prompts[sessions:]:
            joint += _timed(lambda: grow.by(new_tokens // sessions))
            serial += _timed(partial(generate, engine, prompt, n, new_tokens))
        grow.close()
        return joint, serial

    with _Running(model, (sessions + 1) * (n * new_tokens + 40)) as engine:
        seconds = [round_seconds() for _ in range(rounds + 1)]
    del seconds[0]
    joint, serial = (statistics.median(column) for column in zip(*seconds, strict=True))
    made = sessions * n * new_tokens
    return {
        "speed_up": round(statistics.median(b / a for a, b in seconds), 3),
        "at_once_tokens_per_s": round(made / joint, 1),
        "one_after_another_tokens_per_s": round(made / serial, 1),
    }


class _Growing:
    """Sessions that grow together, a few tokens at a time."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], n: int, new_tokens: int
    ) -> None:
        self._engine = engine
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        opened = [engine.open(OpenCommand(prompt, n, sampling, 1)) for prompt in prompts]
        for _, future in opened:
            future.result()
        self._ids = [session_id for session_id, _ in opened]
        self._tokens = 0

    def by(self, tokens: int) -> None:
        self._tokens += tokens
        for growing in [self._engine.extend(each, self._tokens) for each in self._ids]:
            assert growing.result().num_tokens == self._tokens

    def close(self) -> None:
        for session_id in self._ids:
            self._engine.close(session_id).result()


def _prompt(model: CausalLM, rounds: int, n: int = 128, new_tokens: int = 32) -> dict[str, float]:
    """Milliseconds per step: what 64 steps take beyond the first, prefill left out."""

    def step_ms(tokens: int) -> float:
        # One more than is made: who is finished holds no slots.
        sampling = Sampling(max_tokens=new_tokens + 1, ignore_eos=True)
        session_id, opened = engine.open(OpenCommand(_prompt_ids(tokens), n, sampling, 1))
        opened.result()
        engine.extend(session_id, 1).result()
        seconds = _timed(lambda: held.append(engine.extend(session_id, new_tokens).result()))
        engine.close(session_id).result()
        return seconds * 1e3 / (new_tokens - 1)

    held: list[PrefixBatch] = []
    with _Running(model, n * new_tokens + 512) as engine:
        step_ms(512)
        pairs = [(step_ms(40), step_ms(512)) for _ in range(rounds)]
        most_slots = max(batch.slots.session for batch in held[1::2])
    short, long = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert all(batch.slots.session <= 512 + n * new_tokens for batch in held)
    return {
        "ratio": round(long / short, 3),
        "step_ms_after_40": round(short, 1),
        "step_ms_after_512": round(long, 1),
        f"slots_held_after_40_and_{new_tokens}": most_slots,
        f"slots_held_after_512_and_{new_tokens}": held[0].slots.session,
    }


def _memory(n: int = 64, max_tokens: int = 256) -> dict[str, float]:
    """A run whose rounds end when the slots are full; every second candidate is rejected."""
    model = CausalLM.load(_MODEL, "cpu")
    capacity = n * max_tokens // 4
    with _Running(model, capacity) as engine:
        generate(engine, _prompt_ids(8), 2, 2)
        loaded, most = _resident_bytes(), [0]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(done, most))
        watcher.start()
        rounds, survivors = _halving(engine, n, max_tokens)
        done.set()
        watcher.join()
    computed = loaded + capacity * model.shape.slot_bytes
    return {
        "peak_over_computed": round(most[0] / computed, 3),
        "peak_mb": round(most[0] / 1e6, 1),
        "weights_mb": round(loaded / 1e6, 1),
        "capacity_mb": round(capacity * model.shape.slot_bytes / 1e6, 1),
        "capacity_slots": capacity,
        "rounds": rounds,
        "survivors": survivors,
    }


def _halving(engine: Engine, n: int, max_tokens: int) -> tuple[int, int]:
    """Grow to full slots, keep every second candidate, and so on; rounds, and who finishes."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    session_id, opened = engine.open(OpenCommand(_prompt_ids(40), n, sampling, 8))
    opened.result()
    rounds = 0
    while True:
        rounds += 1
        batch = engine.extend(session_id, max_tokens).result()
        if batch.ended_by is not RoundEnd.SLOTS_FULL:
            engine.close(session_id).result()
            return rounds, len(batch.prefixes)
        engine.prune(session_id, [prefix.id for prefix in batch.prefixes[::2]]).result()


def _watch(done: threading.Event, most: list[int]) -> None:
    while not done.wait(0.002):
        most[0] = max(most[0], _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _in_own_process(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Memory is measured where nothing else has used any."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure)


class _Running:
    """An engine as long as the context."""

    def __init__(self, model: CausalLM, capacity: int) -> None:
        self._engine = Engine(model, capacity)

    def __enter__(self) -> Engine:
        self._engine.start()
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.stop()
        self._engine.check_integrity()


if __name__ == "__main__":
    main()
