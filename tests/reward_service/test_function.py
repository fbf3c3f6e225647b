"""Rewards that are Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from reward_service.function import FunctionReward
from reward_service.reward import score
from specrej.contracts import Prompt
from specrej.errors import RewardInvalid

PROMPT = Prompt.from_user("Hi")
PATH = f"{__name__}:brevity"


def brevity(prompt: Prompt, responses: Sequence[str]) -> list[float]:
    """Shorter is better.

    Not told to clients.
    """
    assert prompt == PROMPT
    return [-len(response) for response in responses]


class Length:
    """Counts letters."""

    def __call__(self, prompt: Prompt, responses: Sequence[str]) -> list[int]:
        return [len(response) for response in responses]


length = Length()


def test_a_function_is_a_reward() -> None:
    reward = FunctionReward("brief", PATH)
    assert score(reward, PROMPT, ["abc", "", "a"]).values == (-3.0, 0.0, -1.0)
    assert (reward.name, reward.description) == ("brief", "Shorter is better.")


def test_whatever_can_be_called_will_do() -> None:
    reward = FunctionReward("length", f"{__name__}:length")
    assert score(reward, PROMPT, ["abc", ""]).values == (3.0, 0.0)
    assert reward.fingerprint != FunctionReward("length", PATH).fingerprint


def by_id(prompt: Prompt, responses: Sequence[str]) -> dict[int, float]:
    return {number: 0.5 for number, _ in enumerate(responses)}


def as_a_set(prompt: Prompt, responses: Sequence[str]) -> set[float]:
    return {float(len(response)) for response in responses}


def as_text(prompt: Prompt, responses: Sequence[str]) -> str:
    return "1" * len(responses)


def too_large(prompt: Prompt, responses: Sequence[str]) -> list[int]:
    return [10**400 for _ in responses]


@pytest.mark.parametrize("name", ["by_id", "as_a_set", "as_text", "too_large"])
def test_what_is_no_list_of_numbers_is_refused(name: str) -> None:
    """Guards against candidates ranked by the keys of a dictionary, which are numbers, too."""
    with pytest.raises(RewardInvalid):
        score(FunctionReward("r", f"{__name__}:{name}"), PROMPT, ["a", "bb"])


def test_an_edited_file_has_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the cache against answers chosen by an older version."""
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    for version in (1, 2):
        module = f"edited_{version}"
        (tmp_path / f"{module}.py").write_text(f"def judge(prompt, texts): return [{version}]\n")
        prints.append(FunctionReward("r", f"{module}:judge").fingerprint)
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such.module:f", "No module named"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:PATH", "cannot be called"),
    ],
)
def test_what_is_not_there_is_told(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FunctionReward("r", path)
