"""Settings: every bad value is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_service.settings import ClassifierSpec, RelevanceSpec, RewardSettings
from specrej.settings import load

CLASSIFIER = '[{"name": "x", "kind": "classifier", "directory": "y", %s}]'
PROCESS = CLASSIFIER.replace("classifier", "process")
PAIRWISE = CLASSIFIER.replace("classifier", "pairwise")


def test_the_defaults_are_the_embedded_models() -> None:
    settings = load(RewardSettings, [])
    relevance, harmless = settings.rewards
    assert isinstance(relevance, RelevanceSpec)
    assert isinstance(harmless, ClassifierSpec)
    assert (relevance.name, relevance.kind) == ("relevance", "relevance")
    assert relevance.directory == Path(".models/relevance")
    assert (harmless.name, harmless.kind) == ("harmless", "classifier")
    assert harmless.head
    assert harmless.head.is_file()
    assert (settings.port, settings.max_batch) == (50052, 1024)


def test_rewards_are_json_in_environment_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", '[{"name": "t", "kind": "toy"}]')
    assert [reward.name for reward in load(RewardSettings, []).rewards] == ["t"]
    flags = ["--rewards", '[{"name": "a", "kind": "toy"}, {"name": "b", "kind": "toy"}]']
    assert [reward.name for reward in load(RewardSettings, flags).rewards] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("rewards", "[]", "at least 1"),
        ("rewards", "not json", "rewards"),
        ("rewards", '[{"name": "t", "kind": "magic"}]', "'toy', 'relevance', 'cross-encoder'"),
        ("rewards", '[{"name": "../x", "kind": "toy"}]', "should match pattern"),
        ("rewards", '[{"name": "x", "kind": "classifier"}]', "0.classifier.directory"),
        ("rewards", '[{"name": "x", "kind": "toy", "directory": "y"}]', "0.toy.directory"),
        ("rewards", CLASSIFIER % '"label_weights": []', "at least 1 item"),
        ("rewards", CLASSIFIER % '"label_weights": [1, 2], "head": "h"', "must be one number"),
        ("rewards", CLASSIFIER % '"transform": {"kind": "cube"}', "'identity' or 'sigmoid'"),
        ("rewards", CLASSIFIER % '"transform": {"scale": NaN}', "finite"),
        ("rewards", CLASSIFIER % '"unfinished": "half"', "'closed' or 'open'"),
        ("rewards", CLASSIFIER % '"format": "{response}"', "{prompt} and {response} once"),
        ("rewards", CLASSIFIER % '"format": "{response} {prompt}"', "{prompt} before {response}"),
        ("rewards", PROCESS % '"good": "+"', "must both be words"),
        ("rewards", PROCESS % '"aggregate": "max"', "'last', 'min' or 'mean'"),
        ("rewards", PAIRWISE % '"template": "{a} {b} {context}"', "in this order"),
        ("rewards", PAIRWISE % '"opponents": 0', "greater than or equal to 1"),
        ("rewards", '[{"name": "x", "kind": "function", "function": "f"}]', "match pattern"),
        ("rewards", '[{"name": "x", "kind": "http", "url": "ftp://x"}]', "match pattern"),
        ("rewards", '[{"name": "x", "kind": "grpc", "address": "x"}]', "match pattern"),
        ("kept_tokens", "0", "greater than or equal to 1"),
        ("merge_ms", "-1", "greater than or equal to 0"),
        ("rewards", '[{"name": "likelihood", "kind": "toy"}]', "generator's own"),
        ("rewards", '[{"name": "x", "kind": "toy"}, {"name": "x", "kind": "toy"}]', "once"),
        ("device", "tpu", "should match pattern"),
        ("threads", "-1", "greater than or equal to 0"),
        ("max_batch", "0", "greater than or equal to 1"),
        ("token_budget", "1", "greater than or equal to 512"),
        ("queue_limit", "0", "greater than or equal to 1"),
        ("lease_s", "0", "greater than 0"),
        ("lease_s", "nan", "finite"),
        ("port", "70000", "less than or equal to 65535"),
    ],
)
def test_bad_values_end_the_process_with_their_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    accepted: str,
) -> None:
    """Guards against a service that starts with something other than what was asked for."""
    monkeypatch.setenv(f"SPECREJ_REWARD_{name.upper()}", value)
    with pytest.raises(SystemExit) as ended:
        load(RewardSettings, [])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert name in message
    assert accepted in message


def test_help_is_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(RewardSettings, ["--help"])
    assert ended.value.code == 0
    assert "SPECREJ_REWARD_" in capsys.readouterr().out
