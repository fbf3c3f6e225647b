"""What a config and a memory allow, against arithmetic by hand, transformers and the own engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from generator_service import plan
from generator_service.capacity import Capacity, reader, weight_bytes
from generator_service.engine.model import CausalLM
from generator_service.loading import load_generator
from generator_service.settings import GeneratorSettings
from specrej.contracts import Prompt, Sampling, SessionSpec
from specrej_models.sizes import ModelSizes, num_parameters
from tests.generator_service import tiny
from tests.generator_service.test_memory import GIB, host
from tests.programs import in_process
from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model

USABLE = 72 * GIB  # of 80 GiB


def config_of(model_type: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Layers, heads, key heads, hidden, intermediate, vocabulary, context; as on the model card."""
    names = (
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
        *("intermediate_size", "vocab_size", "max_position_embeddings"),
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


LLAMA_3_8B = config_of("llama", 32, 32, 8, 4096, 14336, 128_256, 8192)


@dataclass(frozen=True)
class Case:
    """A model on devices of 80 GiB, with the numbers that follow by hand.

    weights: of each device, two bytes each. drawn: rows that fill 2**26 logits.
    """

    config: dict[str, Any]
    slot: int
    weights: int
    vocabulary: int
    drawn: int
    slots: int
    devices: int = 1


# A layer of Llama-3-8B: 4096 * (2 * 4096 + 2 * 1024) for attention, 3 * 4096 * 14336 for the gated
# network, 2 * 4096 for the norms.
_LLAMA_LAYER = 41_943_040 + 176_160_768 + 8_192
_QWEN_32B_LAYER = 5120 * 128 * (64 + 8 + 8 + 64) + 3 * 5120 * 25600 + 2 * 5120 + 2 * 128
_GEMMA_4B_LAYER = 2560 * 256 * (8 + 4 + 4 + 8) + 3 * 2560 * 10240 + 4 * 2560 + 2 * 256
# On each of four devices: 16 heads, 2 key heads, 7168 of 28672.
_LLAMA_70B_LAYER = 8192 * 128 * (16 + 2 + 2 + 16) + 3 * 8192 * 7168 + 2 * 8192

CASES = {
    "llama-3.1-8b": Case(
        LLAMA_3_8B | {"max_position_embeddings": 131_072},
        slot=2 * 32 * 8 * 128 * 2,
        weights=32 * _LLAMA_LAYER + 4096 + 2 * 128_256 * 4096,
        vocabulary=128_256,
        drawn=523,
        slots=444_864,
    ),
    "llama-3-70b": Case(
        config_of("llama", 80, 64, 8, 8192, 28672, 128_256, 8192),
        slot=2 * 80 * 2 * 128 * 2,
        weights=80 * _LLAMA_70B_LAYER + 8192 + 2 * 32_064 * 8192,
        vocabulary=128_256,
        drawn=523,
        slots=477_185,
        devices=4,
    ),
    "qwen3-32b": Case(
        config_of("qwen3", 64, 64, 8, 5120, 25600, 151_936, 40_960, head_dim=128),
        slot=2 * 64 * 8 * 128 * 2,
        weights=64 * _QWEN_32B_LAYER + 5120 + 2 * 151_936 * 5120,
        vocabulary=151_936,
        drawn=441,
        slots=33_199,
    ),
    "gemma-3-4b": Case(
        # As published, the text part leaves out its heads, too.
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        slot=2 * 34 * 4 * 256 * 2,
        weights=34 * _GEMMA_4B_LAYER + 2560 + 262_208 * 2560,
        vocabulary=262_208,
        drawn=255,
        slots=472_445,
    ),
    "mistral-7b": Case(
        config_of("mistral", 32, 32, 8, 4096, 14336, 32_768, 32_768),
        slot=2 * 32 * 8 * 128 * 2,
        weights=32 * _LLAMA_LAYER + 4096 + 2 * 32_768 * 4096,
        vocabulary=32_768,
        drawn=1024,  # all: 2,048 would fill them
        slots=469_434,
    ),
}


def capacity_of(
    config: dict[str, Any],
    usable: int = USABLE,
    devices: int = 1,
    device: str = "cuda",
    *,
    is_vllm: bool = False,
) -> Capacity:
    """With 1,024 candidates and prompts in chunks of 256."""
    read = reader(config)
    sizes = ModelSizes.of(read)
    weights = weight_bytes(read, device, devices, is_vllm=is_vllm)
    context = sizes.context_tokens
    own = sizes.split(devices)
    return Capacity(own, weights, usable, context, 1024, 256, device, is_vllm, 2)


@pytest.mark.parametrize("name", CASES)
def test_public_models_by_hand(name: str) -> None:
    """Logits and sampling are the widest place of a step: 2 + 4 bytes each, and eight float32
    tensors of the rows that are drawn from at once."""
    case = CASES[name]
    capacity = capacity_of(case.config, devices=case.devices)
    assert capacity.slot_bytes == case.slot
    assert capacity.weight_bytes == 2 * case.weights
    workspace = 1025 * case.vocabulary * 6 + case.drawn * (case.vocabulary + 256) * 32
    assert capacity.workspace_bytes == workspace
    assert capacity.slots == case.slots == (USABLE - 2 * case.weights - workspace) // case.slot
    # The newest token of a candidate has no slot yet.
    assert capacity.max_candidates_within(1024, 16, 512) == (case.slots - 1024) // 15
    assert capacity.max_candidates_within(1024, 512, 512) == (case.slots - 1024) // 511
    assert capacity.max_candidates_within(1024, 16, capacity.context_tokens) == 0


def test_scores_are_computed_in_parts() -> None:
    """Guards against 47 GB reserved for the scores of a context of 131,072 tokens: in blocks of 8
    rows, 32 heads * 131,072 tokens are an eighth of the scores at once."""
    sizes = ModelSizes.of(reader(CASES["llama-3.1-8b"].config))
    assert sizes.torch_score_bytes(1024, 131_072) == 12 * 8 * 32 * 131_072 == 402_653_184


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_transformers_makes(name: str) -> None:
    """Guards against a part of an architecture that the count lacks."""
    text = CASES[name].config.get("text_config") or CASES[name].config
    options = {key: value for key, value in text.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(text["model_type"], **options)
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == num_parameters(reader(CASES[name].config))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_weights_and_slots_of_the_own_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch operations, as on a GPU: the engine measures what follows from the config."""
    monkeypatch.setattr("specrej_models.cpu.jobs.ON_ALL_THREADS", False)
    model = CausalLM(tiny.build(name))
    read = reader(json.loads(tiny.CONFIGS[name].to_json_string(use_diff=False)))
    assert ModelSizes.of(read) == model.sizes
    assert ModelSizes.of(read).slot_bytes(4) == model.shape.slot_bytes
    tables = sum(buffer.nbytes for buffer in model._model.buffers())  # of the rotary embedding
    assert 4 * num_parameters(read) == model.weight_bytes - tables


async def test_slots_and_n_of_the_own_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same memory: as many slots, as many candidates, and no more bytes than planned."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "vocab_size": 480}
    config = make_config("llama", None, **sizes)
    directory = save_language_model(tmp_path / "model", config, make_tokenizer(None))
    total = GIB // 16
    host(monkeypatch, tmp_path, total, total, "max")
    planned = capacity_of(plan.read_config(directory), total // 2, device="cpu")
    planned = replace(planned, max_candidates=64, threads=torch.get_num_threads())
    settings = GeneratorSettings(model=str(directory), device="cpu", max_candidates=64)
    measured = load_generator(settings)
    slots = (await measured.describe()).slots.capacity
    measured.close()
    assert 0.9 * slots < planned.slots <= slots

    settings = settings.model_copy(update={"kv_slots": 400})
    generator = load_generator(settings)
    few = replace(planned, usable_bytes=planned.usable_bytes - planned.slot_bytes * planned.slots)
    few = replace(few, usable_bytes=few.usable_bytes + planned.slot_bytes * 400)
    assert few.slots == 400
    spec = SessionSpec(Prompt(text="Hello"), 0, Sampling(max_tokens=60, ignore_eos=True), 16)
    async with generator.open(spec) as session:
        assert session.n == few.max_candidates_within(session.prompt_tokens, 16, 60) < 64
        await session.extend(60)
        (opened,) = generator._engine.engine.sessions.values()
        assert opened.prompt
        stored = opened.suffix.num_bytes + opened.prompt.store.num_bytes
        assert 0.9 * 400 * planned.slot_bytes < stored <= 400 * planned.slot_bytes
    generator.close()


def test_vllm_counts_whole_blocks() -> None:
    """Four devices of Llama-3-70B: 16 tokens per block, two of them spare."""
    case = CASES["llama-3-70b"]
    capacity = capacity_of(case.config, devices=4, is_vllm=True)
    logprobs, drawing = 1024 * 128_256 * 4, 1025 * 128_256 * 6 + 523 * (128_256 + 256) * 32
    room = USABLE - 2 * case.weights - logprobs - drawing
    assert capacity.slots == (room // (16 * 81_920) - 2) * 16 == 470_736
    # 992 tokens of the prompt are shared; the 8 others and 15 new ones take two blocks.
    assert capacity.max_candidates_within(1000, 16, 512) == (capacity.slots - 992) // 32
    assert capacity.max_candidates_within(1000, 512, 512) == (capacity.slots - 992) // 528


def test_devices_share_heads() -> None:
    """Fewer key heads than devices are copied; weights follow."""
    sizes = ModelSizes.of(reader(LLAMA_3_8B))
    assert [sizes.split(n).kv_heads for n in (1, 2, 8, 16, 32)] == [8, 4, 1, 1, 1]
    read = reader(LLAMA_3_8B)
    assert num_parameters(read, 8) * 8 > num_parameters(read) > num_parameters(read, 8) * 7.9
    with pytest.raises(ValueError, match="32 heads and 8 key heads cannot be divided among 3"):
        sizes.split(3)


def test_fitted_settings_take_little_workspace() -> None:
    """Guards against a limit of N whose workspace takes the memory of the candidates, and against
    a context that no candidate can fill."""
    long = LLAMA_3_8B | {"max_position_embeddings": 131_072}
    large = capacity_of(long).fitted(16)
    assert (large.max_candidates, large.context_tokens) == (4096, 131_072)
    assert large.slots > 0.9 * CASES["llama-3.1-8b"].slots
    small = capacity_of(long, 18 * GIB).fitted(16)
    assert 1 < small.max_candidates < 1024
    assert small.context_tokens == small.slots < 131_072
    on_vllm = replace(capacity_of(long, 18 * GIB), is_vllm=True).fitted(16)
    assert 0.8 * on_vllm.slots < on_vllm.context_tokens < 0.91 * on_vllm.slots
    assert small.max_candidates_within(1024, 16, 512) >= small.max_candidates
    with pytest.raises(ValueError, match=r"does not fit: 14\.0 GiB less 15\.0 GiB of weights"):
        capacity_of(long, 14 * GIB).fitted(16)


def test_most_candidates_pay_for_their_workspace() -> None:
    """One more would not fit: neither slots nor logits are forgotten."""
    capacity = capacity_of(LLAMA_3_8B)
    most = capacity.most_candidates(1024, 16, 512)
    for number, fits in ((most, True), (most + 1, False)):
        planned = replace(capacity, max_candidates=number)
        assert (planned.max_candidates_within(1024, 16, 512) >= number) == fits


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LLAMA_3_8B | {"model_type": "mixtral"}, "model_type 'mixtral' is none of llama, "),
        (LLAMA_3_8B | {"hidden_size": None}, "the config has no hidden_size"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        capacity_of(config)


def run(directory: Path, config: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a plan for 80 GiB."""
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        options = ["--model", str(directory), "--memory", "80GiB", *arguments]
        code, output, errors = in_process(plan.main, options)
    return code, output + errors


def test_the_command_prints_one_table(tmp_path: Path) -> None:
    code, output = run(tmp_path, CASES["gemma-3-4b"].config)
    assert code == 0, output
    for part in (
        "3.88 G weights",
        "139,264 bytes",
        "│ 8,192",
        "first 16",
        "GENERATOR_ENGINE=vllm",
    ):
        assert part in output
    assert "full ones" in output and "text model alone" in output


def test_an_engine_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    """Guards against a plan for another engine than the one that was named."""
    code, output = run(tmp_path, LLAMA_3_8B, "--engine", "own", "--tensor-parallel", "4")
    assert code == 1 and "the own engine uses one device" in output


def test_the_documented_plan(tmp_path: Path) -> None:
    """Guards against an example that drifts."""
    document = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    shown = document.partition("$ specrej plan --model /models/Llama-3.1-8B --memory 80GiB\n")[2]
    long = LLAMA_3_8B | {"max_position_embeddings": 131_072}
    printed = run(tmp_path, long)[1].splitlines()
    assert shown.partition("\n```")[0].splitlines() == [line.rstrip() for line in printed]


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    arguments = ("--json", "--tensor-parallel", "4", "--first", "128")
    printed = json.loads(run(tmp_path, CASES["llama-3-70b"].config, *arguments)[1])
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
        (("--memory", "8 GiBs"), "use 80GiB, 80GB or a number of bytes"),
        (("--memory", "9" * 400), "use 80GiB, 80GB or a number of bytes"),
        (("--model", "missing"), "No such file"),
    ],
)
def test_the_command_refuses(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    code, output = run(tmp_path, LLAMA_3_8B, *arguments)
    assert code in (1, 2)
    assert reason in " ".join(output.split())


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    code, output = run(tmp_path, LLAMA_3_8B, "--model", str(tmp_path / "list.json"))
    assert code == 2 and "must be a JSON object" in " ".join(output.split())


def test_a_plan_for_cpus_has_the_threads_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the slots of the machine that plans, which may have other cores."""
    slots = []
    for threads in ("2", "64"):
        monkeypatch.setenv("SPECREJ_GENERATOR_THREADS", threads)
        flags = ("--dtype", "float32", "--json")
        long = LLAMA_3_8B | {"max_position_embeddings": 131_072}
        slots.append(json.loads(run(tmp_path, long, *flags)[1])["slots"])
    assert slots[0] > slots[1]


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 << 30), ("80 GB", 80 * 10**9), ("1.5MiB", 3 << 19), ("7", 7)]
)
def test_bytes(text: str, count: int) -> None:
    assert plan.parse_bytes(text) == count
