"""`specrej experiment branching`, on toys, and its comparison on made figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.branching import System, compare, measure, times_fewer
from experiments.json_lines import Line, add_line, read_lines
from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.statistics import Estimate
from experiments.studies import Study
from generator_service.toy import ToyGenerator
from specrej.contracts import Branching, Prompt, RewardDescription
from tests.experiments.conftest import Refusal, Run
from tests.experiments.doubles import models

FLAGS = ("--limit", "5", "--max-tokens", "64", "--rewards", "vowels,", "--rejection", "8,16,32")
SETTINGS = Settings(max_tokens=24, grid=(24,), rewards=("letters",), seed=5)
ITEMS = tuple(
    Item(name, number, Prompt.from_user(f"say {name}")) for number, name in enumerate("ab")
)
FEW, MANY, FORKS = System(2), System(4), System(4, Branching(4, 2))


def test_missing_runs_are_added(run: Run, refusal: Refusal, tmp_path: Path) -> None:
    """Guards against runs that are measured twice, without machine or run id, or of other seeds."""
    command = ("branching", "--out", tmp_path, *FLAGS)
    run(*command, "--limit", 2, "--branching", "8,2")
    path = tmp_path / "branching.jsonl"
    first = read_lines(path)
    with path.open("a") as file:
        file.write(json.dumps(first[0])[:-9])  # it was stopped within a line
    result = run(*command, "--branching", "8,2", "16,4")
    runs = read_lines(path)
    assert len(first) == 2 * 4
    assert runs[: len(first)] == first
    assert len(runs) == 5 * 5
    assert len({line["run_id"] for line in first}) == 1
    assert len({line["run_id"] for line in runs}) == 2
    assert all(line["machine"]["cores"] for line in runs)
    rows = result["rows"]
    names = ["N = 8", "N = 16", "N = 32", "branching 32/8,2", "branching 32/16,4"]
    assert [row["system"] for row in rows] == names
    rewards = [row["reward"]["value"] for row in rows[:3]]
    assert rewards == sorted(rewards)
    assert all(0 <= row["draws beyond the largest N"] <= 1 for row in rows[3:])
    assert "another prompt, sampling or model" in refusal(*command, "--seed", "9")


async def runs_of(
    out: Path,
    systems: Sequence[System],
    settings: Settings = SETTINGS,
    items: Sequence[Item] = ITEMS,
    made: Models | None = None,
) -> list[Line]:
    return await measure(out, items, settings, systems, made or models(ToyGenerator()))


async def test_only_requested_systems_and_prompts_are_reported(tmp_path: Path) -> None:
    """Guards against a system that ran on few prompts: all others were compared on these only."""
    out = tmp_path / "branching.jsonl"
    await runs_of(out, [FEW, FORKS])
    await runs_of(out, [MANY], items=ITEMS[:1])
    runs = await runs_of(out, [FEW, FORKS])
    names = ("N = 2", "branching 4/4,2")
    assert [(r["prompt_id"], r["system"]) for r in runs] == [(p, n) for p in "ab" for n in names]
    assert "2 prompts" in compare(runs, "letters")[0].caption
    assert len(await runs_of(out, [FORKS], items=ITEMS[1:])) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"settings": replace(SETTINGS, seed=9)},
        {"items": [replace(ITEMS[0], prompt=ITEMS[1].prompt)]},
        {"made": models(ToyGenerator(), fingerprint="2")},
        {"made": replace(models(ToyGenerator()), rewards=(RewardDescription("letters", "2", ""),))},
    ],
)
async def test_runs_of_a_prompt_are_of_one_source(tmp_path: Path, other: dict[str, object]) -> None:
    """Guards against an N of another seed, prompt or model beside the others in one table."""
    out = tmp_path / "branching.jsonl"
    before = await runs_of(out, [FEW])
    with pytest.raises(ValueError, match="another prompt, sampling or model"):
        await runs_of(out, [MANY], **other)  # type: ignore[arg-type]
    assert read_lines(out) == before


async def test_runs_of_earlier_versions_are_reported_but_not_added_to(tmp_path: Path) -> None:
    """They have no source, run id or machine."""
    out, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    for made in await runs_of(out, [FEW, FORKS]):
        add_line(old, {key: made[key] for key in made.keys() - {"source", "run_id", "machine"}})
    runs = await runs_of(old, [FEW, FORKS])
    assert len(runs) == 4
    differences, _ = compare(runs, "letters")
    assert seconds_of(differences) == ("not measured together", 0)
    with pytest.raises(ValueError, match="of an unknown one"):
        await runs_of(old, [MANY])


def figures(tokens: float, score: float | np.ndarray) -> dict[str, np.ndarray]:
    return {"tokens": np.full(8, tokens), "score": np.ones(8) * score}


REJECTION = [figures(100, 0.2), figures(400, 0.4)]


@pytest.mark.parametrize(
    ("score", "ratio"), [(0.2 + 1e-6, 1.0), (0.3, 2.0), (0.4, 4.0), (0.401, math.inf)]
)
def test_equal_rewards_are_compared(score: float, ratio: float) -> None:
    """Between two N rewards are linear in log tokens; no N is known to reach more than the last."""
    estimate, below, beyond = times_fewer(figures(100, score), REJECTION)
    assert isinstance(estimate, Estimate)
    assert estimate.value == pytest.approx(ratio, rel=1e-4)
    assert (estimate.low, estimate.high) == pytest.approx((ratio, ratio), rel=1e-4)
    assert (below, beyond) == (0, math.isinf(ratio))


@pytest.mark.parametrize("score", [0.1, 0.2])
def test_rewards_below_those_of_the_least_n_are_marked(score: float) -> None:
    """Guards against a ratio that looks measured: a smaller N may be as good."""
    assert times_fewer(figures(50, score), REJECTION) == ("below 2", 1, 0)


def test_draws_outside_what_was_measured_are_counted() -> None:
    """Guards against an interval that ends at the tokens of the largest N as if that were known."""
    estimate, below, beyond = times_fewer(figures(100, np.arange(8) / 10), REJECTION)
    assert isinstance(estimate, Estimate)
    assert 2 < estimate.value < 4
    assert 0 < below < 0.1 < beyond < 0.5
    assert math.isinf(estimate.high)


def line(prompt: str, system: str, judged: float = 0.0, seconds: float = 1.0) -> dict[str, object]:
    made = {"prompt_id": prompt, "reward": "r", "system": system, "tokens": 10, "score": 1.0}
    return made | {
        **{"seconds": seconds, "answer_tokens": 5, "mean_logprob": -1.0},
        **{"judges": {"j": judged}, "run_id": "1"},
    }


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
        line(prompt, system, judged=shift + number, seconds=seconds)
        for number, prompt in enumerate("abcd")
        for system, shift, seconds in (("N = 8", 0.0, 4.0), ("branching 8/4,2", 1.0, 1.0 + number))
    ]
    differences, _ = compare(lines, "r")
    (row,) = differences.table.to_dict("records")
    assert row["systems"] == "branching 8/4,2, N = 8"
    judged = row["j, sd"]
    deviation = np.std([0, 1, 2, 3, 1, 2, 3, 4])
    assert (judged.value, judged.low, judged.high) == pytest.approx((1 / deviation,) * 3)
    seconds, together = seconds_of(differences)
    assert (seconds.value, together) == (2.5 / 4, 4)
    nothing = Estimate(0.0, 0.0, 0.0)
    assert row["reward"] == row["answer tokens"] == row["logprob, sd"] == nothing


def seconds_of(differences: Study) -> tuple[Any, int]:
    row = differences.table.iloc[0]
    return row["seconds, median of ratios"], row["prompts timed together"]


def test_seconds_of_different_runs_are_not_compared() -> None:
    """Guards against a slow day, or another machine, that looks like a slow system."""
    lines = [
        line(prompt, system, seconds=seconds) | {"run_id": run_id}
        for prompt, day in (("a", "1"), ("b", "2"), ("c", "3"))
        for system, seconds, run_id in (
            ("N = 8", 4.0, "1" if prompt == "c" else day),
            ("branching 8/4,2", 2.0 if prompt != "c" else 99.0, day),
        )
    ]
    differences, _ = compare(lines, "r")
    seconds, together = seconds_of(differences)
    assert (seconds.value, together) == (0.5, 2)
    differences, _ = compare(lines[4:], "r")
    assert seconds_of(differences) == ("not measured together", 0)
