"""What of a sequence is known, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_service.prefixes import common, match

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_common_is_the_longest_equal_beginning(first: list[int], second: list[int]) -> None:
    length = common(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


@given(TOKENS, TOKENS, TOKENS, st.data())
def test_what_is_known_is_what_is_there(
    token_ids: list[int], prompt: list[int], own: list[int], data: st.DataObject
) -> None:
    """Guards against keys and values of other tokens."""
    shared = data.draw(st.integers(0, len(prompt)))
    found = match(token_ids, prompt, shared, own)
    chain = [*prompt[: found.shared], *own[: found.own]]
    assert chain == token_ids[: found.total]
    assert not found.own or found.shared == shared
    if not found.own and not own:
        assert found.shared == common(token_ids, prompt)
    position = data.draw(st.integers(0, len(token_ids)))
    before = found.before(position)
    assert before.total == min(found.total, position)
    assert before.shared <= found.shared
    assert not before.own or before.shared == found.shared
