"""The order in which backends are tried: all of them, the less loaded first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.placement import AFFINITY_WORTH, order, prefix_of
from specrej.contracts import Message, Prompt

LOADS = st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0, 10), max_size=6)
IDLE = dict.fromkeys(("a:1", "b:1", "c:1"), 0.0)


@given(LOADS, st.text(max_size=8), st.floats(0, 1, exclude_max=True))
def test_every_backend_is_tried_once_and_the_less_loaded_choice_first(
    loads: dict[str, float], prefix: str, draw: float
) -> None:
    ranked = order(prefix, loads, lambda: draw)
    assert sorted(ranked) == sorted(loads)
    if len(ranked) > 1:
        assert loads[ranked[0]] <= loads[ranked[1]] + AFFINITY_WORTH


def test_equal_prefixes_meet_at_one_idle_backend() -> None:
    """Guards against a system prompt that every generator computes."""
    for prefix in ("one", "another", "a third"):
        assert len({order(prefix, IDLE, random.random)[0] for _ in range(50)}) == 1


def test_different_prefixes_are_spread() -> None:
    """Of 300 prefixes fewer than 60 reach one of three backends with a chance below 1 in 10**5."""
    first = [order(str(number), IDLE, random.random)[0] for number in range(300)]
    assert min(first.count(address) for address in IDLE) > 60


def test_prompts_share_a_prefix_within_their_tenant() -> None:
    system = Message("system", "You are terse. " * 40)
    first = Prompt(messages=(system, Message("user", "one")))
    second = Prompt(messages=(system, Message("user", "two")))
    assert prefix_of(first, "salt") == prefix_of(second, "salt")
    # Tenants share no prompts, so their meeting would gain nothing.
    assert prefix_of(first, "salt") != prefix_of(first, "pepper")
