"""`specrej experiment`, from the command to the report, on toy models."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.__main__ import by_length
from experiments.studies import BOUND, RATIO
from experiments.trajectories import load
from specrej.client import cli
from tests.experiments.conftest import Refusal, Run

SMALL = ("--limit", "4", "--n", "32", "--max-tokens", "64", "--rewards", "vowels")


@pytest.fixture
def collected(run: Run, tmp_path: Path) -> Path:
    """A collection of four prompts."""
    run("collect", "--out", tmp_path / "trajectories", *SMALL)
    return tmp_path / "trajectories"


def test_run_writes_everything(run: Run, tmp_path: Path) -> None:
    """As small as the studies allow; `recommended` has too few prompts."""
    size = ("--limit", "1", "--n", "8", "--max-tokens", "32", "--rewards", "")
    result = run("run", "--out", tmp_path, *size, "--no-branching")
    assert len(load(tmp_path / "trajectories")) == 1
    report = tmp_path / "report"
    assert "fewer than 8 prompts" in (report / "recommended.md").read_text()
    page = Path(result["report"]).read_text()
    assert "32 tokens" in page and page.count("<svg") == len([*(report / "figures").iterdir()]) > 5
    text = (report / "studies-32-tokens-likelihood.md").read_text()
    assert "model toy; 1 prompts, N = 8, at most 32 tokens, seeds 1 to 1" in text
    stored = pd.read_csv(report / "tables" / "32-tokens-likelihood-matched.csv")
    assert {RATIO, BOUND} <= {*stored.columns}


def test_specrej_becomes_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    cli.main(["experiment", "run", "--n", "8"])
    assert commands == [(sys.executable, "-m", "experiments", "run", "--n", "8")]


def test_shorter_limits_come_first(collected: Path) -> None:
    sets = by_length(load(collected), (32, 16, 64))
    assert [name for name, _ in sets] == ["16 tokens", "32 tokens", "64 tokens"]
    assert sets[0][1][0].max_tokens == 16


def test_installed_wheel_refuses_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package `experiments` is in a source checkout only."""
    find_spec = importlib.util.find_spec

    def without_experiments(name: str, package: str | None = None) -> Any:
        return None if name == "experiments" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_experiments)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["experiment", "run"])
    assert "run this command in the repository" in capsys.readouterr().err


def test_a_setting_is_replayed(run: Run, collected: Path) -> None:
    """With its regret, and Kendall's tau at its decision tokens."""
    source = ("--trajectories", collected, "--reward", "vowels")
    command = ("replay", *source, "--alpha", 0.75, "--schedule", "tokens:8,16")
    replayed, alone = run(*command), run(*command, "--reward-alone")
    assert replayed["setting"] == "N=32, alpha 0.75, tokens:8,16"
    assert {*replayed["correlation"]} == {"8", "16"}
    assert all(-1 <= tau["value"] <= 1 for tau in replayed["correlation"].values())
    assert len(replayed["prompts"]) == 4
    assert replayed["regret"]["value"] == sum(p["regret"] for p in replayed["prompts"]) / 4
    assert all(prompt["rounds"][0][0] == 8 for prompt in replayed["prompts"])
    for by_order, by_reward in zip(replayed["prompts"], alone["prompts"], strict=True):
        assert by_reward["score"] == by_reward["highest score"] == by_order["highest score"]
        assert by_order["complete"] == "yes" or by_order["score"] == by_reward["score"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "--rewards", "unknown"], "no such reward: unknown; available: vowels"),
        (["collect", "--grid", "8,99"], "the grid must end at max_tokens, 128"),
        (["collect", "--prompts", "/nowhere"], "No such file"),
        (["branching", "--rewards", ","], "--rewards must name a reward"),
        (["run", "--lengths", "8,31,256"], "--lengths [31, 256]: not of the grid, 8, 10, "),
        (["replay", "--trajectories", "/nowhere"], "holds no trajectories yet"),
    ],
)
def test_error_is_one_line(
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(*arguments)
    assert message in line and "\n" not in line


def test_invalid_schedule_is_refused_with_the_syntax(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("replay", "--schedule", "sometimes")
    assert "use memory:16 (first), geometric:16,2" in capsys.readouterr().err
