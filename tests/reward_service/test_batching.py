"""Micro-batch planning: nothing lost, nothing twice, never over budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_service.batching import distinct, pad, plan, take_fairly

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


class Pieces:
    """A task with pieces of these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.taken = 0

    @property
    def next_tokens(self) -> int:
        return self.sizes[self.taken] if self.taken < len(self.sizes) else 0

    def take(self) -> tuple[Pieces, int]:
        self.taken += 1
        return self, self.taken - 1


TASKS = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=6)


@given(TASKS, st.integers(1, 200))
def test_passes_take_every_piece_once_in_order_within_budget(
    sizes: list[list[int]], budget: int
) -> None:
    """Guards against a piece computed before what it is built on, twice, or never."""
    tasks = [Pieces(each) for each in sizes]
    order: dict[Pieces, list[int]] = {task: [] for task in tasks}
    while pieces := take_fairly(tasks, budget):
        assert len(pieces) == 1 or sum(task.sizes[i] for task, i in pieces) <= budget
        for task, index in pieces:
            order[task].append(index)
    assert all(order[task] == list(range(len(task.sizes))) for task in tasks)


@given(TASKS, st.integers(1, 200))
def test_a_pass_is_shared_evenly(sizes: list[list[int]], budget: int) -> None:
    """Guards a small batch against a large one: neither gets a piece more than the other."""
    tasks = [Pieces(each) for each in sizes]
    pieces = take_fairly(tasks, budget)
    given_ = [sum(task.sizes[i] for owner, i in pieces if owner is task) for task in tasks]
    waiting = [got for got, task in zip(given_, tasks, strict=True) if task.next_tokens]
    if waiting:
        assert max(given_) - min(waiting) <= 40


@given(st.integers(1, 12), st.integers(1, 20), st.integers(1, 64))
def test_a_small_task_behind_large_ones_is_done_soon(
    num_large: int, size: int, budget: int
) -> None:
    """Guards a small batch against any number of large ones that came before it."""
    tasks = [Pieces([size] * 100) for _ in range(num_large)]
    given_ = [0] * num_large
    take_fairly(tasks, budget, given_)
    small = Pieces([1])
    tasks, given_ = [*tasks, small], [*given_, min(given_)]
    passes = 0
    while small.next_tokens:
        assert take_fairly(tasks, budget, given_)
        passes += 1
    # At worst every large one is first given a piece.
    assert passes <= num_large + 1


def test_rows_are_padded_on_the_right() -> None:
    assert pad([[1, 2, 3], [4]], fill=9) == [[1, 2, 3], [4, 9, 9]]
