"""Slots from memory, and that a step never takes more than its workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from generator_service import loading, memory
from generator_service.engine import Engine, OpenCommand
from generator_service.memory import Budget
from generator_service.model import CausalLM
from generator_service.settings import GeneratorSettings
from specrej.contracts import Sampling
from specrej.errors import Unavailable
from tests.generator_service import tiny

CPU = torch.device("cpu")
GIB = 1 << 30


def host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, free: int, limit: str
) -> None:
    """A machine of `total` bytes, `free` of them, in a container of `limit`."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal:   {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"
    )
    (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "limit")


def test_kv_gets_a_fraction_less_weights_and_workspace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host(monkeypatch, tmp_path, 16 * GIB, 15 * GIB, "max")
    budget = memory.budget(CPU, 0.5, weights=GIB, workspace=2 * GIB)
    assert budget == Budget(16 * GIB, 8 * GIB, GIB, 2 * GIB)
    assert budget.kv_bytes == 5 * GIB


def test_a_containers_limit_is_the_total(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against slots for memory the container is killed for touching."""
    host(monkeypatch, tmp_path, 64 * GIB, 60 * GIB, str(8 * GIB))
    assert memory.budget(CPU, 0.5, weights=GIB, workspace=0).kv_bytes == 3 * GIB


def test_what_others_have_taken_is_not_counted_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a second service on the machine driving both out of memory."""
    host(monkeypatch, tmp_path, 16 * GIB, 2 * GIB, "max")
    assert memory.budget(CPU, 0.9, weights=3 * GIB, workspace=GIB).kv_bytes == GIB


def test_no_room_for_a_slot_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a negative capacity, or a process that starts and refuses everybody."""
    host(monkeypatch, tmp_path, GIB // 1024, GIB // 1024, "max")
    model = CausalLM(tiny.build())
    with pytest.raises(ValueError, match=r"no memory for KV slots: .*memory_fraction 0\.5"):
        loading.slots_from_memory(model, GeneratorSettings())


def test_weights_count_packed_ones() -> None:
    """Guards against a capacity that forgets most of what the weights take."""
    network = tiny.build()
    plain = sum(parameter.nbytes for parameter in network.parameters())
    assert CausalLM(network).weight_bytes >= plain


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_step_stays_within_its_workspace(top_p: float) -> None:
    """Guards the formula against what the largest step really allocates."""
    model = CausalLM(tiny.build())
    n, chunk = 96, 64
    # Driven by hand: the profiler sees the thread that it was started in.
    engine = Engine(model, 5000, max_rows=n, prefill_chunk=chunk)
    sampling = Sampling(max_tokens=4, ignore_eos=True, top_p=top_p, min_tokens=2)
    decoding = _opened(engine, OpenCommand([5] * 150, n, sampling, 1))
    while engine.gauge(decoding).owned < 150 + n:
        _turn(engine)
    _opened(engine, OpenCommand([6] * chunk, 1, sampling, 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _turn(engine)
    limit = memory.workspace_bytes(model.sizes, n, chunk, CPU)
    assert limit / 20 < _peak_bytes(profiled) <= limit
    engine._end_all(Unavailable("over"))


def _opened(engine: Engine, command: OpenCommand) -> int:
    session_id, opened = engine.open(command)
    engine._drain()
    engine._admit_waiting()
    assert opened.result(0)
    engine.extend(session_id, 4)
    engine._drain()
    return session_id


def _turn(engine: Engine) -> None:
    engine._step(engine._pick())


def _peak_bytes(profiled: profile) -> int:
    """Highest sum of allocations less frees since the profile began."""
    assert profiled.profiler
    assert profiled.profiler.kineto_results
    events: list[Any] = list(profiled.profiler.kineto_results.events())
    memory_events = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(memory_events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
