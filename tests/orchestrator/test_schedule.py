"""Where rounds end."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.schedule import next_decision_token
from specrej.contracts import Schedule


def _all(schedule: Schedule, max_tokens: int) -> list[int]:
    tokens, ends = 0, []
    while tokens < max_tokens:
        tokens = next_decision_token(schedule, tokens, max_tokens)
        ends.append(tokens)
    return ends


def test_memory_plans_nothing_but_the_end() -> None:
    assert _all(Schedule("memory"), 100) == [100]


def test_explicit_tokens_then_the_end() -> None:
    assert _all(Schedule("tokens", tokens=(5, 20, 60)), 100) == [5, 20, 60, 100]
    assert _all(Schedule("tokens", tokens=(5, 200)), 100) == [5, 100]


def test_geometric_doubles() -> None:
    assert _all(Schedule("geometric", first=16, factor=2.0), 128) == [16, 32, 64, 128]
    assert _all(Schedule("geometric", first=16, factor=2.0), 10) == [10]


def test_a_factor_close_to_one_never_repeats_a_token() -> None:
    """floor(1.1**i) stays 1 for long: without skipping, rounds of no tokens would follow."""
    ends = _all(Schedule("geometric", first=1, factor=1.1), 30)
    assert ends[0] == 1
    assert all(later > earlier for earlier, later in itertools.pairwise(ends))


@given(
    st.integers(1, 10**6),
    st.floats(1.001, 16),
    st.integers(0, 5000),
    st.integers(1, 5000),
)
def test_always_ahead_and_never_beyond_the_end(
    first: int, factor: float, num_tokens: int, room: int
) -> None:
    """Progress: each round makes at least a token, none passes max_tokens."""
    max_tokens = num_tokens + room
    schedule = Schedule("geometric", first=first, factor=factor)
    assert num_tokens < next_decision_token(schedule, num_tokens, max_tokens) <= max_tokens
