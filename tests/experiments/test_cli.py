"""`specrej experiment`, from the command to the report, on toy models."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import live
from experiments.__main__ import main
from experiments.commands import by_length
from experiments.json_lines import read_lines
from experiments.trajectories import Trajectories, load
from specrej.client import cli
from specrej.contracts import Generation
from tests.experiments.conftest import Refusal, Run

SMALL = ("--limit", "4", "--n", "32", "--max-tokens", "64", "--rewards", "vowels")


@pytest.fixture
def collected(run: Run, tmp_path: Path) -> Path:
    """A collection of four prompts."""
    run("collect", "--out", tmp_path / "trajectories", *SMALL)
    return tmp_path / "trajectories"


@pytest.mark.usefixtures("run", "undrawn")
def test_run_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As small as the studies allow."""
    size = ("--limit", "1", "--n", "8", "--max-tokens", "32", "--lengths", "24")
    command = ("experiments", "run", "--out", str(tmp_path), *size, "--rewards", "vowels")
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert "[1/1]" in capsys.readouterr().err
    assert len(load(tmp_path / "trajectories")) == 1
    assert (tmp_path / "report" / "recommended.csv").exists()
    page = (tmp_path / "report" / "report.html").read_text()
    assert "24 tokens" in page and "32 tokens" in page


def test_specrej_becomes_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    cli.main(["experiment", "run", "--n", "8"])
    assert commands == [(sys.executable, "-m", "experiments", "run", "--n", "8")]


def test_shorter_limits_come_first(collected: Path) -> None:
    sets = by_length(load(collected), (32, 16, 64))
    assert [name for name, _ in sets] == ["16 tokens", "32 tokens", "64 tokens"]
    assert sets[0][1][0].max_tokens == 16


def test_collect_adds_missing_prompts_to_equal_settings(
    collected: Path, run: Run, refusal: Refusal
) -> None:
    before = (collected / "trajectories.jsonl").read_bytes()
    run("collect", "--out", collected, *SMALL, "--limit", 5)
    assert (collected / "trajectories.jsonl").read_bytes().startswith(before)
    assert len(load(collected)) == 5
    assert refusal("collect", "--out", collected, *SMALL, "--seed", 9) == (
        "specrej experiment: the directory holds a collection with other settings: choose another"
    )


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


def test_settings_are_replayed_and_recommended(run: Run, collected: Path) -> None:
    source = ("--trajectories", collected, "--reward", "vowels")
    command = ("replay", *source, "--alpha", 0.75, "--schedule", "tokens:8,16")
    replayed, alone = run(*command), run(*command, "--reward-alone")
    assert replayed["setting"] == "N=32, alpha 0.75, tokens:8,16"
    assert len(replayed["prompts"]) == 4
    assert all(prompt["rounds"][0][0] == 8 for prompt in replayed["prompts"])
    for by_order, by_reward in zip(replayed["prompts"], alone["prompts"], strict=True):
        assert by_reward["score"] == by_reward["highest score"] == by_order["highest score"]
        assert by_order["complete"] == "yes" or by_order["score"] == by_reward["score"]
    for flags in ((), ("--reward-alone",)):
        result = run("recommend", *source, *flags)
        # Four prompts are too few for a recommendation.
        assert (result["recommended"], result["reason"][:12]) == ("Best-of-N", "fewer than 8")
        value, low, high = result["default_ahead_of_best_of_n"]
        assert low <= value <= high


def test_live_requests_equal_their_replays(run: Run, collected: Path) -> None:
    path = collected.parent / "live.jsonl"
    command = ("live", "--trajectories", collected, "--n", "4,16", "--out", path)
    result = run(*command, "--limit", 2)
    assert result["runs"] == 2 * 2 * 4  # prompts, rewards, settings
    assert result["as_replayed"] == result["replayed"] == result["runs"]
    runs = read_lines(path)[1:]
    assert {run["algorithm"] for run in runs} == {"best-of-n", "speculative-rejection"}
    assert all(run["seconds"] > 0 for run in runs)
    assert run(*command, "--limit", 0)["runs"] == 4 * 2 * 4  # all prompts


def test_live_resumes_with_missing_runs(
    run: Run, refusal: Refusal, collected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an interruption that loses the runs timed before."""
    path = collected.parent / "live.jsonl"
    command = ("live", "--trajectories", collected, "--limit", 1, "--n", "4", "--out", path)
    answer = live._answer

    async def fail_after_three(prompt: Trajectories, *rest: Any) -> Generation:
        if len(read_lines(path)) == 1 + 3:
            raise ValueError("cut off")
        return await answer(prompt, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(live, "_answer", fail_after_three)
        assert "cut off" in refusal(*command)
    before = read_lines(path)
    assert len(before) == 1 + 3
    with path.open("a") as file:
        file.write('{"prompt_id": "00')  # the fourth was cut off within its line
    assert run(*command)["runs"] == 4
    assert read_lines(path)[: 1 + 3] == before
    # Another schedule is another run; another collection needs another file and its own models.
    assert run(*command, "--schedule", "geometric:8,2")["runs"] == 6
    head = collected / "trajectories.jsonl"
    head.write_text(head.read_text().replace('"date": "', '"date": "not ', 1))
    assert "choose another file" in refusal(*command)
    head.write_text(head.read_text().replace('"generator": "toy-40"', '"generator": "other"'))
    other = ("--trajectories", collected, "--out", collected / "other.jsonl")
    assert "not those of the collection" in refusal("live", *other)


def test_live_memory_schedule_needs_slots(run: Run, refusal: Refusal, collected: Path) -> None:
    """The slots are too few for Best-of-N, which is left out."""
    path = collected.parent / "live.jsonl"
    command = (
        *("live", "--trajectories", collected, "--limit", 1, "--n", "32", "--out", path),
        *("--schedule", "memory"),
    )
    assert "needs --kv-slots" in refusal(*command)
    result = run(*command, "--kv-slots", 600)
    runs = {run["reward"]: run for run in read_lines(path)[1:]}
    assert {run["schedule"] for run in runs.values()} == {"memory:16, 600 slots"}
    assert runs["likelihood"]["as_replayed"]
    assert result["runs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "--rewards", "unknown"], "no such reward: unknown; available: vowels"),
        (["collect", "--grid", "8,99"], "the grid must end at max_tokens, 128"),
        (["collect", "--prompts", "/nowhere"], "No such file"),
        (["collect", "--chunk", "0"], "--chunk must be at least 1"),
        (["run", "--lengths", "8,31,256"], "--lengths [31, 256]: not of the grid, 8, 10, "),
        (["recommend", "--trajectories", "/nowhere"], "holds no trajectories yet"),
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


@pytest.mark.parametrize("numbers", ["x", "0", "8,", "-1"])
def test_other_numbers_of_candidates_are_refused(
    run: Run, capsys: pytest.CaptureFixture[str], numbers: str
) -> None:
    """Guards against live requests with N left open, which no replay equals."""
    with pytest.raises(SystemExit):
        run("live", f"--n={numbers}")
    assert "--n: must be numbers of 1 or more, separated by commas" in capsys.readouterr().err
