"""The budget of memory: by hand, by the own engine's measurements, and `specrej plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from generator_service import budget as budgets
from generator_service import loading
from generator_service.budget import Budget, host_memory, num_parameters, weight_bytes
from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.loading import load_generator
from generator_service.settings import GeneratorSettings
from specrej.contracts import Sampling, TokenBias
from specrej_models.sizes import ModelSizes
from tests import hub as hubs
from tests.generator_service import tiny
from tests.generator_service.stepping import admitted, steps
from tests.programs import in_process
from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model
from tests.specrej_models.test_kv import allocated, nothing

GIB = 1 << 30
USABLE = 72 * GIB  # of 80 GiB


PENALTIES = {
    **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_p": 0.01},
    "logit_bias": (TokenBias(3, 1.0),),
}


def config_of(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Layers, heads, key heads, hidden, intermediate, vocabulary, context; as on the model card."""
    names = (
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
        *("intermediate_size", "vocab_size", "max_position_embeddings"),
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


LLAMA_3_8B = config_of("llama", 32, 32, 8, 4096, 14336, 128_256, 8192)


# Llama-3-8B has two bytes of each of its 8.03 G weights, and of Llama-3-70B's a quarter per device.
_LLAMA_LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096
_WEIGHTS_8B = 32 * _LLAMA_LAYER + 4096 + 2 * 128_256 * 4096
LLAMA_3_70B = config_of("llama", 80, 64, 8, 8192, 28672, 128_256, 8192)


def budget_of(
    config: dict[str, Any],
    usable: int = USABLE,
    devices: int = 1,
    device: str = "cuda",
    *,
    is_vllm: bool = False,
) -> Budget:
    """With 1,024 candidates and prompts in chunks of 256."""
    read = AutoConfig.for_model(**config)
    sizes = ModelSizes.of(read)
    weights = weight_bytes(num_parameters(read), read, device, devices, is_vllm=is_vllm)
    threads = 2 if device == "cpu" else 0
    own = sizes.split(devices)
    context = sizes.context_tokens
    return Budget(own, weights, usable, context, 1024, 256, device, is_vllm, threads)


def test_a_public_model_by_hand() -> None:
    """Logits and sampling are the widest place of a step: 2 + 4 bytes each, and ten float32
    tensors of the 523 rows that fill 2**26 logits."""
    budget = budget_of(LLAMA_3_8B | {"max_position_embeddings": 131_072})
    assert budget.slot_bytes == 2 * 32 * 8 * 128 * 2
    assert budget.weight_bytes == 2 * _WEIGHTS_8B
    workspace = 1025 * 128_256 * 6 + 523 * 128_256 * 40
    assert budget.workspace_bytes == workspace
    slots = (USABLE - 2 * _WEIGHTS_8B - workspace) // budget.slot_bytes
    assert budget.slots == slots == 440_803
    # The newest token of a candidate has no slot yet.
    assert budget.max_candidates_within(1024, 16, 512) == (slots - 1024) // 15
    assert budget.max_candidates_within(1024, 512, 512) == (slots - 1024) // 511
    assert budget.max_candidates_within(1024, 16, budget.context_tokens) == 0


async def test_slots_of_the_own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for the same memory has as many slots."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "vocab_size": 480}
    config = make_config("llama", None, **sizes)
    directory = save_language_model(tmp_path / "model", config, make_tokenizer(None))
    total = GIB // 16
    host(monkeypatch, tmp_path, total, total, "max")
    planned = budget_of(AutoConfig.from_pretrained(directory).to_dict(), total // 2, device="cpu")
    planned = replace(planned, max_candidates=64, threads=torch.get_num_threads())
    settings = GeneratorSettings(model=str(directory), device="cpu", max_candidates=64)
    measured = load_generator(settings)
    slots = (await measured.describe()).slots.capacity
    measured.close()
    assert 0.9 * slots < planned.slots <= slots


def test_vllm_counts_whole_blocks() -> None:
    """Four devices of Llama-3-70B: 16 tokens per block, two of them spare."""
    budget = budget_of(LLAMA_3_70B, devices=4, is_vllm=True)
    logprobs, drawing = 1024 * 128_256 * 4, 1025 * 128_256 * 6 + 523 * 128_256 * 40
    room = USABLE - budget.weight_bytes - logprobs - drawing
    assert budget.slot_bytes == 2 * 80 * 2 * 128 * 2
    assert budget.slots == (room // (16 * 81_920) - 2) * 16
    # 992 tokens of the prompt are shared; the 8 others and 15 new ones take two blocks.
    assert budget.max_candidates_within(1000, 16, 512) == (budget.slots - 992) // 32
    assert budget.max_candidates_within(1000, 512, 512) == (budget.slots - 992) // 528


def test_devices_share_heads() -> None:
    """Fewer key heads than devices are copied."""
    sizes = ModelSizes.of(AutoConfig.for_model(**LLAMA_3_8B))
    assert [sizes.split(n).kv_heads for n in (1, 2, 8, 16, 32)] == [8, 4, 1, 1, 1]
    with pytest.raises(ValueError, match="32 heads and 8 key heads cannot be divided among 3"):
        sizes.split(3)


def test_fitted_settings_take_little_workspace() -> None:
    """Guards against a limit of N whose workspace takes the memory of the candidates, and against
    a context that no candidate can fill."""
    long = LLAMA_3_8B | {"max_position_embeddings": 131_072}
    large = budget_of(long).fitted(16)
    assert (large.max_candidates, large.context_tokens) == (4096, 131_072)
    assert large.slots > 0.9 * 440_803
    small = budget_of(long, 18 * GIB).fitted(16)
    assert 1 < small.max_candidates < 1024
    assert small.context_tokens == small.slots < 131_072
    on_vllm = replace(budget_of(long, 18 * GIB), is_vllm=True).fitted(16)
    assert 0.8 * on_vllm.slots < on_vllm.context_tokens < 0.91 * on_vllm.slots
    assert small.max_candidates_within(1024, 16, 512) >= small.max_candidates
    with pytest.raises(ValueError, match=r"does not fit: 14\.0 GiB less 15\.0 GiB of weights"):
        budget_of(long, 14 * GIB).fitted(16)


def run(directory: Path, config: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a plan for 80 GiB."""
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        options = ["--model", str(directory), "--memory", "80GiB", *arguments]
        code, output, errors = in_process(budgets.main, options)
    return code, output + errors


def test_the_documented_plan(tmp_path: Path) -> None:
    """Guards against an example that drifts."""
    document = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    shown = document.partition("$ specrej plan --model /models/Llama-3.1-8B --memory 80GiB\n")[2]
    long = LLAMA_3_8B | {"max_position_embeddings": 131_072}
    printed = run(tmp_path, long)[1].splitlines()
    assert shown.partition("\n```")[0].splitlines() == [line.rstrip() for line in printed]


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    arguments = ("--json", "--tensor-parallel", "4", "--first", "128")
    printed = json.loads(run(tmp_path, LLAMA_3_70B, *arguments)[1])
    assert (printed["parameters"], printed["slot_bytes"]) == (70_553_706_496, 81_920)
    assert printed["first_decision_token"] == 128
    assert [row["prompt_tokens"] for row in printed["n"]] == [128] * 3 + [1024] * 3 + [8192] * 3
    last = printed["n"][-1]  # beyond the context of 8,192
    assert (last["best_of_n"], last["speculative_rejection"]) == (0, 0)
    settings = printed["settings"]
    assert settings["SPECREJ_GENERATOR_VLLM_OPTIONS"] == '{"tensor_parallel_size": 4}'
    assert settings["SPECREJ_GENERATOR_CONTEXT_TOKENS"] == "0"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--context-tokens", "8193"), "context_tokens must be at most the model's 8192, is 8193"),
        (("--memory", "8GiB"), "does not fit: 7.2 GiB less 15.0 GiB of weights"),
        (("--memory", "8 GiBs"), "invalid"),
        (("--model", "missing"), "missing: no directory, config.json or name such as org/name"),
        (("--first", "0"), "must be at least 1"),
        (("--memory-fraction", "1"), "must be 0 .. 0.95"),
    ],
)
def test_the_command_refuses(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    code, output = run(tmp_path, LLAMA_3_8B, *arguments)
    assert code in (1, 2)
    assert reason in " ".join(output.split())


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


@pytest.mark.parametrize(
    ("limit", "free_gib", "total_gib"),
    [("max", 60, 64), (12 * GIB, 6, 12), (100 * GIB, 60, 64)],
)
def test_a_containers_limit_is_its_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: int | str,
    free_gib: int,
    total_gib: int,
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
    [
        *((*COMPILED, changes) for changes in CHANGES),
        (*AT_ONCE, CHANGES[3]),
        (*BY_ROW, CHANGES[0]),
    ],
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


def test_a_plan_by_name_fetches_the_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a plan that downloads weights, or takes a name of a hub for a path."""
    by_path = run(tmp_path, LLAMA_3_8B)
    with hubs.running() as hub:
        hubs.use(monkeypatch, hub.endpoint, tmp_path / "cache")
        config = json.dumps(LLAMA_3_8B).encode()
        hub.add("org/llama", {"config.json": config, "model.safetensors": b"w"}, "v1")
        monkeypatch.setenv("COLUMNS", "120")
        options = ["--model", "org/llama@v1", "--memory", "80GiB"]
        code, output, errors = in_process(budgets.main, options)
        assert (code, output + errors) == by_path
        assert hub.downloads == ["config.json"]
        options[1] = "org/other"
        code, _, errors = in_process(budgets.main, options)
        assert code == 2
        assert "org/other: the hub has no model org/other, or it needs a token" in errors
