"""`specrej experiment branching`, on toys, and its comparison on made figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.branching import compare, times_fewer
from experiments.studies.statistics import Estimate
from tests.experiments.test_cli import Refusal, Run, refusal, run  # noqa: F401

FLAGS = ("--limit", "5", "--max-tokens", "64", "--rewards", "vowels", "--n", "8,16,32")


def test_missing_runs_are_added(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Guards against runs that are measured twice, and against another N for another seed."""
    out = tmp_path / "branching.jsonl"
    run("branching", *FLAGS[:1], "2", *FLAGS[2:], "--branching", "8,2", "--out", out)
    first = out.read_text().splitlines()
    with out.open("a") as file:
        file.write(first[0][:-9])  # it was stopped within a line
    result = run("branching", *FLAGS, "--branching", "8,2", "16,4", "--out", out)
    assert len(first) == 2 * 4
    assert out.read_text().splitlines()[: len(first)] == first
    assert len(out.read_text().splitlines()) == 5 * 5
    names = [row[0] for row in result["rows"]]
    assert names == ["N = 8", "N = 16", "N = 32", "branching 32/8,2", "branching 32/16,4"]
    rewards = [row[2]["value"] for row in result["rows"][:3]]
    assert rewards == sorted(rewards)


def test_runs_of_other_seeds_are_not_taken(
    refusal: Refusal,  # noqa: F811
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Guards against an old table under a new seed."""
    few = ("branching", "--limit", "1", *FLAGS[2:], "--out", tmp_path / "branching.jsonl")
    run(*few)
    assert "another prompt, sampling or model" in refusal(*few, "--seed", "9")


def figures(tokens: float, score: float) -> dict[str, np.ndarray]:
    return {"tokens": np.full(8, tokens), "score": np.full(8, score)}


@pytest.mark.parametrize(
    ("score", "ratio"), [(0.1, 1.0), (0.2, 1.0), (0.3, 2.0), (0.4, 4.0), (0.9, 4.0)]
)
def test_equal_rewards_are_compared(score: float, ratio: float) -> None:
    """Between two N rewards are linear in log tokens; beyond the last its tokens are a bound."""
    rejection = [figures(100, 0.2), figures(400, 0.4)]
    estimate = times_fewer(figures(100, score), rejection)
    assert estimate.value == pytest.approx(ratio)
    assert (estimate.low, estimate.high) == pytest.approx((ratio, ratio))


def line(prompt: str, system: str, judged: float, seconds: float = 1.0) -> dict[str, object]:
    made = {"prompt_id": prompt, "reward": "r", "system": system, "tokens": 10, "score": 1.0}
    return made | {
        **{"seconds": seconds, "answer_tokens": 5, "mean_logprob": -1.0},
        "judges": {"j": judged},
    }


def test_only_prompts_that_every_system_has_answered_count() -> None:
    """Guards against a judge's mean over other prompts than that of the reward."""
    lines = [line("a", "N = 8", 0.0), line("b", "N = 8", 9.0), line("a", "branching 8/4,2", 1.0)]
    _, table = compare(lines, "r")
    assert "1 prompts" in table.caption
    assert [row[-1] for row in table.rows] == ["j 0.000; logprob -1.000", "j 1.000; logprob -1.000"]


def test_the_order_of_the_file_does_not_count() -> None:
    """Guards a file that was continued with a smaller N: rewards met the tokens of another N."""
    made = {"N = 16": (100, 1.0), "N = 64": (400, 3.0), "branching 8/4,2": (100, 2.0)}
    lines = [
        line(prompt, system, 0.0) | {"tokens": tokens, "score": score}
        for prompt in "ab"
        for system, (tokens, score) in made.items()
    ]
    ratios = [
        {str(row[0]): str(row[5]) for row in compare(of, "r")[1].rows}
        for of in (lines, lines[::-1])
    ]
    assert ratios[0] == ratios[1]


def test_differences_are_of_equal_prompts() -> None:
    lines = [
        line(prompt, system, judged=shift + number, seconds=seconds)
        for number, prompt in enumerate("abcd")
        for system, shift, seconds in (("N = 8", 0.0, 4.0), ("branching 8/4,2", 1.0, 1.0 + number))
    ]
    differences, _ = compare(lines, "r")
    ((systems, reward, tokens, seconds, judged, logprob),) = differences.rows
    assert systems == "branching 8/4,2, N = 8"
    assert isinstance(judged, Estimate) and isinstance(seconds, Estimate)
    deviation = np.std([0, 1, 2, 3, 1, 2, 3, 4])
    assert (judged.value, judged.low, judged.high) == pytest.approx((1 / deviation,) * 3)
    assert seconds.value == pytest.approx(2.5 / 4)
    assert reward == tokens == logprob == Estimate(0.0, 0.0, 0.0)
