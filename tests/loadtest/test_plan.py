"""What a sweep sends, and how long that should take."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtest.sweep.plan import Block, Condition, block_s, calibration_ns, expected_s, plan
from loadtest.sweep.settings import ALGORITHMS, Settings
from specrej.contracts import Algorithm
from tests.loadtest.sweeps import COSTS

FULL = Algorithm.BEST_OF_N


@pytest.mark.parametrize("minutes", [1, 20, 40, 80])
def test_more_minutes_more_requests_and_never_more_than_fit(minutes: float) -> None:
    """Guards a run time that can be foreseen; below the least there is, it is the least."""
    settings = Settings(minutes=minutes)
    least = expected_s(plan(replace(settings, minutes=0), COSTS), settings, COSTS)
    blocks = plan(settings, COSTS)
    assert expected_s(blocks, settings, COSTS) <= max(minutes * 60, least)
    more = plan(replace(settings, minutes=2 * minutes), COSTS)
    assert sum(b.num_requests for b in more) >= sum(b.num_requests for b in blocks)


def test_nothing_is_left_out() -> None:
    settings = Settings(minutes=0)
    keys = [block.key for block in plan(settings, COSTS)]
    assert len(set(keys)) == len(keys) == 3 * 3 * 2 * len(settings.ns)


def test_algorithms_follow_each_other_in_turns() -> None:
    """Guards against an order by which a drift of the machine looks like an algorithm's."""
    blocks = plan(Settings(), COSTS)
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    for one, other in pairs:
        assert replace(one, algorithm=other.algorithm) == other
        assert {one.algorithm, other.algorithm} == set(ALGORITHMS)
    first = sum(one.algorithm is FULL for one, _ in pairs)
    assert abs(first - len(pairs) / 2) <= 3
    assert [one.n for one, _ in pairs] != sorted(one.n for one, _ in pairs)


def test_costs_in_between_and_beyond() -> None:
    assert COSTS.of(FULL, 16) == 2.2
    assert 2.2 < COSTS.of(FULL, 32) < 8.0
    assert COSTS.of(FULL, 256) == pytest.approx(32.0)


def test_a_block_takes_what_its_requests_take() -> None:
    settings = Settings(rate=0.5, patience_s=15)

    def seconds(condition: Condition, n: int, k: int) -> float:
        return block_s(Block(0, condition, FULL, n, k), settings, COSTS)

    assert seconds(Condition.ALONE, 64, 3) == pytest.approx(24.0)
    assert seconds(Condition.SATURATED, 64, 4) == pytest.approx(2 * COSTS.of(FULL, 128))
    assert seconds(Condition.STEADY, 1, 4) == pytest.approx(8 + COSTS.of(FULL, 1))
    # Beyond capacity, users give up.
    assert seconds(Condition.STEADY, 256, 4) == pytest.approx(8 + 15)


def test_users_at_saturation() -> None:
    settings = Settings()
    assert [settings.users(n) for n in (1, 16, 32, 64, 256)] == [8, 8, 4, 2, 2]


def test_costs_are_measured_where_it_is_cheap() -> None:
    assert calibration_ns((1, 2, 4, 8, 16, 32, 64, 128, 256)) == [1, 4, 16, 64]
    assert calibration_ns((1, 4)) == [1, 4]
    assert calibration_ns((128, 256)) == [128]


def test_settings_come_back_as_they_were() -> None:
    settings = Settings(ns=(1, 2), prompts=("a", "b"))
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
