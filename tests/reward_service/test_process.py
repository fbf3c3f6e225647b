"""Process rewards on tiny random weights: token classifiers and two layers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForTokenClassification

from reward_service.conversation import Turns
from reward_service.reward import score, score_batch
from specrej.contracts import FinishReason
from tests.reward_service import tiny
from tests.reward_service.tiny import PROMPT, batch, load, save

STEP = "@"  # a byte of its own
ANSWERS = ["Two plus two.\n\nIs four.", "No.", "", "One.\n\nTwo.\n\nThree.\n\n", "\n\n\n\nA."]
STEPPED = ["Two plus two.@Is four.@", "No.@", "", "One.@Two.@Three.@", "A.@"]


def at_steps(directory: Path, ids: list[int], values: torch.Tensor) -> list[float]:
    """Values at every step token, or at the last token if there is none."""
    tokenizer, _ = tiny.plain(directory, AutoModel)
    step = tokenizer.encode(STEP, add_special_tokens=False)[0]
    places = [i for i, token in enumerate(ids) if token == step] or [len(ids) - 1]
    return [float(values[place]) for place in places]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token classifier of two labels."""
    config = tiny.make_config("qwen2", None, num_labels=2)
    directory = tmp_path_factory.mktemp("labels")
    return save(directory, config, auto_class=AutoModelForTokenClassification)


def by_labels(directory: Path, stepped: str) -> list[float]:
    """The probabilities of label 1 at the steps, by transformers."""
    ids, output = tiny.computed(directory, stepped, AutoModelForTokenClassification)
    return at_steps(directory, ids, output.logits[0].softmax(dim=-1)[:, 1])


def test_steps_are_scored_by_a_token_classifier(labels: Path) -> None:
    """Guards the label's index, the tokens that are read, and how several steps are aggregated."""
    steps = [by_labels(labels, text) for text in STEPPED]
    aggregates = {"last": [v[-1] for v in steps], "min": map(min, steps), "mean": map(fmean, steps)}
    for how, expected in aggregates.items():
        reward = load("process", labels, step_token=STEP, aggregate=how)
        scores = score(reward, PROMPT, ANSWERS).values
        assert scores == pytest.approx([*expected], abs=1e-4), how


def test_steps_are_scored_by_two_layers(tmp_path: Path) -> None:
    """Guards heads of the Qwen2.5-Math-PRM kind."""
    save(tmp_path, auto_class=AutoModel)
    weights = {f"model.{k}": v for k, v in load_file(tmp_path / "model.safetensors").items()}
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    layers.requires_grad_(False)
    expected = []
    for text in STEPPED:
        ids, output = tiny.computed(tmp_path, text, AutoModel)
        good = layers(output.last_hidden_state[0]).softmax(dim=-1)[:, 1]
        expected.append(min(at_steps(tmp_path, ids, good)))
    weights |= {f"score.{name}": weight for name, weight in layers.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    reward = load("process", tmp_path, step_token=STEP)
    assert score(reward, PROMPT, ANSWERS).values == pytest.approx(expected, abs=1e-4)


def test_open_text_is_scored_by_the_steps_that_have_ended(labels: Path) -> None:
    """A part of a step does not count unless nothing else is there, and is not computed."""
    reward = load("process", labels, step_token=STEP)
    session = reward.open(PROMPT)
    seen_by_model = {
        "Two pl": "Two pl@",
        "Two plus two.\n\nIs": "Two plus two.@",
        "Two plus two.\n\nIs four": "Two plus two.@",
        "Two plus two.\n\nIs four.\n\n": "Two plus two.@Is four.@",
    }
    computed_tokens = []
    for text, seen in seen_by_model.items():
        scores = score_batch(session, reward, batch({0: text}, FinishReason.LENGTH))
        assert scores.values == pytest.approx((min(by_labels(labels, seen)),), abs=1e-4)
        reward.check_integrity()
        computed_tokens.append(scores.computed_tokens)
    assert computed_tokens[2] == 0
    whole = batch({0: "Two plus two.\n\nIs four"}, FinishReason.STOP)
    expected = min(by_labels(labels, "Two plus two.@Is four@"))
    assert score_batch(session, reward, whole).values == pytest.approx((expected,), abs=1e-4)


def test_step_token_is_found_whatever_the_tokenizer_merges(labels: Path, tmp_path: Path) -> None:
    """Guards steps that end where tokenizers merge: ".@" is one token here."""
    for path in labels.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[".@"] = vocabulary.pop("Ġ")  # replaces a token that is not needed
    tokenizer["model"]["merges"] = [[".", "@"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    reward = load("process", tmp_path, step_token=STEP)
    text = reward.prepare("One.\n\nTwo.\n\n", True)
    (tokens,) = Turns(reward.conversation, PROMPT).tokenize([(text, True)])
    assert len(reward.marks(tokens)) == 2


def test_options_that_the_model_cannot_have_are_refused(labels: Path, language_model: Path) -> None:
    """Guards against steps that are never found, and labels that do not exist."""
    with pytest.raises(ValueError, match="the step token '@@' must be one token, is 2"):
        load("process", labels, step_token="@@")
    with pytest.raises(ValueError, match="has 2 labels, none is 2"):
        load("process", labels, step_token=STEP, good_label=2)
    with pytest.raises(ValueError, match="lacks the weights score, has lm_head, model"):
        load("process", language_model, step_token=STEP)
