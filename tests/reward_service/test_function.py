"""Rewards that are Python functions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reward_service.reward import score
from specrej.contracts import Candidate, FinishReason, Prompt
from specrej.contracts.errors import RewardInvalid
from tests.reward_service.tiny import load

PROMPT = Prompt.from_user("Hi")
PATH = f"{__name__}:brevity"


def brevity(prompt: Prompt, responses: Sequence[str]) -> list[float]:
    """Shorter is better.

    Not part of the description.
    """
    assert prompt == PROMPT
    return [-len(response) for response in responses]


def fixed(values: Any, prompt: Prompt, responses: Sequence[str]) -> Any:
    return values


lengths = partial(fixed, [3, 0])


def test_function_is_a_reward() -> None:
    reward = load("function", function=PATH)
    assert score(reward, PROMPT, ["abc", "", "a"]).values == (-3.0, 0.0, -1.0)
    assert (reward.name, reward.description) == ("r", "Shorter is better.")
    callable_object = load("function", function=f"{__name__}:lengths")
    assert score(callable_object, PROMPT, ["abc", ""]).values == (3.0, 0.0)
    assert callable_object.fingerprint != reward.fingerprint


def complete(prompt: Prompt, responses: Sequence[str], *, finished: Sequence[bool]) -> list[bool]:
    return [*finished]


def test_function_may_ask_which_responses_have_ended() -> None:
    """Guards judges of complete answers against unfinished ones; `LENGTH` has not ended itself."""
    reward = load("function", function=f"{__name__}:complete")
    ends = (None, FinishReason.STOP, FinishReason.LENGTH)
    candidates = [Candidate(i, "a", 0, 0.0, finish) for i, finish in enumerate(ends)]
    assert reward.score(PROMPT, candidates).values == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("values", [{0: 0.5, 1: 0.5}, {1.0, 2.0}, "11", [10**400, 1], None])
def test_other_values_than_a_list_of_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, values: Any
) -> None:
    """Guards against candidates ranked by the keys of a dictionary, which may be numbers."""
    monkeypatch.setattr(sys.modules[__name__], "lengths", partial(fixed, values))
    with pytest.raises(RewardInvalid):
        score(load("function", function=f"{__name__}:lengths"), PROMPT, ["a", "bb"])


def test_edited_file_has_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the cache against answers selected by an older version."""
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    for version in (1, 2):
        module = f"edited_{version}"
        (tmp_path / f"{module}.py").write_text(f"def judge(prompt, texts): return [{version}]\n")
        prints.append(load("function", function=f"{module}:judge").fingerprint)
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such.module:f", "No module named"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:PATH", "cannot be called"),
    ],
)
def test_missing_function_is_an_error(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load("function", function=path)
