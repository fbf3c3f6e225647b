"""`specrej experiment`, from the command to the report, on toy models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.branching import read_runs
from experiments.studies import BOUND, RATIO
from specrej.client import cli
from tests.experiments.conftest import Run


def test_run_writes_everything(run: Run, tmp_path: Path) -> None:
    """As small as the studies allow; `recommended` has too few prompts. Then one setting is
    replayed, with its regret, and Kendall's tau at its decision tokens."""
    size = ("--limit", 1, "--n", 16, "--max-tokens", 32, "--rewards", "vowels")
    forks = ("--rejection", "8,16", "--branching", "8,2")
    result = run("run", "--out", tmp_path, *size, *forks)
    assert len(read_runs(tmp_path / "branching.jsonl")) == 3
    report = tmp_path / "report"
    assert "fewer than 8 prompts" in (report / "recommended.md").read_text()
    page = Path(result["report"]).read_text()
    assert "32 tokens" in page and page.count("<img") == len([*(report / "figures").iterdir()]) > 5
    text = (report / "studies-32-tokens-likelihood.md").read_text()
    assert "model toy; 1 prompts, N = 16, at most 32 tokens, seeds 1 to 1" in text
    stored = pd.read_csv(report / "tables" / "32-tokens-likelihood-matched.csv")
    assert {RATIO, BOUND} <= {*stored.columns}
    source = ("--trajectories", tmp_path / "trajectories", "--reward", "vowels")
    replayed = run("replay", *source, "--alpha", 0.75, "--schedule", "tokens:8,16")
    assert replayed["setting"] == "N=16, alpha 0.75, tokens:8,16"
    assert {*replayed["correlation"]} == {"8", "16"}
    assert all(-1 <= tau["value"] <= 1 for tau in replayed["correlation"].values())
    (prompt,) = replayed["prompts"]
    assert replayed["regret"]["value"] == prompt["regret"] >= 0
    assert [at for at, _ in prompt["rounds"][:2]] == [8, 16]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--rewards", "unknown"], "no such reward: unknown; available: vowels"),
        (["run", "--grid", "8,99"], "the grid must end at max_tokens, 128"),
        (["run", "--prompts", "/nowhere"], "No such file"),
        (["branching", "--rewards", ","], "--rewards must name a reward"),
        (["run", "--lengths", "8,31,256"], "--lengths [31, 256]: not of the grid, 8, 10, "),
        (["replay", "--trajectories", "/nowhere"], "holds no trajectories yet"),
    ],
)
def test_error_is_one_line(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        run(*arguments)
    line = capsys.readouterr().err.strip()
    assert message in line and "\n" not in line
