"""Clients that read slowly or not at all: nothing waits for them but their own calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrej.contracts import CacheControl, Schedule
from specrej.security import TENANT_METADATA
from tests.faults.case import Case, case
from tests.faults.world import MAX_RUNNING, UNREAD_S, Call, Outcome, World, until

_TOKENS = 80
# A round per token: events that are more than a narrow connection buffers.
LARGE: dict[str, Any] = {
    "n": 64,
    "alpha": 0.0,
    "max_tokens": _TOKENS,
    "schedule": Schedule("tokens", tokens=tuple(range(1, _TOKENS))),
    "timeout_s": 60,
}
_STREAM: dict[str, Any] = {"stream": True, "narrow": True, **LARGE}
_NEVER_S = 3600.0
_NUM_FOLLOWERS = 3
_BOUND_S = 60.0


async def unread(world: World) -> list[str]:
    """Twice as many streams as may run are not read: all run to their end, another tenant is
    served meanwhile, and each call ends with the reason."""
    num_ended = _num_unread(world)
    running = [_unread_call(world, seed) for seed in range(MAX_RUNNING)]
    await world.until_service(lambda service: service.running == MAX_RUNNING)
    waiting = [_unread_call(world, MAX_RUNNING + seed) for seed in range(MAX_RUNNING)]
    other = await world.generate(metadata=[(TENANT_METADATA, "other")], timeout_s=_BOUND_S)
    assert other.label == "OK", other.label
    # The connection of a call whose status is not read for some seconds is shut: so each half is
    # read when it has ended.
    outcomes = await _ends(world, running, num_ended + MAX_RUNNING)
    outcomes += await _ends(world, waiting, num_ended + 2 * MAX_RUNNING)
    texts = {outcome.error.details() for outcome in outcomes if outcome.error}
    assert texts == {f"the client did not read for {UNREAD_S:g} s"}, texts
    return [outcome.label for outcome in outcomes]


def _unread_call(world: World, seed: int) -> Call:
    return world.call(**_STREAM, pause_s=_NEVER_S, seed=seed)


async def _ends(world: World, calls: Sequence[Call], num_ended: int) -> list[Outcome]:
    """What the calls read once `num_ended` streams have ended."""
    await until(lambda: _num_unread(world) >= num_ended, bound_s=_BOUND_S)
    for call in calls:
        assert not call.is_over
        call.resume()
    return [await call.outcome() for call in calls]


async def slow_leader(world: World) -> list[str]:
    """Requests equal to that of a client that reads slowly have its answer before it does, from the
    same run."""
    options: dict[str, Any] = {"cache": CacheControl.USE, "seed": 3}
    leader = world.call(**_STREAM, **options, pause_s=0.3)
    await leader.begin()
    followers = [world.call(**LARGE, **options) for _ in range(_NUM_FOLLOWERS)]
    outcomes = [await call.outcome() for call in followers]
    answers = [outcome.generation for outcome in outcomes if outcome.generation]
    assert len(answers) == _NUM_FOLLOWERS, [outcome.label for outcome in outcomes]
    assert all(answer.cached for answer in answers), "an equal request ran"
    assert not leader.is_over and len(leader.events) < _TOKENS, "the case did not occur"
    leader.resume()
    outcome = await leader.outcome()
    assert outcome.generation and not outcome.generation.cached, "the leader waited"
    return [outcome.label]


def _num_unread(world: World) -> int:
    """Streams that have ended because they were not read, from the log of requests."""
    lines = (world.stack.log_dir / "orchestrator.log").read_text().splitlines()
    return sum("code=CANCELLED" in line and "source=run" in line for line in lines)


CASES: tuple[Case, ...] = (
    case("readers/unread", unread, f"CANCELLED x {2 * MAX_RUNNING}", limit_s=3 * _BOUND_S),
    case("readers/leader-crawls", slow_leader, "OK", limit_s=2 * _BOUND_S, fast=True),
)
