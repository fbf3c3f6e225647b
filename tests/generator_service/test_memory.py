"""Slots from memory, and that a step never takes more than its workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from generator_service import loading, memory
from generator_service.engine import Engine
from generator_service.model import CausalLM
from generator_service.settings import GeneratorSettings
from specrej.contracts import Sampling
from tests.generator_service import tiny
from tests.generator_service.stepping import admitted, steps

CPU = torch.device("cpu")
GIB = 1 << 30


def host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, free: int, limit: int | str
) -> None:
    """A machine of `total` bytes, of which `free` are free, and a container of `limit` bytes."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal:   {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"
    )
    (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "limit")


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "limit", "fraction", "kv_gib"),
    [
        (16, 15, "max", 0.5, 16 / 2 - 1 - 2),
        (64, 60, 8 * GIB, 0.5, 8 / 2 - 1 - 2),  # memory that the container may not use
        (16, 4, "max", 0.9, 4 - 2),  # memory that other processes use; the weights are loaded
    ],
)
def test_kv_gets_a_fraction_less_weights_and_workspace(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    total_gib: int,
    free_gib: int,
    limit: int | str,
    fraction: float,
    kv_gib: float,
) -> None:
    host(monkeypatch, tmp_path, total_gib * GIB, free_gib * GIB, limit)
    budget = memory.budget(CPU, fraction, weights=GIB, workspace=2 * GIB)
    assert budget.kv_bytes == kv_gib * GIB


def test_no_room_for_a_slot_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a negative capacity, and a process that starts and refuses all sessions."""
    host(monkeypatch, tmp_path, GIB // 1024, GIB // 1024, "max")
    model = CausalLM(tiny.build())
    with pytest.raises(ValueError, match=r"no memory for KV slots: .*memory_fraction 0\.5"):
        loading.slots_from_memory(model, GeneratorSettings())


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_step_stays_within_its_workspace(top_p: float) -> None:
    """The largest step allocates at most what the formula reserves."""
    network = tiny.build()
    model = CausalLM(network)
    assert model.weight_bytes >= sum(parameter.nbytes for parameter in network.parameters())
    n, chunk = 96, 64
    engine = Engine(model, 5000, max_rows=n, prefill_chunk=chunk)
    sampling = Sampling(max_tokens=4, ignore_eos=True, top_p=top_p, min_tokens=2)
    decoding = admitted(engine, [5] * 150, n, sampling, first=1)
    engine.extend(decoding, 4)
    steps(engine, until=lambda: engine.gauge(decoding).owned >= 150 + n)
    admitted(engine, [6] * chunk, 1, sampling, first=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.step()
    limit = model.workspace_bytes(n, chunk)
    assert limit / 20 < _peak_bytes(profiled) <= limit


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
