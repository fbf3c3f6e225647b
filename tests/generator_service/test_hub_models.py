"""Models of a hub and of a GGUF file, from a name to answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.loading import load_generator
from generator_service.settings import GeneratorSettings
from reward_service.reward import score
from specrej.contracts import Prompt, Sampling, SessionSpec
from specrej_models import hub
from tests import hub as hubs
from tests.generator_service import families, tiny
from tests.generator_service.stepping import PROMPT, Recorder, admitted, grown
from tests.reward_service.tiny import load

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = SessionSpec(Prompt(text="hello"), 1, Sampling(max_tokens=8, temperature=0.0), 8)


async def tokens_of(model: str, name: str, prompt: str = "hello") -> tuple[int, ...]:
    """The greedy tokens of a generator's answer, once it has described itself by `name`."""
    generator = load_generator(GeneratorSettings(model=model, device="cpu", kv_slots=500))
    try:
        assert (await generator.describe()).model == name
        async with generator.open(replace(SPEC, prompt=Prompt(text=prompt))) as session:
            (candidate,) = (await session.extend(8)).candidates
        return candidate.new_token_ids
    finally:
        generator.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("Llama 3", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def fetched(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that `specrej pull` fetched."""
    with hubs.running() as server:
        server.add("tiny/llama", directory, "v1")
        hubs.use(monkeypatch, server.endpoint, tmp_path)
        hub.main(["tiny/llama@v1"])
    return "tiny/llama@v1"


async def test_a_generator_and_a_reward_by_name(directory: Path, fetched: str) -> None:
    """Guards against other weights than the directory's, and a name that only one service takes."""
    assert await tokens_of(fetched, "tiny/llama") == await tokens_of(str(directory), directory.name)
    rewards = [load("likelihood", source) for source in (Path(fetched), directory)]
    named, local = (score(reward, SPEC.prompt, ["some text"]).values for reward in rewards)
    assert named == local
    assert rewards[0].fingerprint == rewards[1].fingerprint


def small_llama(**rope: Any) -> Any:
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "rope_parameters": rope}
    config = LlamaConfig(**families._SIZES | sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def write_gguf(model: Any, path: Path) -> None:
    """A Llama with two layers as llama.cpp's converter writes it."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", torch.ones(config.head_dim // 2).numpy())
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    first, second, *others = (chr(256 + n) for n in range(config.vocab_size - 4))
    tokens = ["<pad>", "<s>", "</s>", first, second, *others, first + second]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in key:  # rotated in pairs of neighbours
                halves = tensor.reshape(count, 2, -1, tensor.shape[1])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(key, (".weight",)) or key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_has_the_models_logits(tmp_path: Path) -> None:
    """Guards against weights that are permuted or dequantised in another way, and layers that
    compiled products do not replace."""
    model = small_llama()
    write_gguf(model, tmp_path / "small.f32.gguf")
    files = hub.find(str(tmp_path / "small.f32.gguf"))
    assert files == hub.ModelFiles("small.f32", tmp_path, "small.f32.gguf")
    recorder = Recorder(CausalLM.load(files.directory, "cpu", files.gguf_file))
    engine = Engine(recorder, 500)
    batch = grown(engine, admitted(engine, n=2), 4)
    for row, prefix in enumerate(batch.prefixes):
        tiny.check_candidate(model, PROMPT, prefix, recorder.passes[-1].logits[row], 1e-3)


_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope", [_LLAMA_3, {"rope_type": "linear"}, {"rope_type": "yarn"}])
def test_rotary_scaling_of_a_gguf_file_is_refused(rope: Any, tmp_path: Path) -> None:
    """Guards against wrong logits: transformers drops the scaling of Llama 3.1 and others."""
    write_gguf(small_llama(**rope, factor=4.0), tmp_path / "scaled.gguf")
    reason = f'unsupported rope scaling "{rope["rope_type"]}" in scaled.gguf; use the safetensors'
    with pytest.raises(ValueError, match=reason):
        CausalLM.load(tmp_path, "cpu", "scaled.gguf")


async def test_a_gguf_file_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a download of all of the repository's quantisations, and a start that does it
    again: from the file's name to an answer."""
    write_gguf(small_llama(), tmp_path / "small.gguf")
    files = {"sub/small.gguf": (tmp_path / "small.gguf").read_bytes(), "other.gguf": b"GGUF"}
    model = "tiny/packed/sub/small.gguf@v1"
    with hubs.running() as server:
        server.add("tiny/packed", files, "v1")
        hubs.use(monkeypatch, server.endpoint, tmp_path)
        pulled = hub.pull(model)
        assert set(server.downloads) == {"sub/small.gguf"}
    assert hub.find(model) == pulled
    spaces = " \t \n"  # of the tokenizer's few bytes
    tokens = await tokens_of(model, "tiny/packed", spaces)
    assert tokens == await tokens_of(str(tmp_path / "small.gguf"), "small", spaces)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    """Guards against weights that the file lacks, which were random numbers."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    model = small_llama()
    del model.model.norm
    write_gguf(model, tmp_path / "lacking.gguf")
    for name, reason in (("broken", "not a readable GGUF"), ("lacking", "lacks model.norm.weight")):
        with pytest.raises(ValueError, match=reason):
            CausalLM.load(tmp_path, "cpu", f"{name}.gguf")
