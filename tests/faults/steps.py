"""Steps that fail for one session among several, and hangs anywhere outside of a forward pass.

On real engines with tiny models, in separate worlds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from specrej.contracts import Schedule
from tests.faults.breaks import FAILS, HANGS_IN, HANGS_IN_REWARD
from tests.faults.case import Case, here
from tests.faults.engines import BreakableStack, engine_world, reader_world, until_replaced
from tests.faults.world import Outcome, World

_LIMIT_S = 180.0
_HANGS_LIMIT_S = 600.0
_STUCK_S = "1"
# Long enough to be under way when another session fails.
_BYSTANDER: Mapping[str, Any] = {"n": 3, "max_tokens": 400, "logprobs": True, "timeout_s": 60}
_NUM_BYSTANDERS = 3
_CULPRIT: Mapping[str, Any] = {"n": 4, "max_tokens": 400, "timeout_s": 60}
_HANGING: Mapping[str, Any] = {
    "n": 4,
    "max_tokens": 400,
    "schedule": Schedule("tokens", tokens=(4, 40)),
}


class _RewardStack(BreakableStack):
    modules: ClassVar = {**BreakableStack.modules, "reward": "tests.faults.broken_reward"}


def _candidates(outcome: Outcome) -> Any:
    assert outcome.generation, f"a bystander ends with {outcome.code}"
    return outcome.generation.candidates


async def one_session_fails(text: str, _: World) -> list[str]:
    """The session that makes a step fail fails; the others of the step have the tokens,
    log-probabilities and scores of a run without it."""
    async with engine_world() as running:
        prompts = [f"Bystander {number}" for number in range(_NUM_BYSTANDERS)]
        alone = [_candidates(await running.generate(prompt=p, **_BYSTANDER)) for p in prompts]
        before = running.stack.processes["generator"]
        calls = [running.call(prompt=prompt, stream=True, **_BYSTANDER) for prompt in prompts]
        await asyncio.gather(*(call.begin() for call in calls))
        culprit = await running.generate(prompt=f"This one {text}", **_CULPRIT)
        assert not any(call.is_over for call in calls), "no step was shared"
        outcomes = [await call.outcome() for call in calls]
        assert culprit.code == "INTERNAL", culprit.code
        assert [_candidates(outcome) for outcome in outcomes] == alone
        await running.settle()
        assert running.stack.processes["generator"] == before, "the generator was restarted"
        return [culprit.label, *(outcome.label for outcome in outcomes)]


async def generator_hangs(_: World) -> list[str]:
    """Wherever the engine's thread or a tokenizer hangs, the process is replaced."""
    async with engine_world(SPECREJ_GENERATOR_STUCK_S=_STUCK_S) as running:
        return [await _replaced(running, "generator", f"This one {text}") for text in HANGS_IN]


async def reward_hangs(_: World) -> list[str]:
    """If a reward's thread hangs between two passes, the process is replaced."""
    async with reader_world(_RewardStack, SPECREJ_REWARD_STUCK_S=_STUCK_S) as running:
        return [await _replaced(running, "reward", f"This one {HANGS_IN_REWARD}")]


async def _replaced(running: World, name: str, prompt: str) -> str:
    before = running.stack.processes[name]
    code = (await running.generate(prompt=prompt, **_HANGING, timeout_s=5)).code
    await until_replaced(running, name, before)
    return code


_LOST = "DEADLINE_EXCEEDED|UNAVAILABLE"
CASES: tuple[Case, ...] = (
    *(
        here(
            f"faults/step-raises/for-one-that-{text.replace(' ', '-')}",
            partial(one_session_fails, text),
            *("INTERNAL", f"OK x {_NUM_BYSTANDERS}"),
            limit_s=_LIMIT_S,
        )
        for text in FAILS
    ),
    here(
        "faults/hangs/generator",
        generator_hangs,
        f"{_LOST} x {len(HANGS_IN)}",
        limit_s=_HANGS_LIMIT_S,
    ),
    here("faults/hangs/reward", reward_hangs, _LOST, limit_s=_LIMIT_S),
)
