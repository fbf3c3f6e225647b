"""`specrej experiment`: recorded candidates under every setting."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import candidates, choose
from experiments.recorded import Answer
from experiments.statistics import Estimate
from specrej.client import cli
from specrej.contracts import FinishReason, Sampling

N, MAX_TOKENS = 16, 32
SAMPLING = Sampling(MAX_TOKENS)


def line(number: int, *, predicts: bool) -> dict[str, Any]:
    """A prompt's candidates, of 12 to 32 tokens; beginnings have the final score, or minus it."""
    rng = np.random.default_rng(number)
    answers, finals = [], [float(value) for value in rng.normal(size=N)]
    for _ in range(N):
        size = int(rng.integers(12, MAX_TOKENS + 1))
        finish = FinishReason.STOP if size < MAX_TOKENS else FinishReason.LENGTH
        tokens = tuple(b"x" for _ in range(size))
        answers.append(Answer("x" * size, tokens, (-1.0,) * size, ((),) * size, finish).to_json())
    sign = 1 if predicts else -1
    beginnings = {
        at: [
            sign * final if len(one["tokens"]) > at else None
            for final, one in zip(finals, answers, strict=True)
        ]
        for at in choose.positions_of(MAX_TOKENS)
    }
    return {"prompt": str(number), "answers": answers, "beginnings": beginnings, "finals": finals}


async def outcome(*, predicts: bool) -> dict[str, Any]:
    prompts = [choose.Recorded(line(number, predicts=predicts)) for number in range(6)]
    return await choose.evaluate(prompts, N, SAMPLING, "r")


async def test_a_reward_that_predicts_saves_tokens_and_another_one_does_not() -> None:
    """Guards against beginnings and finals that are mixed up, and advice without a lead."""
    good, bad = await outcome(predicts=True), await outcome(predicts=False)
    rows = [{row["setting"]: row for row in one["settings"]} for one in (good, bad)]
    default, best = "N = 16, alpha 0.5, first 16", "Best-of-16"
    assert rows[0][default]["reward"] == rows[0][best]["reward"] == rows[1][best]["reward"]
    assert rows[0][default]["tokens"] < 0.9 * rows[0][best]["tokens"]
    ratio = "Best-of-N's tokens at equal reward"
    expected = rows[0][best]["tokens"] / rows[0][default]["tokens"]
    assert rows[0][default][ratio].value == pytest.approx(expected, rel=1e-3)
    assert rows[0][default]["lead"].low > 0 > rows[1][default]["lead"].high
    assert {tau.value for tau in good["tau"].values()} == {1.0}
    assert {tau.value for tau in bad["tau"].values()} == {-1.0}
    assert good["recommended"].startswith("N = ") and bad["recommended"].startswith("Best-of-N")


async def test_best_of_n_is_the_maximum_of_distinct_subsets() -> None:
    prompt = choose.Recorded(line(3, predicts=False))
    value, tokens = await prompt.replayed(choose.Setting(4), SAMPLING, "r")
    parts = [prompt.finals[i : i + 4] for i in range(0, N, 4)]
    assert value == pytest.approx(np.mean([max(part) for part in parts]))
    assert tokens == sum(len(answer.tokens) for answer in prompt.answers) / 4


def test_what_no_best_of_n_reaches_is_infinite() -> None:
    costs, rewards = np.log([10.0, 20.0, 40.0]), np.array([0.0, 1.0, 2.0])
    assert choose._against("tokens", costs, rewards, (2.5, 10.0)) == math.inf
    assert choose._against("tokens", costs, rewards, (1.0, 10.0)) == pytest.approx(2)
    assert choose._against("lead", costs, rewards, (1.0, 10.0)) == pytest.approx(1)
    row = {"setting": "N = 4, alpha 0.5, first 8", "tokens": 5, "lead": Estimate(1, -0.1, 2)}
    assert choose.recommended([row]).startswith("Best-of-N")


def test_the_report_has_every_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command on recorded prompts: nothing is missing, so no service starts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": "?"}) + "\n" for n in range(4)))
    path = tmp_path / "out" / "r-embedded-16-32-1-1.jsonl.gz"
    for number in range(4):
        candidates.add(path, line(number, predicts=True))
    size = ["--n", f"{N}", "--max-tokens", f"{MAX_TOKENS}", "--reward", "r"]
    choose.main(["--prompts", str(prompts), "--out", str(tmp_path / "out"), *size])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "NaN" not in last and "Infinity" not in last
    printed = json.loads(last)
    names = [str(setting) for setting in choose.settings_of(N, MAX_TOKENS)]
    assert [row["setting"] for row in printed["settings"]] == names
    assert {one.suffix for one in (tmp_path / "out").iterdir()} == {".gz", ".svg", ".json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--prompts", "/nowhere"], "No such file"), (["--n", "65"], "must be 1 .. 64")],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        choose.main(arguments)
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_installed_wheel_refuses_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package `experiments` is in a source checkout only."""
    find_spec = importlib.util.find_spec

    def without_experiments(name: str, package: str | None = None) -> Any:
        return None if name == "experiments" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_experiments)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["experiment"])
    assert "run it in the repository" in capsys.readouterr().err
