"""The tensors behind the slots: one prompt's keys and values once, and its candidates' suffixes.

All live candidates of a session have the same suffix length, so a suffix store is dense and needs
no padding: per layer [rows, kv_heads, tokens, head_dim], the first `live` rows in use. It is
independent of sessions, shares and sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot holds."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one token across all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def empty(self, *size: int) -> Tensor:
        return torch.empty(*size, self.head_dim, dtype=self.dtype, device=self.device)


class PromptKV:
    """Keys and values of some prompt tokens, shared by candidates and sessions.

    Per layer [kv_heads, tokens, d].
    """

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self._shape = shape
        self.num_tokens = num_tokens
        self.keys = [shape.empty(shape.kv_heads, num_tokens) for _ in range(shape.layers)]
        self.values = [shape.empty(shape.kv_heads, num_tokens) for _ in range(shape.layers)]

    @property
    def num_bytes(self) -> int:
        """What is really allocated."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def head(self, count: int) -> PromptKV:
        """The first `count` tokens, in the same memory."""
        if count == self.num_tokens:
            return self
        view = PromptKV(self._shape, 0)
        view.num_tokens = count
        view.keys = [key[:, :count] for key in self.keys]
        view.values = [value[:, :count] for value in self.values]
        return view

    def grown(self, num_tokens: int, filled: int) -> PromptKV:
        """A store with room for `num_tokens` tokens, the first `filled` copied from this one."""
        store = PromptKV(self._shape, num_tokens)
        for layer in range(len(store.keys)):
            keys, values = self.keys[layer][:, :filled], self.values[layer][:, :filled]
            store.write(layer, 0, keys, values)
        return store

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store a chunk, each [kv_heads, chunk, d], at positions start ..."""
        end = start + keys.shape[1]
        self.keys[layer][:, start:end] = keys
        self.values[layer][:, start:end] = values

    def split(self, at: int) -> tuple[PromptKV, PromptKV]:
        """The first `at` tokens and the rest, copied layer by layer; gives up this store.

        Layers for which there is no memory stay where they are: both parts are views of them.
        """
        front, rest = PromptKV(self._shape, 0), PromptKV(self._shape, 0)
        front.num_tokens, rest.num_tokens = at, self.num_tokens - at
        for layer in range(self._shape.layers):
            whole = self.keys[layer], self.values[layer]
            fronts, rests = [kv[:, :at] for kv in whole], [kv[:, at:] for kv in whole]
            with suppress(MemoryError, RuntimeError):
                fronts, rests = [kv.clone() for kv in fronts], [kv.clone() for kv in rests]
            front.keys[layer], front.values[layer] = fronts
            rest.keys[layer], rest.values[layer] = rests
            self.keys[layer], self.values[layer] = fronts  # frees the whole layer
        return front, rest


class SuffixKV:
    """Keys and values of the candidates' own tokens.

    `length` tokens are stored per live row; the store has room for `tokens_room` of them.
    """

    def __init__(self, shape: KVShape, rows: int) -> None:
        self._shape = shape
        self.live = rows
        self.length = 0
        self.tokens_room = 0
        empty = [torch.empty(0, dtype=shape.dtype, device=shape.device)] * shape.layers
        self._keys: list[Tensor] = list(empty)
        self._values: list[Tensor] = list(empty)

    @property
    def num_bytes(self) -> int:
        """What is really allocated."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def keys(self, layer: int) -> Tensor:
        """[rows, kv_heads, tokens_room, d]; the first `live` rows and `length` tokens are set."""
        return self._view(self._keys[layer], self.tokens_room)

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self._view(self._values[layer], self.tokens_room)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the next token of every live row, [live, kv_heads, d]; `advance` makes it count."""
        self.keys(layer)[: self.live, :, self.length] = keys
        self.values(layer)[: self.live, :, self.length] = values

    def advance(self) -> None:
        """All layers have written the next token."""
        self.length += 1

    def reserve(self, tokens_room: int, slots: int = 0) -> None:
        """Make room for `tokens_room` tokens per live row: layer by layer, in place if it fits.

        A layer that is too small moves to a tensor of at least `slots`, so that it moves only once.
        """
        self._move(tokens_room, slots=slots)

    def keep(self, rows: Sequence[int], slots: int) -> None:
        """Make some live rows the only ones, in this order; a repeated row is copied.

        Takes the extra memory of one layer. If the rows do not fit into the store, it also grows:
        to at most `slots`, or to what the stored tokens need.
        """
        tokens_room = self.tokens_room
        if len(rows) * tokens_room * self._slot_numbers > self._keys[0].numel():
            tokens_room = min(tokens_room, max(self.length, slots // len(rows)))
        self._move(tokens_room, rows)

    def drop(self, row: int) -> None:
        """Free one live row: the last live row moves into its place."""
        last = self.live - 1
        for flat in (*self._keys, *self._values) if row != last else ():
            view = self._view(flat, self.tokens_room)
            view[row, :, : self.length] = view[last, :, : self.length]
        self.live = last

    def shrink(self, slots: int) -> None:
        """Return memory beyond `slots` to the allocator, one layer at a time."""
        if self._keys[0].numel() > slots * self._slot_numbers:
            tokens_room = min(self.tokens_room, slots // self.live) if self.live else 0
            self._move(tokens_room, is_fresh=True)

    def _move(
        self,
        tokens_room: int,
        only: Sequence[int] | None = None,
        *,
        slots: int = 0,
        is_fresh: bool = False,
    ) -> None:
        """Lay all layers out for the live rows, or `only` these, of `tokens_room` tokens each: one
        layer after the other, in place unless it is too small or `is_fresh`."""
        count = self.live if only is None else len(only)
        rows: slice | Tensor = slice(None)
        if only is not None:
            rows = torch.tensor(only, dtype=torch.long, device=self._shape.device)
        for store in (self._keys, self._values):
            for layer, flat in enumerate(store):
                kept = self._stored(flat)[rows]
                if is_fresh or count * tokens_room * self._slot_numbers > flat.numel():
                    num_slots = max(slots, count * tokens_room)
                    store[layer] = self._shape.empty(num_slots, self._shape.kv_heads).view(-1)
                elif only is None:
                    kept = kept.clone()  # its new place overlaps it
                if count and self.length:  # else nothing is copied, and the shapes may differ
                    self._view(store[layer], tokens_room)[:count, :, : self.length] = kept
                del kept  # its memory is for the next layer
        self.live, self.tokens_room = count, tokens_room

    @property
    def _slot_numbers(self) -> int:
        """Numbers of one token's keys in one layer."""
        return self._shape.kv_heads * self._shape.head_dim

    def _stored(self, flat: Tensor) -> Tensor:
        return self._view(flat, self.tokens_room)[: self.live, :, : self.length]

    def _view(self, flat: Tensor, tokens_room: int) -> Tensor:
        heads, dim = self._shape.kv_heads, self._shape.head_dim
        rows = flat.numel() // (heads * tokens_room * dim) if tokens_room else self.live
        used = flat[: rows * heads * tokens_room * dim]
        return used.view(rows, heads, tokens_room, dim)
