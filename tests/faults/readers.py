"""A client that reads slowly: no other call waits for it."""

from __future__ import annotations

from typing import Any

from specrej.contracts import CacheControl, Schedule
from tests.faults.case import Case, case
from tests.faults.world import World

_TOKENS = 80
# A round per token: events that are more than a narrow connection buffers.
_LARGE: dict[str, Any] = {
    "n": 64,
    "alpha": 0.0,
    "max_tokens": _TOKENS,
    "schedule": Schedule("tokens", tokens=tuple(range(1, _TOKENS))),
    "timeout_s": 60,
}
_STREAM: dict[str, Any] = {"stream": True, "narrow": True, **_LARGE}
_NUM_FOLLOWERS = 3


async def slow_leader(world: World) -> list[str]:
    """Requests equal to that of a client that reads slowly have its answer before it does, from the
    same run."""
    options: dict[str, Any] = {"cache": CacheControl.USE, "seed": 3}
    leader = world.call(**_STREAM, **options, pause_s=0.3)
    await leader.begin()
    followers = [world.call(**_LARGE, **options) for _ in range(_NUM_FOLLOWERS)]
    outcomes = [await call.outcome() for call in followers]
    answers = [outcome.generation for outcome in outcomes if outcome.generation]
    assert len(answers) == _NUM_FOLLOWERS, [outcome.label for outcome in outcomes]
    assert all(answer.cached for answer in answers), "an equal request ran"
    assert not leader.is_over and len(leader.events) < _TOKENS, "the case did not occur"
    leader.resume()
    outcome = await leader.outcome()
    assert outcome.generation and not outcome.generation.cached, "the leader waited"
    return [outcome.label]


CASES: tuple[Case, ...] = (
    case("readers/leader-crawls", slow_leader, "OK", limit_s=120, fast=True),
)
