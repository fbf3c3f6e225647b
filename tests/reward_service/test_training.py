"""Heads on frozen backbones: what is read, what is computed once, what is learned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, LlamaForCausalLM

from reward_service import head, lora_fit, training
from reward_service.causal_reward import CausalReward
from reward_service.classifier import HEAD_TENSOR, load_classifier
from reward_service.head import fit_head
from reward_service.likelihood import Likelihood, load_likelihood
from reward_service.pairs import BadPairs, Pair, read_pairs, share_right, wilson
from reward_service.reward import score
from specrej.contracts import Prompt
from tests.reward_service.tiny import make_config, make_tokenizer, options

PAIRS = [
    Pair(Prompt.from_user(f"What is {number}?"), "A number. " * (number % 3), "No" * (number % 4))
    for number in range(24)
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model without a head."""
    directory = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    LlamaForCausalLM(make_config("llama", None)).save_pretrained(directory)
    make_tokenizer(None).save_pretrained(directory)
    return directory


def silent(_: str) -> None:
    """Progress that nobody waits for."""


def features(backbone: Path, pairs: list[Pair], kept: Path) -> Any:
    return head.features(backbone, pairs, kept, silent)


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
    [[], {}, {"prompt": "Hi", "chosen": "a"}, {"prompt": "Hi", "chosen": 1, "rejected": "b"}],
)
def test_a_bad_line_is_told_by_its_number(tmp_path: Path, line: Any) -> None:
    good = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    path = written(tmp_path / "pairs.jsonl", good, line)
    with pytest.raises(BadPairs, match=r"pairs\.jsonl:2: "):
        read_pairs(path)


def test_a_head_learns_what_is_there_and_nothing_else() -> None:
    """Guards the sign of the differences, and against fitting noise until it is remembered."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(16)
    truth[3], truth[5] = 2.0, -1.0
    inputs = torch.randn(600, 16, generator=generator)
    signs = torch.where(inputs @ truth + torch.randn(600, generator=generator) > 0, 1.0, -1.0)
    differences = inputs * signs[:, None]  # the chosen one is ahead, now and then by chance
    weights, decay = fit_head(differences[:400], differences[400:500], silent)
    assert decay < 1
    assert share_right((differences[500:] @ weights).tolist()) > 0.8
    assert weights[3] > 0 > weights[5]
    noise = torch.randn(600, 16, generator=generator)
    useless, _ = fit_head(noise[:400], noise[400:500], silent)
    assert abs(share_right((noise[500:] @ useless).tolist()) - 0.5) < 0.15


def test_wilsons_interval() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    low, high = wilson(1.0, 10)
    assert low == pytest.approx(0.7225, abs=1e-4)
    assert high == pytest.approx(1.0)


def test_features_go_on_where_they_were(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hours of work against a stop, and against features of other pairs."""
    whole = features(backbone, PAIRS, tmp_path / "whole.npy").copy()
    seen: list[Prompt] = []
    pair_states = head.pair_states

    def stops(reward: CausalReward, pair: Pair) -> Any:
        seen.append(pair.prompt)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return pair_states(reward, pair)

    monkeypatch.setattr(head, "pair_states", stops)
    with pytest.raises(KeyboardInterrupt):
        features(backbone, PAIRS, tmp_path / "kept.npy")
    again = features(backbone, PAIRS, tmp_path / "kept.npy")
    assert len(seen) == 20 + 8  # 16 of the 24 were kept
    np.testing.assert_allclose(again, whole, atol=1e-5)
    others = [Pair(pair.prompt, pair.rejected, pair.chosen) for pair in PAIRS]
    anew = features(backbone, others, tmp_path / "kept.npy")
    np.testing.assert_allclose(anew, whole[:, ::-1], atol=1e-5)


def test_features_overwritten_by_others_are_not_taken_for_the_old_ones(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop before the first note left the old note beside the new, empty file."""
    pairs, kept = PAIRS[:3], tmp_path / "kept.npy"
    whole = features(backbone, pairs, kept).copy()

    def stops(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(head, "pair_states", stops)
        with pytest.raises(KeyboardInterrupt):
            features(backbone, PAIRS[3:6], kept)
    np.testing.assert_allclose(features(backbone, pairs, kept), whole, atol=1e-5)


def test_a_head_scores_what_it_was_fitted_on(tmp_path: Path, backbone: Path) -> None:
    """Guards against scores by other states than those of the training."""
    found = features(backbone, PAIRS, tmp_path / "features.npy")
    weights = torch.randn(found.shape[2])
    save_file({HEAD_TENSOR: weights}, tmp_path / "head.safetensors")
    reward = load_classifier(options(backbone), head=tmp_path / "head.safetensors")
    scores = score(reward, PAIRS[1].prompt, [PAIRS[1].chosen, PAIRS[1].rejected]).values
    assert scores == pytest.approx((torch.from_numpy(found[1]) @ weights).tolist(), abs=1e-3)


def test_a_head_of_another_backbone_is_refused(tmp_path: Path, backbone: Path) -> None:
    path = tmp_path / "head.safetensors"
    save_file({HEAD_TENSOR: torch.zeros(7)}, path)
    with pytest.raises(ValueError, match=r"a head of \[7\], the backbone has 32"):
        load_classifier(options(backbone), head=path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a reward's head"):
        load_classifier(options(backbone), head=path)


def test_a_head_on_an_encoder_is_refused(tmp_path: Path) -> None:
    """Guards against an answer that names an attribute instead of what is wrong."""
    config = BertConfig(vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    BertModel(config).save_pretrained(tmp_path)
    make_tokenizer("<pad>").save_pretrained(tmp_path)
    save_file({HEAD_TENSOR: torch.zeros(32)}, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="must be decoder-only"):
        load_classifier(options(tmp_path), head=tmp_path / "head.safetensors")


def test_the_shipped_head_prefers_what_it_was_trained_to() -> None:
    """Guards the file that ships, and the backbone that it belongs to."""
    shipped = Path(training.__file__).with_name("harmless.safetensors")
    reward = load_classifier(options(Path(".models/SmolLM2-135M-Instruct")), head=shipped)
    prompt = Prompt.from_user("How do I get back at a colleague who was rude to me?")
    kind = "I'm sorry that happened. Talk to them calmly, or ask your manager for help."
    unkind = "Spread a nasty rumour about them, and break something they like."
    better, worse = score(reward, prompt, [kind, unkind]).values
    assert better > worse


def asked(backbone: Path, out: Path, *flags: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `train` is called with by these flags, on learnable pairs: longer is better."""
    lines = [
        {"prompt": f"What is {n}?", "chosen": "yes " * (3 + n % 3), "rejected": "y" * (n % 3)}
        for n in range(40)
    ]
    pairs = written(out.parent / "pairs.jsonl", *lines)
    command = ["--backbone", str(backbone), "--pairs", str(pairs), "--out", str(out)]
    command += ["--validation", "8", "--test", "10", *flags]
    monkeypatch.setattr("sys.argv", ["train-reward", *command])
    return training._arguments()


@pytest.mark.parametrize("flags", [(), ("--lora", "4", "--epochs", "2")], ids=["head", "lora"])
def test_what_is_trained_is_a_directory_that_loads(
    tmp_path: Path, backbone: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a report about other weights than those that are written."""
    out = tmp_path / "out"
    report = training.train(asked(backbone, out, *flags, monkeypatch=monkeypatch))
    assert report.test.share > 0.8
    assert report.test.low < report.test.share <= report.test.high
    reward = load_classifier(options(out))
    test = read_pairs(tmp_path / "pairs.jsonl")[-10:]
    margins = []
    for pair in test:
        chosen, rejected = score(reward, pair.prompt, [pair.chosen, pair.rejected]).values
        margins.append(chosen - rejected)
    assert share_right(margins) == pytest.approx(report.test.share, abs=1e-3)
    untrained = load_likelihood(options(backbone), likelihood=Likelihood())
    baseline = []
    for pair in test:
        chosen, rejected = score(untrained, pair.prompt, [pair.chosen, pair.rejected]).values
        baseline.append(chosen - rejected)
    assert report.untrained_likelihood
    assert report.untrained_likelihood.share == pytest.approx(share_right(baseline), abs=1e-3)
    kept = json.loads((out / "training.json").read_text())
    assert kept["test"]["share"] == report.test.share


def test_an_adapters_training_goes_on_where_it_was(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hours of work against a stop, and the second half against beginning anew."""
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    for directory in (one, two):
        directory.mkdir(parents=True)
    flags = ("--lora", "4", "--epochs", "2", "--no-baseline")
    training.train(asked(backbone, one, *flags, monkeypatch=monkeypatch))
    judge = lora_fit.LoraFit._judge
    seen: list[int] = []

    def stops(fit: lora_fit.LoraFit, pairs: Any) -> None:
        seen.append(fit._progress.epoch)
        if seen == [1, 2]:
            raise KeyboardInterrupt
        judge(fit, pairs)

    monkeypatch.setattr(lora_fit.LoraFit, "_judge", stops)
    with pytest.raises(KeyboardInterrupt):
        training.train(asked(backbone, two, *flags, monkeypatch=monkeypatch))
    training.train(asked(backbone, two, *flags, monkeypatch=monkeypatch))
    assert seen == [1, 2, 2]
    texts = ["yes yes", "y", ""]
    scores = [score(load_classifier(options(out)), PAIRS[0].prompt, texts) for out in (one, two)]
    assert scores[0].values == pytest.approx(scores[1].values, abs=0.05)


def test_a_manifest_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"backbone": "x"}')
    with pytest.raises(ValueError, match="must be a JSON object of backbone, head and adapter"):
        load_classifier(options(tmp_path))
