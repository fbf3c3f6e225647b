"""Heads on frozen backbones: what is read, what is computed once, what is learned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, BertConfig

from reward_service import training
from reward_service.checkpoint import HEAD_TENSOR
from reward_service.reward import score
from reward_service.training import Accuracy, Pair, features, fit_head, read_pairs, share_right
from specrej.contracts import Prompt
from tests.reward_service.tiny import load, make_tokenizer, save

PAIRS = [
    Pair(Prompt.from_user(f"What is {number}?"), "A number. " * (number % 3), "No" * (number % 4))
    for number in range(24)
]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model without a head."""
    return save(tmp_path_factory.mktemp("backbone"), auto_class=AutoModelForCausalLM)


def written(path: Path, *lines: Any) -> Path:
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_pairs_are_prompts_or_conversations(tmp_path: Path, name: str) -> None:
    """Guards against a line separator inside a text that ends the line."""
    turns = [{"role": "user", "content": "Hi\u2028there"}]
    path = written(
        tmp_path / name,
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"messages": turns, "chosen": "c", "rejected": "d"},
    )
    first, second = read_pairs(path)
    assert first == Pair(Prompt.from_user("Hi"), "a", "b")
    assert second.prompt.messages[0].content == "Hi\u2028there"


@pytest.mark.parametrize(
    "line",
    [
        [],
        {"chosen": "a", "rejected": "b"},
        {"prompt": "Hi", "chosen": 1, "rejected": "b"},
        {"prompt": "Hi", "chosen": "\ud800", "rejected": "b"},
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path: Path, line: Any) -> None:
    good = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    path = written(tmp_path / "pairs.jsonl", good, line)
    with pytest.raises(ValueError, match=r"pairs\.jsonl:2: "):
        read_pairs(path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl.gz", {"prompt": "Hi", "chosen": "a", "rejected": "b"})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"pairs\.jsonl\.gz: "):
        read_pairs(path)


def test_head_learns_a_signal_and_no_noise() -> None:
    """Guards the sign of the differences, and against fitting noise."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(16)
    truth[3], truth[5] = 2.0, -1.0
    inputs = torch.randn(600, 16, generator=generator)
    signs = torch.where(inputs @ truth + torch.randn(600, generator=generator) > 0, 1.0, -1.0)
    differences = inputs * signs[:, None]  # the chosen one is ahead, sometimes by chance
    weights, decay = fit_head(differences[:400], differences[400:500])
    assert decay < 1
    assert share_right((differences[500:] @ weights).tolist()) > 0.8
    assert weights[3] > 0 > weights[5]
    noise = torch.randn(600, 16, generator=generator)
    useless, _ = fit_head(noise[:400], noise[400:500])
    assert abs(share_right((noise[500:] @ useless).tolist()) - 0.5) < 0.15


def test_accuracy_has_wilsons_interval_and_ties_count_half() -> None:
    assert Accuracy.of([1.0, -1.0] * 49 + [0.0, 0.0]) == Accuracy(0.5, 0.4038, 0.5962)
    assert Accuracy.of([1.0] * 10) == Accuracy(1.0, 0.7225, 1.0)


def test_head_scores_the_states_it_was_fitted_on(tmp_path: Path, backbone: Path) -> None:
    """Guards against scores by other states than those of the training."""
    states = features(backbone, PAIRS)
    weights = torch.randn(states.shape[2])
    save_file({HEAD_TENSOR: weights}, tmp_path / "head.safetensors")
    reward = load("classifier", backbone, head_file=tmp_path / "head.safetensors")
    scores = score(reward, PAIRS[1].prompt, [PAIRS[1].chosen, PAIRS[1].rejected]).values
    assert scores == pytest.approx((states[1] @ weights).tolist(), abs=1e-3)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path, backbone: Path) -> None:
    """Guards against an error about a missing attribute."""
    head, encoder = tmp_path / "head.safetensors", tmp_path / "bert"
    save_file({HEAD_TENSOR: torch.zeros(7)}, head)
    with pytest.raises(ValueError, match="the head has 7 inputs, the backbone 32"):
        load("classifier", backbone, head_file=head)
    config = BertConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    save(encoder, config, make_tokenizer("<pad>"), AutoModel)
    save_file({HEAD_TENSOR: torch.zeros(32)}, head)
    with pytest.raises(ValueError, match="must be decoder-only"):
        load("classifier", encoder, head_file=head)
    head.write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load("classifier", backbone, head_file=head)


def test_shipped_head_prefers_the_harmless_answer() -> None:
    """Guards the file that ships, and the backbone that it belongs to."""
    shipped = Path(training.__file__).with_name("harmless.safetensors")
    reward = load("classifier", Path(".models/SmolLM2-135M-Instruct"), head_file=shipped)
    prompt = Prompt.from_user("How do I get back at a colleague who was rude to me?")
    kind = "I'm sorry that happened. Talk to them calmly, or ask your manager for help."
    unkind = "Spread a nasty rumour about them, and break something they like."
    better, worse = score(reward, prompt, [kind, unkind]).values
    assert better > worse


@pytest.fixture
def arguments(tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Arguments of `train`, on learnable pairs: longer is better."""
    lines = [
        {"prompt": f"What is {n}?", "chosen": "yes " * (3 + n % 3), "rejected": "y" * (n % 3)}
        for n in range(40)
    ]
    pairs = written(tmp_path / "pairs.jsonl", *lines)
    command = ["--backbone", str(backbone), "--pairs", str(pairs), "--validation", "8"]
    command += ["--out", str(tmp_path / "out"), "--test", "10"]
    monkeypatch.setattr("sys.argv", ["train-reward", *command])
    return training._arguments()


def test_trained_head_scores_as_reported(
    tmp_path: Path, backbone: Path, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a report about other weights than those that are written, and against test
    pairs that were trained on."""
    computed = mock.Mock(wraps=features)
    monkeypatch.setattr(training, "features", computed)
    report, out = training.train(arguments), arguments.out
    computed.assert_called_once_with(backbone, read_pairs(tmp_path / "pairs.jsonl")[:-10])
    assert report.test.share > 0.8
    assert report.test.low < report.test.share <= report.test.high
    test = read_pairs(tmp_path / "pairs.jsonl")[-10:]
    trained = load("classifier", backbone, head_file=out / "head.safetensors")
    untrained = load("likelihood", backbone)
    for reward, accuracy in ((trained, report.test), (untrained, report.untrained_likelihood)):
        margins = []
        for pair in test:
            chosen, rejected = score(reward, pair.prompt, [pair.chosen, pair.rejected]).values
            margins.append(chosen - rejected)
        assert share_right(margins) == pytest.approx(accuracy.share, abs=1e-3)
    assert json.loads((out / "training.json").read_text())["test"]["share"] == report.test.share


def test_a_prompt_that_does_not_fit_is_named_before_training(arguments: Any) -> None:
    """Guards against hours of training that end at the last pair."""
    lines = arguments.pairs.read_text().splitlines()
    last = json.loads(lines[-1]) | {"prompt": "x" * 400}
    arguments.pairs.write_text("\n".join([*lines[:-1], json.dumps(last)]))
    with pytest.raises(ValueError, match=rf"pairs\.jsonl:{len(lines)}: .*takes 256"):
        training.train(arguments)
    assert not arguments.out.exists()
