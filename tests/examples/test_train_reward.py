"""A reward trained by TRL and PEFT, small, on the embedded backbone; then served."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from reward_service.kinds.classifier import load_classifier
from reward_service.reward import score
from reward_service.specs import ClassifierSpec, Resources
from specrej.contracts import Prompt
from tests.examples.conftest import EXAMPLES

ROOT = EXAMPLES.parent
PYTHON = ROOT / ".trl" / "bin" / "python"
GOOD, BAD = "The answer is {}, of course.", "No idea, go away!"


@pytest.mark.long
@pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not installed: make trl")
def test_the_trained_reward_is_served_and_prefers_the_chosen_answer(tmp_path: Path) -> None:
    """Guards the format of pairs, adapters that are not merged, and another token to read."""
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "reward"
    lines = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} plus one?"}],
            "chosen": [{"role": "assistant", "content": GOOD.format(number + 1)}],
            "rejected": [{"role": "assistant", "content": BAD}],
            "score_chosen": 0.5,  # other fields are allowed
        }
        for number in range(10)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    program = [PYTHON, EXAMPLES / "train_reward" / "train_reward.py", pairs, out]
    few = ["--held-out", "4", "--rank", "4", "--batch", "2", "--epochs", "2"]
    done = subprocess.run(
        [*program, *few, "--learning-rate", "1e-3"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    before, after = measured["before"], measured["after"]
    assert after["accuracy"] == 1.0
    assert after["loss"] < 0.5 * before["loss"]

    reward = load_classifier(ClassifierSpec(name="mine", directory=out), Resources())
    answers = [GOOD.format(8), BAD]
    chosen, rejected = score(reward, Prompt.from_user("What is 7 plus one?"), answers).values
    assert chosen - rejected > (before["margin"] + after["margin"]) / 2
