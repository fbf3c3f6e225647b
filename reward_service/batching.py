"""Plans micro-batches: which token sequences share a forward pass, and how they are padded.

Pure: knows no model, no tensor and no text's meaning; standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
TokenIds = Sequence[int]


def distinct(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """Every different text once, in order of appearance, and each text's index among them."""
    places: dict[str, int] = {}
    where = [places.setdefault(text, len(places)) for text in texts]
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


def in_micro_batches(
    sequences: Sequence[TokenIds],
    token_budget: int,
    forward: Callable[[Sequence[TokenIds]], Sequence[T]],
) -> list[T]:
    """`forward` of every sequence, in order, called with one planned micro-batch at a time."""
    results: dict[int, T] = {}
    for indices in plan([len(sequence) for sequence in sequences], token_budget):
        outputs = forward([sequences[index] for index in indices])
        results.update(zip(indices, outputs, strict=True))
    return [results[index] for index in range(len(sequences))]


def _bucket(length: int) -> int:
    return (length - 1).bit_length()  # 1, 2, 3-4, 5-8, 9-16, ...
