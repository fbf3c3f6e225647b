"""Attention on a CPU: one compiled call per layer for all rows of all sessions.

Prepares what `cpu_kernels.attention` reads, from the segments of one forward pass. A row's is
computed in the same way whoever else is there: no bit of what a candidate says depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference import cpu_kernels as kernels
from inference import cpu_words as at
from inference.attention import DecodeSegment, PrefillSegment, Scaling, Segment
from inference.cpu_jobs import Job
from inference.cpu_rows import row_panels
from inference.cpu_tiles import PANEL
from inference.kv import KVShape, PromptKV, SuffixKV

Words = NDArray[np.int64]
QKV = tuple[Tensor, Tensor, Tensor]


def decoder(shape: KVShape, heads: int, segments: Sequence[Segment]) -> CPUAttention:
    """For all rows of one forward pass."""
    batch, prompts, start = [], [], 0
    for segment in segments:
        if isinstance(segment, DecodeSegment):
            batch.append(Rows(start, segment))
        else:
            prompts.append(PromptRows(start, segment))
        start += segment.num_rows
    return CPUAttention(shape, heads, batch, prompts)


@dataclass(frozen=True, slots=True)
class Rows:
    """One session's rows in a forward pass, from row `start` on."""

    start: int
    segment: DecodeSegment

    @property
    def suffix(self) -> SuffixKV:
        return self.segment.suffix


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Some tokens of a prompt in a forward pass, from row `start` on."""

    start: int
    segment: PrefillSegment


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens of one piece of a prompt that a query sees; never none."""

    piece: PromptKV
    first: int
    count: int

    @property
    def room(self) -> int:
        """Tokens of the store that its tensors are, or are views of."""
        return _room(self.piece)


@dataclass(frozen=True, slots=True)
class _View:
    """What the rows of one session see: parts of the prompt, then their own tokens."""

    rows: Rows
    parts: tuple[_Part, ...]
    first_own: int

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def seen(self) -> int:
        """Tokens that a row sees, its own included."""
        return self.tokens + self.rows.suffix.length + 1 - self.first_own


@dataclass(frozen=True, slots=True)
class _Chain:
    """What rows of a prompt see: what stands before them, from position `first` on, and each other.

    Compiled code hides what is too far back for one row and not for another.
    """

    rows: PromptRows
    parts: tuple[_Part, ...]
    first: int

    @property
    def seen(self) -> int:
        """Tokens that the last row may see."""
        return self.rows.segment.start - self.first + self.rows.segment.num_rows


class CPUAttention:
    """Attention of one forward pass, an `attention.Decoder`; made anew for each."""

    takes_prompts = True

    def __init__(
        self, shape: KVShape, heads: int, batch: Sequence[Rows], prompts: Sequence[PromptRows]
    ) -> None:
        self._shape = shape
        self._heads = heads
        self._batch = batch
        self._prompts = prompts
        self._job = Job(at.JOB_WORDS)
        self._plans: dict[Scaling, _Plan] = {}

    def attend(self, layer: int, qkv: QKV, output: Tensor, scaled: Scaling) -> None:
        """Store the rows' keys and values, write their attention to `output` [R, heads, d].

        qkv: [heads, R, d], [kv_heads, R, d], [kv_heads, R, d]; any strides but the last.
        """
        self._job.words[:] = self.words([layer], qkv, output, scaled)[0]
        kernels.attention.run_filled(self._job, self.work(scaled))

    def work(self, scaled: Scaling) -> int:
        """Multiplications in one layer."""
        return 2 * self._plan(scaled).tokens * self._heads * self._shape.head_dim

    def words(self, layers: Sequence[int], qkv: QKV, output: Tensor, scaled: Scaling) -> Words:
        """The words of the attention's job in each of these layers, [layers, JOB_WORDS]."""
        plan, shape = self._plan(scaled), self._shape
        words = np.zeros((len(layers), at.JOB_WORDS), np.int64)
        same: list[int] = []
        for tensor in qkv:
            heads, rows, last = tensor.stride()
            assert last == 1
            same += [tensor.data_ptr(), rows, heads]
        same += [output.data_ptr(), self._heads, shape.kv_heads, shape.head_dim, plan.longest]
        words[:, at.QUERY : at.LONGEST + 1] = same
        words[:, at.ROW_PANELS], words[:, at.REALS] = plan.row_panels, plan.reals.ctypes.data
        words[:, at.NUM_SEGMENTS], words[:, at.NUM_PROMPTS] = len(plan.views), len(plan.chains)
        words[:, at.PANELS], words[:, at.ALL_PARTS] = plan.panels, plan.parts.shape[1]
        for word, table in (
            (at.SEGMENTS, plan.segments),
            (at.PROMPTS, plan.prompts),
            (at.PARTS, plan.parts),
        ):
            words[:, word] = table.ctypes.data + table.strides[0] * np.asarray(layers)
        return words

    def _plan(self, scaled: Scaling) -> _Plan:
        if scaled not in self._plans:
            views = [_view(rows, scaled.window) for rows in self._batch]
            chains = [_chain(rows, scaled.window) for rows in self._prompts]
            self._plans[scaled] = _Plan(views, chains, self._shape, self._heads, scaled)
        return self._plans[scaled]


class _Plan:
    """The kernel's tables for all layers that see the same tokens in the same way."""

    def __init__(
        self,
        views: Sequence[_View],
        chains: Sequence[_Chain],
        shape: KVShape,
        heads: int,
        scaled: Scaling,
    ) -> None:
        self.views = views
        self.chains = chains
        self.reals = np.array([scaled.scale, scaled.softcap or 0.0], np.float32)
        group = heads // shape.kv_heads
        count = row_panels.py_func  # compiled code calls it too; here it would be compiled first
        per_head = sum(count(view.rows.suffix.live, group) for view in views)
        self.row_panels = per_head * shape.kv_heads
        per_head = sum(-(-chain.rows.segment.num_rows * group // PANEL) for chain in chains)
        self.panels = per_head * shape.kv_heads
        seen = [(view.rows.suffix.live, view.seen) for view in views]
        seen += [(chain.rows.segment.num_rows, chain.seen) for chain in chains]
        self.longest = max(count for _, count in seen)
        self.tokens = sum(rows * count for rows, count in seen)
        self._fill(shape.layers, scaled.window or 0)

    def _fill(self, layers: int, window: int) -> None:
        """The tables of segments, prompts and their parts, [layers, number, words]."""
        parts = [part for view in self.views for part in view.parts]
        parts += [part for chain in self.chains for part in chain.parts]
        self.parts: Words = np.zeros((layers, max(1, len(parts)), at.PART_WORDS), np.int64)
        for number, part in enumerate(parts):
            self.parts[:, number, : at.KEYS] = part.room, part.first, part.count
            self.parts[:, number, at.KEYS] = [key.data_ptr() for key in part.piece.keys]
            self.parts[:, number, at.VALUES] = [value.data_ptr() for value in part.piece.values]
        first = 0
        self.segments: Words = np.zeros((layers, len(self.views), at.SEGMENT_WORDS), np.int64)
        for number, view in enumerate(self.views):
            self.segments[:, number] = _segment(view, first)
            suffix = view.rows.suffix
            self.segments[:, number, at.OWN_KEYS] = suffix.key_addresses()
            self.segments[:, number, at.OWN_VALUES] = suffix.value_addresses()
            first += len(view.parts)
        self.prompts: Words = np.zeros((layers, len(self.chains), at.PROMPT_WORDS), np.int64)
        for number, chain in enumerate(self.chains):
            self.prompts[:, number] = _prompt(chain, first, window)
            own = chain.rows.segment.pieces[-1]
            if not chain.rows.segment.stored:
                self.prompts[:, number, at.OWN_KEYS] = [key.data_ptr() for key in own.keys]
                self.prompts[:, number, at.OWN_VALUES] = [v.data_ptr() for v in own.values]
            first += len(chain.parts)


def _segment(view: _View, first_part: int) -> list[int]:
    """A segment's words; the addresses of its own store are filled in per layer."""
    suffix = view.rows.suffix
    words = [0] * at.SEGMENT_WORDS
    words[at.ROW], words[at.ROWS] = view.rows.start, suffix.live
    words[at.LENGTH], words[at.ROOM] = suffix.length + 1, suffix.tokens_room
    words[at.FIRST_OWN] = view.first_own
    words[at.PART], words[at.NUM_PARTS] = first_part, len(view.parts)
    words[at.TOKENS] = view.tokens
    return words


def _prompt(chain: _Chain, first_part: int, window: int) -> list[int]:
    """The words of a prompt's rows; the addresses of their own store are filled in per layer."""
    segment = chain.rows.segment
    words = [0] * at.PROMPT_WORDS
    words[at.ROW], words[at.ROWS] = chain.rows.start, segment.num_rows
    words[at.PART], words[at.NUM_PARTS] = first_part, len(chain.parts)
    words[at.ROOM], words[at.OFFSET] = _room(segment.pieces[-1]), segment.offset
    words[at.START], words[at.SEEN], words[at.WINDOW] = segment.start, chain.first, window
    return words


def _room(piece: PromptKV) -> int:
    keys = piece.keys[0]
    return keys.stride(0) // keys.shape[-1]


def _chain(rows: PromptRows, window: int | None) -> _Chain:
    segment = rows.segment
    first = left_out = 0 if window is None else max(0, segment.start + 1 - window)
    parts = []
    *earlier, own = segment.pieces
    for piece, count in (*((each, each.num_tokens) for each in earlier), (own, segment.offset)):
        if left_out < count:
            parts.append(_Part(piece, left_out, count - left_out))
        left_out = max(0, left_out - count)
    return _Chain(rows, tuple(parts), first)


def _view(rows: Rows, window: int | None) -> _View:
    pieces, first_own = rows.segment.seen(window)
    parts = tuple(_Part(piece, first, piece.num_tokens - first) for piece, first in pieces)
    return _View(rows, parts, first_own)
