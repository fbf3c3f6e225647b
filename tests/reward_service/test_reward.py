"""Pieces of a pass, distinct texts, and matches of token lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_service.reward import Task, distinct, take_fairly
from specrej.contracts import Scores
from specrej_models.token_prefix import common_length, match


@given(st.lists(st.text("ab", max_size=3), max_size=40))
def test_distinct_texts_can_be_put_back(texts: list[str]) -> None:
    unique, where = distinct(texts)
    assert len(set(unique)) == len(unique)
    assert [unique[index] for index in where] == texts


TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_common_length_is_that_of_the_longest_equal_beginning(
    first: list[int], second: list[int]
) -> None:
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


@given(TOKENS, TOKENS, TOKENS, st.data())
def test_matched_tokens_are_those_of_the_text(
    token_ids: list[int], prompt: list[int], own: list[int], data: st.DataObject
) -> None:
    """Guards against keys and values of other tokens."""
    shared = data.draw(st.integers(0, len(prompt)))
    from_prompt, total = match(token_ids, prompt, shared, own)
    computed = [*prompt[:from_prompt], *own[: total - from_prompt]]
    assert computed == token_ids[:total]
    assert total == from_prompt or from_prompt == shared
    if not own:
        assert from_prompt == total == common_length(token_ids, prompt)


class Pieces(Task):
    """A task with pieces of these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        super().__init__(
            [(size, (self, i)) for i, size in enumerate(sizes)], lambda taken: Scores((), taken)
        )


@given(st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=6), st.integers(1, 200))
def test_passes_take_every_piece_once_in_order_within_budget(
    sizes: list[list[int]], budget: int
) -> None:
    """The first pass is shared evenly: no task receives a piece more than a waiting one."""
    tasks = [Pieces(of_task) for of_task in sizes]
    taken: list[tuple[Pieces, int]] = []
    while pieces := take_fairly(tasks, budget):
        total = sum(task.sizes[i] for task, i in pieces)
        assert total <= budget or len(pieces) == 1
        if not taken:
            tokens = [sum(task.sizes[i] for own, i in pieces if own is task) for task in tasks]
            waiting = [n for n, task in zip(tokens, tasks, strict=True) if task.next_tokens]
            assert not waiting or max(tokens) - min(waiting) <= 40
        taken += pieces
    for task in tasks:
        assert [i for owner, i in taken if owner is task] == list(range(len(task.sizes)))
        assert task.scores().computed_tokens == sum(task.sizes)
