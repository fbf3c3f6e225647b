"""Micro-batch planning: nothing lost, nothing twice, never over budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_service.batching import distinct, in_micro_batches, pad, plan

LENGTHS = st.lists(st.integers(1, 600), max_size=80)
BUDGETS = st.integers(1, 4096)


@given(LENGTHS, BUDGETS)
def test_every_sequence_is_in_exactly_one_micro_batch(lengths: list[int], budget: int) -> None:
    """Guards against a score that is missing or belongs to another text."""
    planned = [index for batch in plan(lengths, budget) for index in batch]
    assert sorted(planned) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_padded_tokens_stay_within_budget(lengths: list[int], budget: int) -> None:
    """Guards against out of memory: rows times width counts, not the sum of lengths."""
    for batch in plan(lengths, budget):
        width = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * width <= budget


@given(LENGTHS, BUDGETS)
def test_less_than_half_of_a_micro_batch_is_padding(lengths: list[int], budget: int) -> None:
    """Guards against one long text making all short ones as dear as itself."""
    for batch in plan(lengths, budget):
        width = max(lengths[index] for index in batch)
        assert 2 * sum(lengths[index] for index in batch) > len(batch) * width


@given(st.integers(1, 600), st.integers(1, 80), BUDGETS)
def test_equal_lengths_need_as_few_micro_batches_as_fit(
    length: int, count: int, budget: int
) -> None:
    """Guards against a plan that is always legal because everything travels alone."""
    rows = max(1, budget // length)
    assert len(plan([length] * count, budget)) == -(-count // rows)


@given(st.lists(st.text(max_size=3), max_size=40))
def test_distinct_texts_can_be_put_back(texts: list[str]) -> None:
    unique, where = distinct(texts)
    assert len(set(unique)) == len(unique)
    assert [unique[index] for index in where] == texts


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), max_size=40), BUDGETS)
def test_results_come_back_in_order(sequences: list[list[int]], budget: int) -> None:
    """Guards against scores in the plan's order, longest first."""
    results = in_micro_batches(sequences, budget, lambda rows: [tuple(row) for row in rows])
    assert results == [tuple(sequence) for sequence in sequences]


def test_too_few_results_of_a_micro_batch_are_noticed() -> None:
    """Guards against a silent shift of all later scores."""
    with pytest.raises(ValueError, match="zip"):
        in_micro_batches([[1], [2]], 8, lambda rows: [0] * (len(rows) - 1))


def test_rows_are_padded_on_the_right() -> None:
    assert pad([[1, 2, 3], [4]], fill=9) == [[1, 2, 3], [4, 9, 9]]
