"""`specrej experiment`, from the command to the report, on the toys that ship."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import live, replay_speed
from experiments.__main__ import main
from experiments.everything import by_length
from experiments.replay import Replayer
from experiments.trajectories import Store, Trajectories, load
from specrej.contracts import Generation

TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy",
    "SPECREJ_REWARD_REWARDS": '[{"name": "vowels", "kind": "toy"}]',
}
SMALL = ("--limit", "4", "--n", "32", "--max-tokens", "64", "--rewards", "vowels")


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Instead of the embedded models."""
    for name, value in TOYS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def said(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> dict[str, Any]:
    """The last line of a command, which is one JSON object."""
    toys.setattr(sys, "argv", ["experiments", *map(str, arguments)])
    main()
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


@pytest.fixture
def collected(toys: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A collection of four prompts."""
    directory = tmp_path / "trajectories"
    toys.setattr(sys, "argv", ["experiments", "collect", "--out", str(directory), *SMALL])
    main()
    return directory


def test_one_command_makes_everything_and_goes_on(tmp_path: Path) -> None:
    """By `specrej`, which hands over; the second start writes no prompt twice, but one more."""
    command = (sys.executable, "-m", "specrej.cli", "experiment", "run", "--out", str(tmp_path))
    environment = os.environ | TOYS

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (*command, *SMALL, "--lengths", "32", *more),
            env=environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    first = run()
    assert first.returncode == 0, first.stderr
    assert "[4/4]" in first.stderr
    names = {path.name for path in tmp_path.iterdir()}
    for reward in ("vowels", "likelihood"):
        assert {f"sweep-{reward}.jsonl", f"sweep-{reward}.csv", f"policy-{reward}.json"} <= names
    assert "64 tokens" in (tmp_path / "report" / "report.html").read_text()
    before = (tmp_path / "trajectories" / "trajectories.jsonl").read_bytes()
    second = run("--limit", "5")
    assert second.returncode == 0, second.stderr
    assert "[1/1]" in second.stderr
    after = (tmp_path / "trajectories" / "trajectories.jsonl").read_bytes()
    assert after.startswith(before)
    assert len(load(tmp_path / "trajectories")) == 5
    other = run("--seed", "9")
    assert other.returncode == 1
    assert other.stderr == (
        "specrej experiment: holds a collection with other settings: choose another directory\n"
    )


def test_settings_are_replayed_swept_and_recommended(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    source = ("--trajectories", collected, "--reward", "vowels")
    found = said(toys, capsys, "replay", *source, "--alpha", 0.75, "--schedule", "tokens:8,16")
    assert found["setting"] == "N=32, alpha 0.75, tokens:8,16"
    assert len(found["prompts"]) == 4
    assert all(prompt["rounds"][0][0] == 8 for prompt in found["prompts"])
    path = collected.parent / "sweep.jsonl"
    swept = said(toys, capsys, "sweep", *source, "--out", path)
    assert swept["prompts"] == 4
    assert swept["settings"] == len(path.read_text().splitlines())
    dear = said(toys, capsys, "recommend", "--sweep", path, "--regret", 0.0001)
    cheap = said(toys, capsys, "recommend", "--sweep", path, "--regret", 0.7)
    assert dear["tokens"][0] > cheap["tokens"][0]
    bounded = said(toys, capsys, "recommend", "--sweep", path, "--tokens", dear["tokens"][0])
    assert bounded["regret"][0] <= cheap["regret"][0]


def test_the_policy_is_compared(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    path = collected.parent / "policy.json"
    found = said(
        toys, capsys,
        "policy", "--trajectories", collected, "--n", 16, "--schedule", "tokens:8,16",
        "--out", path,
    )  # fmt: skip
    assert [row["policy"] for row in found["best"]] == ["risk", "price"]
    assert all(isinstance(row["wins"], bool) for row in found["best"])
    kept = json.loads(path.read_text())
    assert (kept["reward"], kept["n"], kept["max_tokens"]) == ("likelihood", 16, 64)
    assert all({"cost", "regret", "gain_low"} <= row.keys() for row in kept["rows"])


def test_live_requests_are_as_their_replays_say(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    path = collected.parent / "live.json"
    found = said(
        toys, capsys,
        "live", "--trajectories", collected, "--limit", 2, "--n", "4,16", "--out", path,
    )  # fmt: skip
    assert found["runs"] == 2 * 2 * 4  # prompts, rewards, settings
    assert found["as_replayed"] == found["replayed"] == found["runs"]
    runs = json.loads(path.read_text())["runs"]
    assert {run["algorithm"] for run in runs} == {"best-of-n", "speculative-rejection"}
    assert all(run["seconds"] > 0 for run in runs)


def test_live_goes_on_with_the_runs_that_miss(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    """Guards against a run that is cut off and loses all that it has timed."""
    path = collected.parent / "live.json"
    command = ("live", "--trajectories", collected, "--limit", 1, "--n", "4", "--out", path)
    answered = live._answered

    async def dies(kept: Trajectories, *rest: Any) -> Generation:
        if path.exists() and len(json.loads(path.read_text())["runs"]) == 3:
            raise ValueError("cut off")
        return await answered(kept, *rest)

    with toys.context() as while_it_dies:
        while_it_dies.setattr(live, "_answered", dies)
        with pytest.raises(SystemExit):
            said(while_it_dies, capsys, *command)
    before = json.loads(path.read_text())["runs"]
    assert len(before) == 3
    assert said(toys, capsys, *command)["runs"] == 4
    assert json.loads(path.read_text())["runs"][:3] == before
    # Another schedule is another run; another collection belongs in another file.
    assert said(toys, capsys, *command, "--schedule", "geometric:8,2")["runs"] == 6
    head = collected / "trajectories.jsonl"
    head.write_text(head.read_text().replace('"date": "', '"date": "not ', 1))
    with pytest.raises(SystemExit):
        said(toys, capsys, *command)
    assert "choose another file" in capsys.readouterr().err


def test_memory_driven_requests_are_as_their_replays_say(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    """In slots that are too few for Best-of-N, which is left out."""
    path = collected.parent / "live.json"
    command = (
        *("live", "--trajectories", collected, "--limit", 1, "--n", "32", "--out", path),
        *("--schedule", "memory"),
    )
    with pytest.raises(SystemExit):
        said(toys, capsys, *command)
    assert "needs --kv-slots" in capsys.readouterr().err
    found = said(toys, capsys, *command, "--kv-slots", 600)
    runs = {run["reward"]: run for run in json.loads(path.read_text())["runs"]}
    assert {run["schedule"] for run in runs.values()} == {"memory of 600 slots"}
    assert runs["likelihood"]["as_replayed"]
    assert found["runs"] == 2


def test_a_collection_by_other_models_is_not_timed_against(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], collected: Path
) -> None:
    path = collected / "trajectories.jsonl"
    path.write_text(path.read_text().replace('"generator": "toy-40"', '"generator": "other"'))
    assert Store(collected).head() is not None
    with pytest.raises(SystemExit) as ended:
        said(toys, capsys, "live", "--trajectories", collected)
    assert ended.value.code == 1
    assert "other models" in capsys.readouterr().err


def test_shorter_limits_come_first_and_the_whole_last(collected: Path) -> None:
    sets = by_length(load(collected), (32, 16, 64))
    assert [name for name, _ in sets] == ["16 tokens", "32 tokens", "64 tokens"]
    assert sets[0][1][0].max_tokens == 16


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["collect", "--rewards", "unknown"], "no such reward: unknown; there are vowels"),
        (["collect", "--grid", "8,99"], "the grid must end at 128"),
        (["collect", "--prompts", "/nowhere"], "No such file"),
        (["sweep", "--trajectories", "/nowhere"], "holds no trajectories yet"),
        (["recommend", "--sweep", "/nowhere", "--regret", "1"], "No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    toys: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    why: str,
) -> None:
    toys.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        said(toys, capsys, *arguments)
    assert ended.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert why in lines[0]


def test_a_schedule_that_is_none_is_bad_usage(
    toys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        said(toys, capsys, "replay", "--schedule", "sometimes")
    assert ended.value.code == 2
    assert "use memory, geometric:16,2" in capsys.readouterr().err


def test_the_speed_of_replays_is_told_of_what_was_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--n", "16", "--max-tokens", "32", "--prompts", "2", "--settings", "12")
    monkeypatch.setattr(sys, "argv", ["replay_speed", *sizes])
    replay_speed.main()
    table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert table.startswith("12 settings x 2 prompts: ")
    asked = {"settings": 12, "prompts": 2, "n": 16, "max_tokens": 32}
    assert found | asked == found
    settings = replay_speed.chosen(12, 16, 32)
    assert {each.n for each in settings} == {16}
    replayer = Replayer(replay_speed.made_up(16, 32, 0), settings[0].reward)
    rounds = [len(replayer.run(each).rounds) for each in settings]
    assert found["rounds_per_request"] == round(sum(rounds) / 12, 2)
    assert found["seconds"] >= 0
    assert found["cores"]
