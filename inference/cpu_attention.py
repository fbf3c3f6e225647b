"""Decode attention on a CPU: one compiled call per layer for all rows of all sessions.

Prepares what `cpu_kernels.attention` reads, from the segments of one forward pass. Long prompts
meet their many rows in dense products before and after it, the rest happens inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference import cpu_kernels as kernels
from inference.attention import DecodeSegment, Scaling, Segment
from inference.cpu_jobs import Job
from inference.kv import KVShape, PromptKV, SuffixKV

Words = NDArray[np.int64]
QKV = tuple[Tensor, Tensor, Tensor]

# Products of a prompt's tokens with its rows from which on a dense product is faster.
_DENSE_FROM = 10_000


def decoder(shape: KVShape, heads: int, segments: Sequence[Segment]) -> CPUDecoder:
    """For the decode rows of one forward pass, of which there may be none."""
    batch, start = [], 0
    for segment in segments:
        if isinstance(segment, DecodeSegment):
            batch.append(Rows(start, segment))
        start += segment.num_rows
    return CPUDecoder(shape, heads, batch)


@dataclass(frozen=True, slots=True)
class Rows:
    """One session's rows in a forward pass, from row `start` on."""

    start: int
    segment: DecodeSegment

    @property
    def suffix(self) -> SuffixKV:
        return self.segment.suffix


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of one piece of a prompt that a query sees; never none."""

    piece: PromptKV
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _View:
    """What the rows of one session see: parts of the prompt, then their own tokens."""

    rows: Rows
    parts: tuple[_Part, ...]
    first_own: int
    products: Tensor | None  # [kv_heads, rows * group, tokens] where dense products are worth it

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)


class CPUDecoder:
    """Attention of one forward pass's decode rows; made anew for each."""

    def __init__(self, shape: KVShape, heads: int, batch: Sequence[Rows]) -> None:
        self._shape = shape
        self._heads = heads
        self._batch = batch
        self._num_rows = sum(rows.suffix.live for rows in batch)
        self._job = Job(kernels.JOB_WORDS)
        self._plans: dict[Scaling, _Plan] = {}

    def attend(self, layer: int, qkv: QKV, output: Tensor, scaled: Scaling) -> None:
        """Store the rows' keys and values, write their attention to `output` [R, heads, d].

        qkv: [heads, R, d], [kv_heads, R, d], [kv_heads, R, d]; any strides but the last.
        """
        if not self._batch:
            return
        plan = self._plan(scaled)
        for view in plan.dense:
            _multiply(view, layer, qkv[0])
        self._job.words[:] = self.words([layer], qkv, output, scaled)[0]
        kernels.attention.run_filled(self._job, self.work(scaled))
        for view in plan.dense:
            _add_values(view, layer, output)

    def is_one_job(self, rows: int, scaled: Scaling) -> bool:
        """Whether the attention of a pass's `rows` rows is one compiled job and nothing beside."""
        return rows == self._num_rows and not self._plan(scaled).dense

    def work(self, scaled: Scaling) -> int:
        """Multiplications in one layer."""
        return 2 * self._plan(scaled).tokens * self._heads * self._shape.head_dim

    def words(self, layers: Sequence[int], qkv: QKV, output: Tensor, scaled: Scaling) -> Words:
        """The words of the attention's job in each of these layers, [layers, JOB_WORDS]."""
        plan, shape = self._plan(scaled), self._shape
        words = np.zeros((len(layers), kernels.JOB_WORDS), np.int64)
        same: list[int] = []
        for tensor in qkv:
            heads, rows, last = tensor.stride()
            assert last == 1
            same += [tensor.data_ptr(), rows, heads]
        same += [output.data_ptr(), self._heads, shape.kv_heads, shape.head_dim, plan.longest]
        words[:, kernels.QUERY :] = same
        words[:, kernels.CHUNKS : kernels.SEGMENTS] = plan.chunks, plan.reals.ctypes.data
        words[:, kernels.NUM_SEGMENTS] = len(plan.views)
        for word, table in ((kernels.SEGMENTS, plan.segments), (kernels.PARTS, plan.parts)):
            words[:, word] = table.ctypes.data + table.strides[0] * np.asarray(layers)
        return words

    def _plan(self, scaled: Scaling) -> _Plan:
        if scaled not in self._plans:
            views = [_view(rows, scaled.window, self._shape, self._heads) for rows in self._batch]
            self._plans[scaled] = _Plan(views, self._shape, scaled)
        return self._plans[scaled]


class _Plan:
    """The kernel's tables for all layers that see the same tokens in the same way."""

    def __init__(self, views: Sequence[_View], shape: KVShape, scaled: Scaling) -> None:
        self.views = views
        self.reals = np.array([scaled.scale, scaled.softcap or 0.0], np.float32)
        self.dense = [view for view in views if view.products is not None]
        rows = sum(view.rows.suffix.live for view in views)
        self.chunks = -(-rows // kernels.CHUNK_ROWS)
        seen = [view.tokens + view.rows.suffix.length + 1 - view.first_own for view in views]
        self.longest = max(seen)
        self.tokens = sum(
            view.rows.suffix.live * count for view, count in zip(views, seen, strict=True)
        )
        layers = shape.layers
        num_parts = sum(len(view.parts) for view in views)
        self.segments: Words = np.zeros((layers, len(views), kernels.SEGMENT_WORDS), np.int64)
        self.parts: Words = np.zeros((layers, max(1, num_parts), kernels.PART_WORDS), np.int64)
        at = 0
        for number, view in enumerate(views):
            self.segments[:, number] = _segment(view, at)
            suffix = view.rows.suffix
            self.segments[:, number, kernels.OWN_KEYS] = suffix.key_addresses()
            self.segments[:, number, kernels.OWN_VALUES] = suffix.value_addresses()
            for part in view.parts:
                self.parts[:, at, : kernels.KEYS] = part.piece.num_tokens, part.first, part.count
                self.parts[:, at, kernels.KEYS] = [key.data_ptr() for key in part.piece.keys]
                self.parts[:, at, kernels.VALUES] = [v.data_ptr() for v in part.piece.values]
                at += 1


def _segment(view: _View, part: int) -> list[int]:
    """A segment's words; the addresses of its own store are filled in per layer."""
    suffix = view.rows.suffix
    words = [0] * kernels.SEGMENT_WORDS
    words[kernels.ROW], words[kernels.ROWS] = view.rows.start, suffix.live
    words[kernels.LENGTH], words[kernels.ROOM] = suffix.length + 1, suffix.tokens_room
    words[kernels.FIRST_OWN] = view.first_own
    words[kernels.PART], words[kernels.NUM_PARTS] = part, len(view.parts)
    words[kernels.TOKENS] = view.tokens
    words[kernels.SHARED] = 0 if view.products is None else view.products.data_ptr()
    return words


def _view(rows: Rows, window: int | None, shape: KVShape, heads: int) -> _View:
    pieces, first_own = rows.segment.seen(window)
    parts = tuple(_Part(piece, first, piece.num_tokens - first) for piece, first in pieces)
    tokens = sum(part.count for part in parts)
    products = None
    if rows.suffix.live * tokens >= _DENSE_FROM:
        group_rows = rows.suffix.live * heads // shape.kv_heads
        products = torch.empty(shape.kv_heads, group_rows, tokens)
    return _View(rows, parts, first_own, products)


def _multiply(view: _View, layer: int, query: Tensor) -> None:
    """Products of all rows with all the prompt's tokens they see."""
    products = view.products
    assert products is not None
    heads, live = query.shape[0], view.rows.suffix.live
    kv_heads = products.shape[0]
    mine = query[:, view.rows.start : view.rows.start + live]
    by_head = mine.view(kv_heads, heads // kv_heads, live, -1).transpose(1, 2)
    by_head = by_head.reshape(kv_heads, -1, query.shape[-1])
    at = 0
    for part in view.parts:
        keys = part.piece.keys[layer][:, part.first :].transpose(1, 2)
        if part.count == products.shape[-1]:
            torch.bmm(by_head, keys, out=products)
        else:
            products[..., at : at + part.count] = torch.bmm(by_head, keys)
        at += part.count


def _add_values(view: _View, layer: int, output: Tensor) -> None:
    """Add the prompt's part; weights have taken the products' place."""
    weights = view.products
    assert weights is not None
    kv_heads, live = weights.shape[0], view.rows.suffix.live
    at = 0
    mine = output[view.rows.start : view.rows.start + live].view(
        live, kv_heads, -1, output.shape[-1]
    )
    for part in view.parts:
        values = part.piece.values[layer][:, part.first :]
        mixed = torch.bmm(weights[..., at : at + part.count], values)
        mine += mixed.view(kv_heads, live, -1, output.shape[-1]).transpose(0, 1)
        at += part.count
