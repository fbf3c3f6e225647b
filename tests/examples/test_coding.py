"""The reward of the example, by the reward service: its files fit each other."""

from __future__ import annotations

import pytest

from deploy.local.stack import Stack
from specrej import Client, Prompt
from tests.programs import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="session")

HERE = ROOT / "examples/coding"
TASK = Prompt.from_user((HERE / "task.md").read_text())
RIGHT = "```python\ndef largest(numbers):\n    return max(numbers, default=None)\n```\nIt uses max."
HALF = "```\ndef largest(numbers):\n    return numbers[0]\n```"
WRONG = "```python\ndef largest(numbers):\n    return 0\n```"


async def test_the_score_is_the_share_of_hidden_tests_that_pass(toys: Stack) -> None:
    async with Client(toys.orchestrator_address, timeout_s=60) as client:
        scores = await client.score(
            TASK,
            [RIGHT, HALF, WRONG, "No."],
            reward="unit-tests",
            data=(HERE / "tests.json").read_text(),
        )
    assert scores.values == pytest.approx((1, 0.25, 0, 0))
