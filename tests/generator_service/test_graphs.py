"""Recorded decode steps against the eager path.

On a CPU the step is called again where a GPU would replay a recording: that proves the static
buffers, the buckets and the table; not the recording, which takes a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from generator_service.engine import Engine, OpenCommand
from generator_service.model import CausalLM
from inference.attention import Segment
from specrej.contracts import Sampling
from tests.generator_service import interpreter, tiny

pytest.importorskip("triton")

SHORT = [1, *(5 + 7 * i % 80 for i in range(16))]
LONG = [1, *(3 + 11 * i % 90 for i in range(70))]  # long enough to be shared as a piece
WAIT_S = 900  # interpreted kernels are slow, and other processes may be in the way
ENDLESS = Sampling(max_tokens=20, seed=3, ignore_eos=True)


def again(step: Callable[[], None]) -> Callable[[], None]:
    """In a recorder's place."""
    return step


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Executor]:
    with interpreter.process() as process:
        yield process


def test_buckets_survive_halving() -> None:
    from generator_service.graphs import buckets

    assert buckets(0) == []
    assert buckets(1) == [1]
    assert buckets(48) == [1, 2, 3, 6, 12, 24, 36, 48]
    sizes = buckets(1024)
    assert {1024 >> shift for shift in range(11)} <= set(sizes)
    assert len(sizes) == 16
    for rows in range(33, 1025):
        assert next(size for size in sizes if size >= rows) <= 1.5 * rows


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_equal_the_eager_path(interpreted: Executor, name: str) -> None:
    """Through cuts, growing stores, a second session with two pieces, and steps of two sessions."""
    interpreted.submit(compare_runs, name).result(WAIT_S)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_replays_on_a_gpu_equal_the_eager_path(name: str) -> None:
    compare_runs(name, "cuda")


def test_what_cannot_be_recorded_runs_as_ever(interpreted: Executor) -> None:
    """A model that waits for the device in a step would fail every request."""
    interpreted.submit(run_unrecordable).result(WAIT_S)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_step_asks_the_device_for_nothing(interpreted: Executor, name: str) -> None:
    """Reading a value from the device, or copying one to it, cannot be recorded.

    In bfloat16, where the layers are transformers' own, as on a GPU.
    """
    interpreted.submit(look_for_transfers, name).result(WAIT_S)


class Spy:
    """A model that keeps its logits."""

    def __init__(self, model: CausalLM) -> None:
        self.shape, self.eos_ids = model.shape, model.eos_ids
        self.seen: list[Tensor] = []
        self._model = model

    def forward(
        self, ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        self.seen.append(self._model.forward(ids, positions, segments, last).clone())
        return self.seen[-1]


def compare_runs(name: str, device: str = "cpu") -> None:
    """In the interpreter's process, if on a CPU; as all below."""
    from generator_service.graphs import GraphedLM

    recorder = again if device == "cpu" else None
    model = GraphedLM(tiny.build(name).to(device), max_rows=4, recorder=recorder)
    used: list[int] = []
    count_replays(model, used)
    expected = run_sessions(CausalLM(tiny.build(name).to(device)))
    found = run_sessions(model)
    assert len(expected) == len(found)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    # 4 candidates, 2 of them, 3, then 1; 5 are too many, and so are two sessions in a step.
    assert used == [4, 4, 2, 2, 4, 4, 1, 1]


def count_replays(model: Any, used: list[int]) -> None:
    """Note the bucket of each step that is replayed."""
    record = model.graphs._record

    def counted(rows: int) -> Callable[[], None]:
        replay = record(rows)

        def count() -> None:
            used.append(rows)
            replay()

        return count

    model.graphs._record = counted


def run_sessions(model: CausalLM) -> list[Tensor]:
    """The logits of every step; no two commands run at a time, so that steps are the same."""
    spy = Spy(model)
    engine = Engine(spy, 4000, prefix_cache_slots=500)
    engine.start()
    first = opened(engine, SHORT, 4)
    extend_together(engine, {first: 3})
    engine.prune(first, {1, 2}).result(WAIT_S)
    extend_together(engine, {first: 5})
    second = opened(engine, LONG, 3)
    extend_together(engine, {second: 3})
    engine.close(second).result(WAIT_S)
    third = opened(engine, [*LONG[:66], 7, 8, 9], 1)  # the front of LONG is a piece of its own now
    extend_together(engine, {third: 3})
    wide = opened(engine, SHORT, 5)
    extend_together(engine, {wide: 2})
    extend_together(engine, {first: 7, third: 5})
    engine.stop()
    engine.check_integrity()
    return spy.seen


def extend_together(engine: Engine, until: dict[int, int]) -> None:
    """Rounds of several sessions whose steps are the same in every run."""
    gate = threading.Event()

    def wait() -> None:
        gate.wait()

    engine._commands.put(wait)
    rounds = [engine.extend(session_id, tokens) for session_id, tokens in until.items()]
    gate.set()
    for future in rounds:
        future.result(WAIT_S)


def opened(engine: Engine, prompt: list[int], n: int) -> int:
    session_id, future = engine.open(OpenCommand(prompt, n, ENDLESS, 4))
    future.result(WAIT_S)
    return session_id


def run_unrecordable() -> None:
    from generator_service.graphs import GraphedLM

    attempts = []

    def fail(step: Callable[[], None]) -> Callable[[], None]:
        attempts.append(step)
        step()  # a part of it may have run
        raise RuntimeError("operation not permitted when stream is capturing")

    spies = Spy(CausalLM(tiny.build())), Spy(GraphedLM(tiny.build(), 4, fail))
    for spy in spies:
        engine = Engine(spy, 1000)
        engine.start()
        extend_together(engine, {opened(engine, SHORT, 2): 3})
        engine.stop()
    for ours, theirs in zip(*(spy.seen for spy in spies), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert len(attempts) == 1


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on what waits for a device or sends it a value of this process."""

    BARRED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "is_nonzero")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert not any(name in func.name() for name in self.BARRED), func.name()
        return func(*args, **kwargs or {})


def look_for_transfers(name: str) -> None:
    from generator_service.graphs import GraphedLM

    watched = []

    def watch(step: Callable[[], None]) -> Callable[[], None]:
        with Watch():  # type: ignore[no-untyped-call]
            step()
        watched.append(step)
        return step

    model = GraphedLM(tiny.build(name).to(torch.bfloat16), max_rows=1, recorder=watch)
    engine = Engine(model, 1000)
    engine.start()
    extend_together(engine, {opened(engine, SHORT, 1): 2})
    engine.stop()
    assert len(watched) == 1
