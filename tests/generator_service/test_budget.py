"""The budget of memory, by the own engine's measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from generator_service import budget as budgets
from generator_service import loading
from generator_service.budget import Budget, host_memory
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.settings import GeneratorSettings
from specrej.contracts import Sampling, TokenBias
from tests.generator_service import tiny
from tests.generator_service.stepping import admitted, steps
from tests.specrej_models.test_kv import allocated, nothing

GIB = 1 << 30

PENALTIES = {
    **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_p": 0.01},
    "logit_bias": (TokenBias(3, 1.0),),
}


def host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, free: int, limit: int | str
) -> None:
    """A machine of `total` bytes, of which `free` are free, and a container of `limit` bytes, in
    which processes use 6 GiB, and files that the kernel can drop 1 GiB."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal:   {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n"
    )
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {6 * GIB}\ninactive_file {GIB}\n")
    monkeypatch.setattr(budgets, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(budgets, "_CGROUP", tmp_path)


async def test_slots_are_those_of_the_share_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory is more slots, by the fraction and the bytes of a slot. What other processes use
    is not counted as free, what the weights use is."""
    model = CausalLM(tiny.build(), tiny.END_IDS)
    settings = GeneratorSettings(max_candidates=8, memory_fraction=0.5)
    slots = []
    for total, free in ((GIB, GIB), (2 * GIB, 2 * GIB), (2 * GIB, GIB // 2)):
        host(monkeypatch, tmp_path, total, free, "max")
        slots.append(loading.slots_from_memory(model, settings))
    slot_bytes = 2 * 3 * 2 * 16 * 4  # layers, key heads and their size, float32
    assert slots[1] - slots[0] == pytest.approx(GIB // 2 // slot_bytes, abs=1)
    assert (slots[2] - slots[0]) * slot_bytes == pytest.approx(model.weight_bytes, abs=slot_bytes)


@pytest.mark.parametrize(
    ("limit", "free_gib", "total_gib"), [("max", 60, 64), (12 * GIB, 6, 12), (100 * GIB, 60, 64)]
)
def test_a_containers_limit_is_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int | str, free_gib: int, total_gib: int
) -> None:
    """Guards against memory that the container may not use, or that its other processes use."""
    host(monkeypatch, tmp_path, 64 * GIB, 60 * GIB, limit)
    assert host_memory() == (free_gib * GIB, total_gib * GIB)


def test_no_room_for_a_slot_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a negative capacity, and a process that starts and refuses all sessions."""
    host(monkeypatch, tmp_path, GIB // 1024, GIB // 1024, "max")
    model = CausalLM(tiny.build(), tiny.END_IDS)
    with pytest.raises(ValueError, match=r"no memory for KV slots: .*memory_fraction 0\.5"):
        loading.slots_from_memory(model, GeneratorSettings())


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Other files leave one, beside whose scores the tiny model's smallest tensors count."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# What sampling allocates is the same in all networks.
CHANGES = [{}, {"top_p": 0.9}, PENALTIES, {"top_p": 0.9, **PENALTIES}]
COMPILED, AT_ONCE, BY_ROW = (True, 0), (False, 1 << 25), (False, 1)


@pytest.mark.parametrize(
    ("compiled", "scores_at_once", "changes"),
    [*((*COMPILED, changes) for changes in CHANGES), (*AT_ONCE, CHANGES[3]), (*BY_ROW, CHANGES[0])],
)
@pytest.mark.usefixtures("two_threads")
def test_a_step_stays_within_its_workspace(
    compiled: bool, scores_at_once: int, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step allocates at most what the formula reserves, and a good part of it.

    With torch operations, as on a GPU, all scores at once or row by row.
    """
    monkeypatch.setattr("specrej_models.cpu.jobs.ON_ALL_THREADS", compiled)
    monkeypatch.setattr("specrej_models.attention.SCORES_AT_ONCE", scores_at_once)
    monkeypatch.setattr(budgets, "SCORES_AT_ONCE", scores_at_once)
    network = tiny.build()
    model = CausalLM(network, tiny.END_IDS)
    assert model.is_compiled == compiled
    assert model.weight_bytes >= sum(parameter.nbytes for parameter in network.parameters())
    n, chunk = 96, 64
    engine = Engine(model, 5000, max_rows=n, prefill_chunk=chunk)
    sampling = Sampling(max_tokens=4, ignore_eos=True, min_tokens=2, **changes)
    decoding = admitted(engine, [5] * 150, n, sampling, first=1)
    engine.extend(decoding, 4)
    steps(engine, until=lambda: engine.gauge(decoding).owned >= 150 + n)
    admitted(engine, [6] * chunk, 1, sampling, first=1)
    step = allocated(lambda _: engine.step(), nothing)
    threads = torch.get_num_threads() if compiled else 0
    limit = Budget(model.sizes, 0, 0, 154, n, chunk, "cpu", threads=threads).workspace_bytes
    assert limit / 8 < step.peak <= limit
