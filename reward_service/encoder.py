"""Encoder rewards: many short sequences, read whole, padded within one power of two of length.

What `relevance` and `cross_encoder` have in common: a batch's sequences are items that forward
passes of any sessions share, and equal ones are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reward_service.batching import TokenIds, distinct, pad, plan
from specrej.contracts import Scores

# From padded ids, their mask and their types, each [rows, width], to a vector per row [rows, n].
Encode = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False, slots=True)
class Item:
    """One sequence, and what comes out of it once it is computed."""

    token_ids: TokenIds
    types: TokenIds
    result: Tensor | None = None


@dataclass(eq=False, slots=True)
class EncoderTask:
    """A batch on its way; `judge` makes scores of the results, one per sequence asked for."""

    items: Sequence[Item]
    where: Sequence[int]
    judge: Callable[[list[Tensor]], list[float]]
    _taken: int = field(default=0, init=False)

    @property
    def next_tokens(self) -> int:
        left = self._taken < len(self.items)
        return len(self.items[self._taken].token_ids) if left else 0

    def take(self) -> Item:
        self._taken += 1
        return self.items[self._taken - 1]

    def scores(self) -> Scores:
        results = [item.result for item in self.items if item.result is not None]
        values = self.judge([results[place] for place in self.where])
        return Scores(tuple(values), sum(len(item.token_ids) for item in self.items))


def make_task(
    encodings: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    judge: Callable[[list[Tensor]], list[float]],
) -> EncoderTask:
    """Of (token ids, types) per sequence; longest first, as neighbours share a pass."""
    unique, where = distinct(encodings)
    order = sorted(range(len(unique)), key=lambda index: -len(unique[index][0]))
    place = {index: rank for rank, index in enumerate(order)}
    items = [Item(*unique[index]) for index in order]
    return EncoderTask(items, [place[index] for index in where], judge)


@torch.inference_mode()
def compute(items: Sequence[Item], token_budget: int, device: str, encode: Encode) -> None:
    """In micro-batches of at most `token_budget` tokens, padding included."""
    for indices in plan([len(item.token_ids) for item in items], token_budget):
        rows = [items[index] for index in indices]
        ids = pad([row.token_ids for row in rows])
        mask = pad([[1] * len(row.token_ids) for row in rows])
        types = pad([row.types for row in rows])
        results = encode(*(torch.tensor(each, device=device) for each in (ids, mask, types)))
        for row, result in zip(rows, results, strict=True):
            row.result = result
