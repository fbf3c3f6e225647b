"""Settings: every bad value is named before anything starts."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from reward_service.__main__ import main
from reward_service.settings import RewardSettings
from specrej.settings import load

CLASSIFIER = '[{"name": "x", "kind": "classifier", "directory": "y", %s}]'


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("rewards", "[]", "at least 1"),
        ("rewards", "not json", "rewards"),
        ("rewards", '[{"name": "t", "kind": "magic"}]', "'toy', 'relevance', 'classifier'"),
        ("rewards", '[{"name": "../x", "kind": "toy"}]', "should match pattern"),
        ("rewards", '[{"name": "x", "kind": "toy", "directory": "y"}]', "0.toy.directory"),
        ("rewards", CLASSIFIER % '"label": 1, "head_file": "z"', "label must be 0"),
        ("rewards", CLASSIFIER % '"vllm_options": {"seed": 1}', 'require engine "vllm"'),
        ("rewards", CLASSIFIER % '"images": "read"', 'requires engine "vllm"'),
        ("rewards", '[{"name": "x", "kind": "function", "function": "f"}]', "match pattern"),
        ("rewards", '[{"name": "likelihood", "kind": "toy"}]', "generator's own"),
        ("rewards", '[{"name": "x", "kind": "toy"}, {"name": "x", "kind": "toy"}]', "once"),
        ("token_budget", "1", "greater than or equal to 512"),
    ],
)
def test_bad_value_ends_the_process_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    accepted: str,
) -> None:
    """Guards against a service that starts with other values than were set."""
    monkeypatch.setenv(f"SPECREJ_REWARD_{name.upper()}", value)
    with pytest.raises(SystemExit) as ended:
        load(RewardSettings, [])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert name in message
    assert accepted in message


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"kind": "relevance", "directory": "gone"}, "reward r: no directory gone"),
        (
            {"kind": "function", "function": f"{__name__}:not_a_number"},
            "reward r returned a score that is not finite",
        ),
        (
            {"kind": "function", "function": "json:loads"},
            "reward r: TypeError: loads() takes 1 positional argument but 2 were given",
        ),
    ],
)
def test_a_reward_that_cannot_start_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, str], error: str
) -> None:
    """Guards against a traceback of the event loop that hides the reason."""
    rewards = json.dumps([{"name": "r", **spec}])
    monkeypatch.setattr(sys, "argv", ["reward", "--port", "0", "--rewards", rewards])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == f"reward service: {error}"


def not_a_number(prompt: Any, texts: list[str]) -> list[float]:
    return [math.nan for _ in texts]


def test_the_examples_of_the_documentation_are_accepted() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    counts = [len(load(RewardSettings, ["--rewards", block]).rewards) for block in blocks]
    assert counts == [2, 1]
