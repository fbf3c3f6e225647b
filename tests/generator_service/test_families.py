"""Model families, from their files to logits; those that cannot work are refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.engine.text import Text
from generator_service.loading import load_generator
from generator_service.settings import GeneratorSettings
from reward_service.kinds.classifier import HEAD_TENSOR
from reward_service.reward import score
from specrej.contracts import Prompt, Sampling, SessionSpec
from specrej_models import hub
from specrej_models.probe import examine
from tests import hub as hubs
from tests.generator_service import stepping, tiny
from tests.reward_service.tiny import load, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

END, END_OF_TURN = 2, 5  # of a text, and of a turn: generation_config.json has both
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<a>"

_LARGER: dict[str, Any] = tiny._SIZES | {"vocab_size": 259}
_BY_HEADS = {key: value for key, value in _LARGER.items() if key != "head_dim"}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SCALED_QUERIES = {  # from token 16 on
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
_SCALED = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_COMPRESSED = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
}

_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}

# The family, as docs/configuration.md names it: the name of its config's class, and its options.
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("LlamaConfig", _LARGER | {"num_key_value_heads": 4}),
    "Llama 3": ("LlamaConfig", _LARGER | {"rope_parameters": _LLAMA_3_ROPE}),
    "Mistral": ("MistralConfig", _LARGER | {"sliding_window": 64}),
    "Ministral 3 (checkpoints of text alone)": (
        "Ministral3Config",
        _LARGER | {"rope_parameters": _SCALED_QUERIES},
    ),
    "Qwen2, Qwen2.5": ("Qwen2Config", _LARGER),
    "Qwen3": ("Qwen3Config", _LARGER),
    "Gemma 3 of 1B": (
        "Gemma3TextConfig",
        _LARGER | {"sliding_window": 64, "sliding_window_pattern": 2},
    ),
    "Phi-3": ("Phi3Config", _BY_HEADS | {"sliding_window": 64}),
    "Phi-4": ("Phi3Config", _BY_HEADS | {"partial_rotary_factor": 0.75}),
    "OLMo 2": ("Olmo2Config", _LARGER),
    "SmolLM2": ("LlamaConfig", _LARGER | {"tie_word_embeddings": True}),
    "SmolLM3": ("SmolLM3Config", _LARGER | {"no_rope_layers": [1, 1, 0]}),
    "Granite": ("GraniteConfig", _LARGER | _SCALED),
}
# And a part of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-OSS": ("GptOssConfig", _LARGER | _EXPERTS, "attention sinks are not supported"),
    "Gemma 2": ("Gemma2Config", _LARGER, "soft caps are not supported"),
    "Gemma 3": ("Gemma3Config", {"text_config": _LARGER, "vision_config": _VISION}, "use vLLM"),
    "DeepSeek-V3": ("DeepseekV3Config", _BY_HEADS | _COMPRESSED, "different sizes"),
    "Bloom": ("BloomConfig", {"vocab_size": 259, "hidden_size": 32, "n_head": 4}, "is its own"),
    "Mamba": ("MambaConfig", {"vocab_size": 259, "hidden_size": 32}, "layers of kind linear"),
    "Llama 4": ("Llama4TextConfig", _LARGER | {"num_local_experts": 2}, "chunked_attention"),
    "T5": ("T5Config", {"vocab_size": 259, "d_model": 32}, "not a causal language model"),
}


def save(name: str, directory: Path) -> Path:
    """A directory with a model of the family, a tokenizer, a chat template and two end tokens."""
    options: dict[str, Any]
    kind, options = (SUPPORTED.get(name) or REFUSED[name])[:2]
    config = getattr(transformers, kind)(**{"num_hidden_layers": 3, **options})
    if name == "T5":
        config.save_pretrained(directory)
        return directory
    model = tiny.of_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[END, END_OF_TURN], bos_token_id=1)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", SUPPORTED)
def test_logits_equal_plain_transformers(name: str, tmp_path: Path) -> None:
    """Three rounds and two cuts on a model that was loaded from its files. Its context is at most
    its window."""
    directory = save(name, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    loaded = CausalLM.load(examine(directory), "cpu")
    model = stepping.Recorder(loaded)
    engine = Engine(model, 2000, prefill_chunk=7)
    session_id = stepping.admitted(engine, n=6)
    for until, keep in ((8, {0, 2, 5}), (16, {2, 5})):
        stepping.grown(engine, session_id, until)
        engine.prune(session_id, keep)
    for row, prefix in enumerate(stepping.grown(engine, session_id).prefixes):
        tiny.check_candidate(reference, stepping.PROMPT, prefix, model.passes[-1].logits[row], 1e-3)
    assert model.eos_ids == {END, END_OF_TURN}
    assert loaded.sizes.context_tokens == SUPPORTED[name][1].get("sliding_window", 256)


def test_longrope_is_used_before_its_factors_change(tmp_path: Path) -> None:
    """Guards against factors of a short text that a long one of the same pass chooses."""
    directory = save("Phi-3", tmp_path)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config |= {"rope_parameters": rope | factors | {"factor": 8.0}}
    path.write_text(json.dumps(config | {"original_max_position_embeddings": 32}))
    assert CausalLM.load(examine(directory), "cpu").sizes.context_tokens == 32


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_work_is_refused(name: str, tmp_path: Path) -> None:
    """Guards against wrong tokens, and errors at the first request: Bloom's attention stayed its
    own, and candidates saw each other."""
    directory = save(name, tmp_path)
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    with pytest.raises(ValueError, match=f"^model_type {kind}: .*{REFUSED[name][2]}"):
        CausalLM.load(examine(directory), "cpu")


# On random weights of each architecture, without files

SYSTEM = [3 + 11 * i % 89 for i in range(70)]


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_stored_prompt_gives_the_logits_of_a_new_one(name: str) -> None:
    """Guards against an answer that depends on whether the prompt was cached, and on where its
    chunks end, which other sessions' prompts decide.

    To the last bit: first draws come from the logits of the prompt's last token.
    """
    logits = []
    for chunk in (8, 1, 5):
        model = stepping.Recorder(CausalLM(tiny.build(name), tiny.END_IDS))
        engine = Engine(model, 5000, prefill_chunk=chunk, prefix_cache_slots=1000)
        for _ in range(2):
            session_id = stepping.admitted(engine)
            stepping.grown(engine, session_id, 1)
            engine.close(session_id)
            logits.append(model.passes[-1].logits)
        assert model.num_prompt_tokens == len(stepping.PROMPT)
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-5)], ids=str
)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_over_shared_nodes_equal_plain_transformers(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of up to three nodes, one split while it is read, and cuts.

    Float64 has no rounding errors; float32 uses compiled code.
    """
    reference = tiny.build(name).to(dtype)
    model = stepping.Recorder(CausalLM(tiny.build(name).to(dtype), tiny.END_IDS))
    engine = Engine(model, 5000, prefill_chunk=30)
    tails = [[5, 6, 7], [], stepping.PROMPT, [5, 6, 7]]
    prompts = [SYSTEM + tail for tail in tails] + [[*SYSTEM[:66], 90, 91]]
    sessions = [stepping.admitted(engine, prompt) for prompt in prompts[:2]]
    stepping.steps(engine, 2)
    for prompt in prompts[2:]:
        sessions.append(
            stepping.admitted(
                engine, prompt, sampling=replace(stepping.ENDLESS, seed=len(sessions))
            )
        )
        engine.check_integrity()
    for until, keep in ((5, {0, 2}), (9, {2})):
        for running in [engine.extend(session_id, until) for session_id in sessions]:
            stepping.result(engine, running)
        for session_id in sessions:
            engine.prune(session_id, keep)
    assert model.num_prompt_tokens == 70 + 3 + 17 + 2
    for session_id, prompt in zip(sessions, prompts, strict=True):
        (prefix,) = stepping.grown(engine, session_id, 10).prefixes
        tiny.check_candidate(reference, prompt, prefix, model.passes[-1].logits[0], tolerance)


# The embedded model: real weights, a real vocabulary


DIRECTORY = Path(".models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def embedded() -> CausalLM:
    return CausalLM.load(examine(DIRECTORY), "cpu")


@pytest.fixture(scope="module")
def prompt_ids(embedded: CausalLM) -> list[int]:
    prompt = Prompt.from_user("Name three uses of a brick.")
    return Text.of(examine(DIRECTORY)).encode(prompt)


@pytest.mark.long
def test_logits_of_the_embedded_model_equal_plain_transformers(
    embedded: CausalLM, prompt_ids: list[int]
) -> None:
    """Within 1e-3, and the summed log-probabilities too, after two rounds and a cut."""
    recorder = stepping.Recorder(embedded)
    engine = Engine(recorder, 20_000)
    sampling = Sampling(max_tokens=12, seed=5, ignore_eos=True)
    session_id = stepping.admitted(engine, prompt_ids, 16, sampling)
    stepping.grown(engine, session_id, 6)
    engine.prune(session_id, {0, 9})
    batch = stepping.grown(engine, session_id, 12)
    plain = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    for row, prefix in enumerate(batch.prefixes):
        tiny.check_candidate(plain, prompt_ids, prefix, recorder.passes[-1].logits[row], 1e-3)


# Models of a hub, from a name to answers


SPEC = SessionSpec(Prompt(text="hello"), 1, Sampling(max_tokens=8, temperature=0.0), 8)


async def tokens_of(model: str, name: str) -> tuple[int, ...]:
    """The greedy tokens of a generator's answer, once it has described itself by `name`."""
    generator = load_generator(GeneratorSettings(model=model, device="cpu", kv_slots=500))
    try:
        assert (await generator.describe()).model == name
        async with generator.open(SPEC) as session:
            (candidate,) = (await session.extend(8)).candidates
        return candidate.new_token_ids
    finally:
        generator.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("Llama 3", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def fetched(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that `specrej pull` fetched."""
    with hubs.running() as server:
        server.add("tiny/llama", directory, "v1")
        hubs.use(monkeypatch, server.endpoint, tmp_path)
        hub.main(["tiny/llama@v1"])
    return "tiny/llama@v1"


async def test_a_generator_and_a_reward_by_name(
    directory: Path, fetched: str, tmp_path: Path
) -> None:
    """Guards against other weights than the directory's, and a name that only one service takes."""
    assert await tokens_of(fetched, "tiny/llama") == await tokens_of(str(directory), directory.name)
    sources = (Path(fetched), directory)
    head = tmp_path / "head.safetensors"
    save_file({HEAD_TENSOR: torch.ones(_LARGER["hidden_size"])}, head)
    rewards = [load("classifier", source, head_file=head) for source in sources]
    named, local = (score(reward, SPEC.prompt, ["some text"]).values for reward in rewards)
    assert named == local
    assert rewards[0].fingerprint == rewards[1].fingerprint
