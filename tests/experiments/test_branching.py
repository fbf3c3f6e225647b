"""`specrej experiment branching`, on toys, and its comparison on made figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.branching import System, compare, measure, read_runs, times_fewer
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.statistics import Estimate
from generator_service.toy import ToyGenerator
from specrej.contracts import Prompt
from tests.experiments.conftest import Run
from tests.experiments.doubles import models

FLAGS = ("--limit", "5", "--max-tokens", "64", "--rewards", "vowels,", "--rejection", "8,16,32")
SETTINGS = Settings(max_tokens=24, grid=(24,), rewards=("letters",), seed=5)
ITEMS = tuple(
    Item(name, number, Prompt.from_user(f"say {name}")) for number, name in enumerate("ab")
)
FEW, MANY = System(2), System(4)


def test_missing_runs_are_added(run: Run, tmp_path: Path) -> None:
    """Guards against runs that are measured twice, or without their machine."""
    command = ("branching", "--out", tmp_path, *FLAGS)
    run(*command, "--limit", 2, "--branching", "8,2")
    first = read_runs(tmp_path / "branching.jsonl")
    result = run(*command, "--branching", "8,2", "16,4")
    runs = read_runs(tmp_path / "branching.jsonl")
    assert len(first) == 2 * 4
    assert runs[: len(first)] == first
    assert len(runs) == 5 * 5
    assert all(line["machine"]["cores"] for line in runs)
    rows = result["rows"]
    names = ["N = 8", "N = 16", "N = 32", "branching 32/8,2", "branching 32/16,4"]
    assert [row["system"] for row in rows] == names
    rewards = [row["reward"]["value"] for row in rows[:3]]
    assert rewards == sorted(rewards)
    assert all(0 <= row["draws beyond the largest N"] <= 1 for row in rows[3:])


@pytest.mark.parametrize(
    "other",
    [
        {"settings": replace(SETTINGS, seed=9)},
        {"items": [replace(ITEMS[0], prompt=ITEMS[1].prompt)]},
        {"models": models(ToyGenerator(), fingerprint="2")},
        {"systems": [MANY]},
    ],
)
async def test_only_runs_of_the_same_request_are_reported(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Guards against an N of another seed, prompt or model beside the others in one table."""
    out = tmp_path / "branching.jsonl"
    request: dict[str, Any] = {
        **{"items": ITEMS[:1], "settings": SETTINGS, "systems": [FEW]},
        "models": models(ToyGenerator()),
    }
    before = await measure(out, **request)
    (made,) = await measure(out, **request | other)
    assert made not in before
    assert read_runs(out) == [*before, made]
    assert await measure(out, **request) == before


def figures(tokens: float, score: float | np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": np.full(8, tokens), "score": np.ones(8) * score}


REJECTION = [figures(100, 0.2), figures(400, 0.4)]


@pytest.mark.parametrize(
    ("score", "ratio"), [(0.2 + 1e-6, 1.0), (0.3, 2.0), (0.4, 4.0), (0.401, math.inf)]
)
def test_equal_rewards_are_compared(score: float, ratio: float) -> None:
    """Between two N rewards are linear in log tokens; no N is known to reach more than the last."""
    estimate, beyond = times_fewer(figures(100, score), REJECTION)
    assert isinstance(estimate, Estimate)
    assert estimate.value == pytest.approx(ratio, rel=1e-4)
    assert (estimate.low, estimate.high) == pytest.approx((ratio, ratio), rel=1e-4)
    assert beyond == math.isinf(ratio)


@pytest.mark.parametrize("score", [0.1, 0.2])
def test_rewards_below_those_of_the_least_n_are_marked(score: float) -> None:
    """Guards against a ratio that looks measured: a smaller N may be as good."""
    assert times_fewer(figures(50, score), REJECTION) == ("below 2", 0)


def test_draws_outside_what_was_measured_are_counted() -> None:
    """Guards against an interval that ends at the tokens of the largest N as if that were known."""
    estimate, beyond = times_fewer(figures(100, np.arange(8) / 10), REJECTION)
    assert isinstance(estimate, Estimate)
    assert 2 < estimate.value < 4
    assert 0.1 < beyond < 0.5
    assert math.isinf(estimate.high)


def line(prompt: str, system: str, judged: float = 0.0) -> dict[str, object]:
    made = {"prompt_id": prompt, "reward": "r", "system": system, "tokens": 10, "score": 1.0}
    return made | {"answer_tokens": 5, "mean_logprob": -1.0, "judges": {"j": judged}}


def test_only_prompts_that_every_system_has_answered_count() -> None:
    """Guards against a judge's mean over other prompts than that of the reward."""
    lines = [line("a", "N = 8", 0.0), line("b", "N = 8", 9.0), line("a", "branching 8/4,2", 1.0)]
    _, table = compare(lines, "r")
    assert "1 prompts" in table.caption
    assert table.table.judges.tolist() == ["j 0.000; logprob -1.000", "j 1.000; logprob -1.000"]


def test_the_order_of_the_file_does_not_count() -> None:
    """Guards a file that was continued with a smaller N: rewards met the tokens of another N."""
    made = {"N = 16": (100, 1.0), "N = 64": (400, 3.0), "branching 8/4,2": (100, 2.0)}
    lines = [
        line(prompt, system) | {"tokens": tokens, "score": score}
        for prompt in "ab"
        for system, (tokens, score) in made.items()
    ]
    ratios = [
        dict(zip(table.system, map(str, table["times fewer"]), strict=True))
        for table in (compare(of, "r")[1].table for of in (lines, lines[::-1]))
    ]
    assert ratios[0] == ratios[1]


def test_differences_are_of_equal_prompts() -> None:
    lines = [
        line(prompt, system, judged=shift + number)
        for number, prompt in enumerate("abcd")
        for system, shift in (("N = 8", 0.0), ("branching 8/4,2", 1.0))
    ]
    differences, _ = compare(lines, "r")
    (row,) = differences.table.to_dict("records")
    assert row["systems"] == "branching 8/4,2, N = 8"
    judged = row["j, sd"]
    deviation = np.std([0, 1, 2, 3, 1, 2, 3, 4])
    assert (judged.value, judged.low, judged.high) == pytest.approx((1 / deviation,) * 3)
    nothing = Estimate(0.0, 0.0, 0.0)
    assert row["reward"] == row["answer tokens"] == row["logprob, sd"] == nothing
