"""Who is asked first: everybody is in the order, and the loaded come later."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.placement import AFFINITY_WORTH, order, prefix_of
from specrej.contracts import Message, Prompt

LOADS = st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 10), max_size=6)


@given(LOADS, st.text(max_size=8), st.floats(0, 1, exclude_max=True))
def test_everybody_is_asked_once(loads: dict[str, float], prefix: str, draw: float) -> None:
    ranked = order(prefix, loads, lambda: draw)
    assert sorted(ranked) == sorted(loads)


@given(LOADS, st.text(max_size=8), st.floats(0, 1, exclude_max=True))
def test_of_the_two_choices_the_less_loaded_is_first(
    loads: dict[str, float], prefix: str, draw: float
) -> None:
    ranked = order(prefix, loads, lambda: draw)
    if len(ranked) > 1:
        assert loads[ranked[0]] <= loads[ranked[1]] + AFFINITY_WORTH


def test_equal_beginnings_meet_where_nobody_is_busy() -> None:
    """Guards against a system prompt that every generator reads for itself."""
    loads = dict.fromkeys(("a:1", "b:1", "c:1"), 0.0)
    for prefix in ("one", "another", "a third"):
        assert len({order(prefix, loads, random.random)[0] for _ in range(50)}) == 1


def test_different_beginnings_are_spread() -> None:
    """Three places, 300 prompts: fewer than 60 at one has a chance of less than 1 in 10**5."""
    loads = dict.fromkeys(("a:1", "b:1", "c:1"), 0.0)
    first = [order(str(number), loads, random.random)[0] for number in range(300)]
    assert min(first.count(address) for address in loads) > 60


def test_a_favourite_with_a_session_more_loses() -> None:
    loads = {"a:1": 0.0, "b:1": 0.0}
    favourite = order("x", loads, random.random)[0]
    loads[favourite] = 1.0
    assert order("x", loads, random.random)[0] != favourite


def test_one_place_and_none() -> None:
    assert order("x", {"a:1": 3.0}, random.random) == ["a:1"]
    assert order("x", {}, random.random) == []


def test_prompts_that_begin_alike_have_a_prefix_in_common() -> None:
    system = Message("system", "You are terse. " * 40)
    first = Prompt(messages=(system, Message("user", "one")))
    second = Prompt(messages=(system, Message("user", "two")))
    assert prefix_of(first, "salt") == prefix_of(second, "salt")
    # Tenants share no prompts, so nothing is gained where they meet.
    assert prefix_of(first, "salt") != prefix_of(first, "pepper")
