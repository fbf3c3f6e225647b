"""Decision tokens: where rounds end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop.schedule import most_rounds, next_decision_token
from specrej.contracts import Schedule


@pytest.mark.parametrize(
    ("schedule", "max_tokens", "decision_tokens"),
    [
        (Schedule("memory"), 100, [100]),
        (Schedule("tokens", tokens=(5, 20, 60)), 100, [5, 20, 60, 100]),
        (Schedule("tokens", tokens=(5, 200)), 100, [5, 100]),
        (Schedule(first=16, factor=2.0), 128, [16, 32, 64, 128]),
        (Schedule(first=16, factor=2.0), 10, [10]),
        # floor(1.1**i) stays 1 for long: repeated tokens would be rounds of no tokens.
        (Schedule(first=1, factor=1.1), 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_decision_tokens_of_each_kind_of_schedule(
    schedule: Schedule, max_tokens: int, decision_tokens: list[int]
) -> None:
    tokens = [next_decision_token(schedule, 0, max_tokens)]
    for _ in range(max_tokens):
        if tokens[-1] < max_tokens:
            tokens.append(next_decision_token(schedule, tokens[-1], max_tokens))
    assert tokens == decision_tokens
    assert len(tokens) == most_rounds(schedule, max_tokens)


@given(st.integers(1, 10**6), st.floats(1.001, 16), st.integers(1, 300))
def test_a_geometric_schedule_has_no_empty_rounds_and_no_more_than_it_is_charged_for(
    first: int, factor: float, max_tokens: int
) -> None:
    schedule = Schedule(first=first, factor=factor)
    num_tokens = num_rounds = 0
    while num_tokens < max_tokens:
        until = next_decision_token(schedule, num_tokens, max_tokens)
        assert num_tokens < until <= max_tokens
        num_tokens, num_rounds = until, num_rounds + 1
    assert num_rounds <= most_rounds(schedule, max_tokens)
