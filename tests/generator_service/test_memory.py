"""Slots from memory, and that a step never takes more than its workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from generator_service import loading
from generator_service.engine import memory
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.settings import GeneratorSettings
from specrej.contracts import Sampling, TokenBias
from specrej_models.cpu.attention import COLUMNS
from specrej_models.kv import SuffixKV
from specrej_models.sizes import CPU_COLUMNS
from tests.generator_service import tiny
from tests.generator_service.stepping import admitted, grown, steps
from tests.specrej_models.test_kv import allocated, nothing

CPU = torch.device("cpu")
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
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "limit", "fraction", "kv_gib"),
    [
        (16, 15, "max", 0.5, 16 / 2 - 1 - 2),
        (64, 60, 12 * GIB, 0.5, 12 / 2 - 1 - 2),  # memory that the container may not use
        (64, 60, 10 * GIB, 0.9, 10 - 6 - 2),  # memory that the container's other processes use
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


def test_the_memory_of_gpus_decides_n_and_cpus_begin_64() -> None:
    """Guards against a thousand candidates on a CPU for a request that names no number."""
    settings = GeneratorSettings(max_candidates=500)
    assert settings.auto_candidates_of("cuda") == 500
    assert settings.auto_candidates_of("cpu") == 64
    few = GeneratorSettings(max_candidates=500, auto_candidates=100)
    assert [few.auto_candidates_of(device) for device in ("cuda", "cpu")] == [100, 100]
    assert GeneratorSettings(max_candidates=8).auto_candidates_of("cpu") == 8


def test_no_room_for_a_slot_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a negative capacity, and a process that starts and refuses all sessions."""
    host(monkeypatch, tmp_path, GIB // 1024, GIB // 1024, "max")
    model = CausalLM(tiny.build())
    with pytest.raises(ValueError, match=r"no memory for KV slots: .*memory_fraction 0\.5"):
        loading.slots_from_memory(model, GeneratorSettings())


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, PENALTIES, {"top_p": 0.9, **PENALTIES}])
@pytest.mark.parametrize(
    ("kind", "compiled", "scores_at_once"),
    [
        *((kind, *how) for kind in ("llama", "gemma2") for how in ((True, 0), (False, 1 << 25))),
        ("llama", False, 1),
    ],
)
def test_a_step_stays_within_its_workspace(
    kind: str, compiled: bool, scores_at_once: int, changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest step allocates at most what the formula reserves, and a good part of it.

    With torch operations, as on a GPU, all scores at once or row by row.
    """
    monkeypatch.setattr("specrej_models.cpu.jobs.ON_ALL_THREADS", compiled)
    monkeypatch.setattr("specrej_models.attention.SCORES_AT_ONCE", scores_at_once)
    monkeypatch.setattr("specrej_models.sizes.SCORES_AT_ONCE", scores_at_once)
    network = tiny.build(kind)
    model = CausalLM(network)
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
    limit = model.workspace_bytes(n, chunk, context_tokens=154)
    assert limit / 8 < step.peak <= limit


def test_compiled_attention_holds_the_reserved_scores() -> None:
    assert COLUMNS <= CPU_COLUMNS


def test_short_strides_copy_few_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against streamed rounds that copy all tokens of all candidates every few tokens."""
    copied: list[int] = []
    reserve = SuffixKV.reserve

    def counted(store: SuffixKV, tokens_room: int, slots: int = 0) -> None:
        copied.append(store.length)
        reserve(store, tokens_room, slots)

    monkeypatch.setattr(SuffixKV, "reserve", counted)
    engine = Engine(CausalLM(tiny.build()), 2000)
    endless = Sampling(max_tokens=100, seed=3, ignore_eos=True)
    session_id = admitted(engine, sampling=endless)
    for until in range(4, 101, 4):
        grown(engine, session_id, until)
    assert sum(copied) <= 2 * 100
