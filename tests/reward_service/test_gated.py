"""Gated multi-head rewards on tiny random weights, against the published computation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel

from reward_service.reward import score
from tests.reward_service.tiny import PROMPT, TEXTS, computed, load, plain, save

OBJECTIVES = 5
HIDDEN_LAYERS = 3
TEMPERATURE = 7.0
GATE_AT = "<assistant>"


def save_gated(directory: Path) -> Path:
    """A checkpoint with the names and the configuration of ArmoRM's, tiny."""
    save(directory, auto_class=AutoModel)
    weights = {f"model.{k}": v for k, v in load_file(directory / "model.safetensors").items()}
    weights["regression_layer.weight"] = torch.randn(OBJECTIVES, 32)
    weights["reward_transform_matrix"] = torch.randn(OBJECTIVES, OBJECTIVES)
    sizes = [32, *[16] * HIDDEN_LAYERS, OBJECTIVES]
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        weights[f"gating.layers.{number}.weight"] = torch.randn(outputs, inputs)
        weights[f"gating.layers.{number}.bias"] = torch.randn(outputs)
    weights["gating.logit_scale"] = torch.tensor([1.7])
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"gating_temperature": TEMPERATURE}
    config |= {"architectures": ["LlamaForRewardModelWithGating"]}
    config["auto_map"] = {"AutoModelForSequenceClassification": "modeling_custom.Missing"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def published(directory: Path, texts: list[str]) -> list[float]:
    """Step by step as the authors' forward pass does it, one text at a time."""
    weights = load_file(directory / "model.safetensors")
    pattern = plain(directory, AutoModel)[0].encode(GATE_AT, add_special_tokens=False)
    scores = []
    for text in texts:
        ids, output = computed(directory, text, AutoModel)
        states = output.last_hidden_state[0]
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


def test_scores_are_the_published_computation(tmp_path: Path) -> None:
    """Guards the gate's place, the order of transposes, and the number of layers."""
    directory = save_gated(tmp_path)
    reward = load("gated", directory, gate_at=GATE_AT)
    texts = [*TEXTS, f"a{GATE_AT}b"]  # the pattern inside a response: the last one counts
    expected = published(directory, texts)
    assert max(expected) - min(expected) > 0.1
    assert score(reward, PROMPT, texts).values == pytest.approx(expected, abs=1e-3, rel=1e-4)
    with pytest.raises(ValueError, match="gate_at '@@' is not in its conversations"):
        load("gated", directory, gate_at="@@")
