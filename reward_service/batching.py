"""Plans forward passes: whose sequences share one, and how they are padded.

Pure: knows no model, no tensor and no text's meaning; standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item", bound=Hashable)
TokenIds = Sequence[int]


class Task(Protocol):
    """Gives out pieces of so many tokens, in order; 0 when there are none left."""

    @property
    def next_tokens(self) -> int: ...
    def take(self) -> Any: ...


def take_fairly(
    tasks: Sequence[Task], token_budget: int, given: list[int] | None = None
) -> list[Any]:
    """Pieces for one forward pass, of at most `token_budget` tokens; a larger one goes alone.

    The next piece is always of the task that was given the fewest tokens, the earlier one of
    equals. With `given`, what each was given in earlier passes, to which this one is added: a task
    that does not fit into this pass is the first in the next.
    """
    pieces: list[Any] = []
    given = [0] * len(tasks) if given is None else given
    in_pass = 0
    while waiting := [index for index, task in enumerate(tasks) if task.next_tokens]:
        index = min(waiting, key=given.__getitem__)
        num_tokens = tasks[index].next_tokens
        if pieces and in_pass + num_tokens > token_budget:
            break
        in_pass += num_tokens
        given[index] += num_tokens
        pieces.append(tasks[index].take())
    return pieces


def distinct(items: Sequence[Item]) -> tuple[list[Item], list[int]]:
    """Every different item once, in order of appearance, and each item's index among them."""
    places: dict[Item, int] = {}
    where = [places.setdefault(item, len(places)) for item in items]
    return list(places), where


def plan(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of `lengths` in micro-batches, longest first.

    A micro-batch has at most `token_budget` tokens, padding included; only a sequence that is
    longer than the budget travels over it, alone. Sequences share a micro-batch only within one
    power of two of length, so that less than half of it is padding.
    """
    batches: list[list[int]] = []
    width = 0  # tokens of the current micro-batch's first, longest sequence
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        shares = width and _bucket(length) == _bucket(width)
        if shares and (len(batches[-1]) + 1) * width <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = length
    return batches


def pad(rows: Sequence[TokenIds], fill: int = 0) -> list[list[int]]:
    """Rows of one width, filled up on the right."""
    width = max(len(row) for row in rows)
    return [[*row, *[fill] * (width - len(row))] for row in rows]


def _bucket(length: int) -> int:
    return (length - 1).bit_length()  # 1, 2, 3-4, 5-8, 9-16, ...
