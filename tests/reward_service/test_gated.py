"""Gated multi-head rewards on tiny random weights, against the published computation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, LlamaModel

from reward_service.causal_reward import CausalReward
from reward_service.gated import load_gated
from reward_service.reward import score, score_batch
from specrej.contracts import Candidate
from tests.reward_service.tiny import (
    EOS,
    PROMPT,
    TEXTS,
    make_config,
    make_tokenizer,
    options,
    rendered,
)

OBJECTIVES = 5
HIDDEN_LAYERS = 3
TEMPERATURE = 7.0
GATE_AT = EOS + "<assistant>"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the names and the configuration of ArmoRM's, tiny."""
    directory = tmp_path_factory.mktemp("gated")
    torch.manual_seed(0)
    config = make_config("llama", None)
    LlamaModel(config).save_pretrained(directory)
    make_tokenizer(None).save_pretrained(directory)
    weights = {f"model.{k}": v for k, v in load_file(directory / "model.safetensors").items()}
    weights["regression_layer.weight"] = torch.randn(OBJECTIVES, 32)
    weights["reward_transform_matrix"] = torch.randn(OBJECTIVES, OBJECTIVES)
    sizes = [32, *[16] * HIDDEN_LAYERS, OBJECTIVES]
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        weights[f"gating.layers.{number}.weight"] = torch.randn(outputs, inputs)
        weights[f"gating.layers.{number}.bias"] = torch.randn(outputs)
    weights["gating.logit_scale"] = torch.tensor([1.7])
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    told = json.loads((directory / "config.json").read_text())
    told |= {"gating_temperature": TEMPERATURE, "architectures": ["LlamaForRewardModelWithGating"]}
    told["auto_map"] = {"AutoModelForSequenceClassification": "modeling_custom.Missing"}
    (directory / "config.json").write_text(json.dumps(told))
    return directory


def published(directory: Path, texts: list[str]) -> list[float]:
    """Step by step as the authors' forward pass describes it, one text at a time."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModel.from_pretrained(directory).eval()
    weights = load_file(directory / "model.safetensors")
    pattern = tokenizer.encode(GATE_AT, add_special_tokens=False)
    scores = []
    for text in texts:
        ids = tokenizer.encode(rendered(tokenizer, PROMPT, text), add_special_tokens=False)
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        where = max(i for i in range(len(ids)) if ids[i : i + len(pattern)] == pattern)
        gate = states[where]
        for number in range(HIDDEN_LAYERS + 1):
            name = f"gating.layers.{number}"
            gate = weights[f"{name}.weight"] @ gate + weights[f"{name}.bias"]
            if number < HIDDEN_LAYERS:
                gate = F.relu(gate)
        gate = torch.softmax(gate / TEMPERATURE, dim=0) * weights["gating.logit_scale"]
        rewards = weights["regression_layer.weight"] @ states[-1]
        scores.append(float(gate @ (rewards @ weights["reward_transform_matrix"])))
    return scores


@pytest.fixture(scope="module")
def reward(directory: Path) -> CausalReward:
    return load_gated(options(directory), gate_at=GATE_AT)


def test_scores_are_the_published_computation(directory: Path, reward: CausalReward) -> None:
    """Guards the gate's place, the order of transposes, and the layers' count."""
    texts = [*TEXTS, f"a{GATE_AT}b"]  # the pattern inside a response: the last one counts
    expected = published(directory, texts)
    assert max(expected) - min(expected) > 0.1
    assert score(reward, PROMPT, texts).values == pytest.approx(expected, abs=1e-3, rel=1e-4)


def test_growing_texts_score_as_from_scratch(directory: Path, reward: CausalReward) -> None:
    """Guards the gate's value, which belongs to the prompt and is read once for all texts."""
    session = reward.open(PROMPT)
    texts = {0: "Mix", 1: "", 2: "né 面"}
    for _ in range(3):
        texts = {key: text + " flour." for key, text in texts.items()}
        batch = [Candidate(key, text, 0, 0.0) for key, text in texts.items()]
        found = score_batch(session, reward, batch)
        expected = published(directory, list(texts.values()))
        assert found.values == pytest.approx(expected, abs=1e-3, rel=1e-4)
        reward.scorer.check_integrity()
    assert found.computed_tokens == 3 * (len(" flour.") + 1)
    session.close()


def test_a_model_without_a_gate_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaModel(make_config("llama", None)).save_pretrained(tmp_path)
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks the weights regression_layer"):
        load_gated(options(tmp_path), gate_at=GATE_AT)
