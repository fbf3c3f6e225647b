"""The order in which backends are tried: all of them, the less loaded first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.placement import AFFINITY_WORTH, Ring, order, prefix_of
from specrej.contracts import Message, Prompt

LOADS = st.lists(st.floats(0, 10), min_size=1, max_size=6)
ADDRESSES = [f"10.0.0.{number}:1" for number in range(20)]


def favourites(addresses: Sequence[str]) -> list[str]:
    """Of each of 2,000 prefixes."""
    ring = Ring({address: address for address in addresses})
    return [next(ring.after(str(number))) for number in range(2000)]


@given(LOADS, st.data(), st.floats(0, 1, exclude_max=True))
def test_every_backend_is_tried_once_and_the_less_loaded_choice_first(
    loads: list[float], data: st.DataObject, draw: float
) -> None:
    favourite = data.draw(st.sampled_from(range(len(loads))))
    ranked = [*order(favourite, range(len(loads)), loads.__getitem__, lambda: draw)]
    assert sorted(ranked) == [*range(len(loads))]
    assert favourite in ranked[:2]
    if len(ranked) > 1:
        assert loads[ranked[0]] <= loads[ranked[1]] + AFFINITY_WORTH
        assert ranked[0] == favourite or loads[ranked[0]] + AFFINITY_WORTH < loads[favourite]


def test_loads_of_the_others_are_computed_only_if_the_first_two_fail() -> None:
    """Guards against a choice that costs as much as there are backends."""
    loads: Counter[int] = Counter()
    ranked = order(7, range(1000), lambda member: loads.update([member]) or 0.0, random.random)
    assert len({*islice(ranked, 2)}) == len(loads) == 2
    assert len([*ranked]) == 998


def test_prefixes_are_spread_and_stay_where_they_are() -> None:
    """Guards against prompts that all backends compute anew because one of them has changed."""
    all_but_one, of_all = favourites(ADDRESSES[1:]), favourites(ADDRESSES)
    assert max(Counter(of_all).values()) < 3 * min(Counter(of_all).values())
    moved = {after for after, before in zip(of_all, all_but_one, strict=True) if after != before}
    assert moved == {ADDRESSES[0]}
    assert {*Ring({address: address for address in ADDRESSES}).after("a")} == {*ADDRESSES}


def test_prompts_share_a_prefix_within_their_tenant() -> None:
    system = Message("system", "You are terse. " * 40)
    first = Prompt(messages=(system, Message("user", "one")))
    second = Prompt(messages=(system, Message("user", "two")))
    assert prefix_of(first, "salt") == prefix_of(second, "salt")
    # Tenants share no prompts, so their meeting would gain nothing.
    assert prefix_of(first, "salt") != prefix_of(first, "pepper")
