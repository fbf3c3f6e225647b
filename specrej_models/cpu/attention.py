"""Attention of all rows of a forward pass, compiled by numba.

A share of the work is one head of keys, some rows of one segment and the queries of these rows that
share the head. The queries are columns, row by row, up to `PANEL` of them. Then, all in tiles of
`tiles`:

1. Scores [tokens, columns] = keys . queries, first of the tokens that all rows of the segment see
   (the parts of their prompt, each key read once for all columns), then of each row's own tokens
   (each key read once for the columns of its row).
2. A softmax down each column; its sum is divided by at the end.
3. Mixed [columns, dim] = weights, transposed, . values, of the same parts and tokens.

Before all shares, the new keys and values of all rows are stored: a segment may see those of
another one of the pass, as a text sees its prompt, whose share another thread may not have begun.

Rows that decode stand at one position and see the same tokens of the prompt. Rows of a prompt see
each other too, in the last part; for each row the scores of later tokens are hidden before the
softmax. A column's sums run over tokens in their order, whatever the
other columns are. All tensors are float32.

`CPUAttention` fills in the tables of a pass: one compiled call per layer computes all rows of all
sessions. The tables of all layers are made at once and differ in addresses only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specrej_models.attention import DecodeSegment, PrefillSegment, Segment
from specrej_models.cpu.jobs import (
    BARRIER,
    INLINED,
    OPTIONS,
    Kernel,
    aligned,
    hold,
    layout,
    matrix,
    vector,
)
from specrej_models.cpu.tiles import (
    CACHE_LINE,
    LANES,
    LINES,
    PANEL,
    TILE_ROWS,
    TILE_VECTORS,
    call,
    next_share,
    pointer,
    softmax_columns,
    tile,
)
from specrej_models.kv import KVShape, PromptKV

# A job: addresses, bytes between rows and between heads, sizes. `stores`: as `shares`, of what is
# done before the barrier; `longest`: the most tokens that a row sees; `num_shares`: what threads
# share.
ATTENTION = layout(
    "shares stores barrier query query_row query_head key key_row key_head value value_row"
    " value_head output heads kv_heads dim segments num_segments parts num_parts longest"
    " num_shares",
    "scale",
)

# Rows of one session, or consecutive tokens of a prompt. Their shares are numbered from
# `first_share` on: `blocks` of `block_rows` rows for each head of keys. They see the first `before`
# tokens of their parts, and either each other (`is_prompt`) or `own` tokens of their own, the new
# one included. `store_row`, `store_head`: bytes from a row, a head to the next one in their store.
# `new_key` is 0 where the keys are stored already.
SEGMENT = layout(
    "first_share blocks block_rows row rows first_part num_parts before is_prompt own"
    " own_keys own_values new_key new_value store_row store_head"
)

# Neighbouring tokens that all rows of a segment see.
PART = layout("tokens keys key_row key_head values value_row value_head")

QKV = tuple[Tensor, Tensor, Tensor]
Table = NDArray[Any]

# Columns of a line: the tile of a row's own tokens may write LANES - 1 beyond the last column.
COLUMNS = PANEL + LANES
_LINE = 4 * COLUMNS

# Lower than any score; infinity is excluded by the compiler's options.
_HIDDEN = np.float32(-1e30)

# Weighted sums: columns and vectors of dimensions at once.
_MIX_ROWS, _MIX_VECTORS = 4, LANES // 4

_wide, _narrow = (tile(TILE_ROWS, vectors) for vectors in (TILE_VECTORS, 1))
_mix_wide, _mix_narrow = (tile(_MIX_ROWS, vectors) for vectors in (_MIX_VECTORS, 1))


@numba.njit(**OPTIONS)
def _score(
    keys: int,
    stride: int,
    tokens: int,
    queries: int,
    columns: int,
    dim: int,
    scores: int,
    ahead: int,
) -> None:
    """scores[tokens, columns] = keys[tokens, dim] . queries[dim, columns]; prefetches `ahead`."""
    for t in range(0, tokens, TILE_ROWS):
        count = min(TILE_ROWS, tokens - t)
        left, soon = (keys + t * stride, stride, 4), (ahead + t * stride, 4 * TILE_ROWS // LINES)
        if columns > PANEL - LANES:
            target = scores + t * _LINE, _LINE
            _wide(count, left, (queries, _LINE), dim, target, 0, soon)
            continue
        for column in range(0, columns, LANES):
            right, target = (queries + 4 * column, _LINE), (scores + t * _LINE + 4 * column, _LINE)
            _narrow(count, left, right, dim, target, 0, soon)


@numba.njit(**OPTIONS)
def _mix(
    weights: int, columns: int, values: int, stride: int, tokens: int, dim: int, mixed: int
) -> None:
    """mixed[columns, dim] += weights[tokens, columns], transposed, . values[tokens, dim]."""
    whole = dim // (_MIX_VECTORS * LANES) * _MIX_VECTORS * LANES
    for column in range(0, columns, _MIX_ROWS):
        count, left = min(_MIX_ROWS, columns - column), (weights + 4 * column, 4, _LINE)
        for j in range(0, whole, _MIX_VECTORS * LANES):
            right, target = (values + 4 * j, stride), (mixed + 4 * (column * dim + j), 4 * dim)
            _mix_wide(count, left, right, tokens, target, 1, (values, 0))
        for j in range(whole, dim, LANES):
            right, target = (values + 4 * j, stride), (mixed + 4 * (column * dim + j), 4 * dim)
            _mix_narrow(count, left, right, tokens, target, 1, (values, 0))


@numba.njit(**OPTIONS)
def _segment_of(segments: Any, share: int, number: int) -> int:
    """The number of a share's segment, at least `number`."""
    while number + 1 < segments.size and share >= segments[number + 1].first_share:
        number += 1
    return number


@numba.njit(**OPTIONS)
def _place(segment: Any, share: int) -> Any:
    """A share's head, its first row in the segment, and how many it has."""
    place = share - segment.first_share
    head, first = place // segment.blocks, place % segment.blocks * segment.block_rows
    return head, first, min(segment.block_rows, segment.rows - first)


@numba.njit(**OPTIONS)
def _store(job: Any, segment: Any, share: int) -> None:
    """Put the new keys and values of a share's rows into their store, if they are not there."""
    head, first, rows = _place(segment, share)
    for row in range(first, first + rows if segment.new_key else first):
        at, dim = segment.row + row, job.dim
        place = row * segment.store_row + head * segment.store_head
        new_key, new_value = (
            vector(segment.new_key + place, dim),
            vector(segment.new_value + place, dim),
        )
        key = vector(job.key + at * job.key_row + head * job.key_head, dim)
        value = vector(job.value + at * job.value_row + head * job.value_head, dim)
        for j in range(dim):
            new_key[j] = key[j]
            new_value[j] = value[j]


@numba.njit(**OPTIONS)
def _transpose(job: Any, first: int, head: int, columns: int, queries: Any) -> None:
    """queries[dim, COLUMNS] = scaled queries of the rows from `first` on; 0 beyond the last."""
    group, scale = job.heads // job.kv_heads, np.float32(job.scale)
    at = job.query + first * job.query_row + head * group * job.query_head
    queries[:] = 0
    for column in range(columns):
        place = at + column // group * job.query_row + column % group * job.query_head
        query = vector(place, job.dim)
        for j in range(job.dim):
            queries[j, column] = query[j] * scale


@numba.njit(**OPTIONS)
def _write(job: Any, first: int, head: int, sums: Any, mixed: Any) -> None:
    """Write mixed[columns, dim] / sums[columns] to the output of the rows from `first` on."""
    group = job.heads // job.kv_heads
    for column in range(sums.size):
        place = (first + column // group) * job.heads + head * group + column % group
        output = vector(job.output + 4 * place * job.dim, job.dim)
        inverse = np.float32(1) / sums[column]
        for j in range(job.dim):
            output[j] = mixed[column, j] * inverse


@numba.njit(**OPTIONS)
def _hide(segment: Any, first: int, rows: int, group: int, scores: Any) -> None:
    """Hide from each row of a prompt the tokens after it."""
    for row in range(first, first + rows):
        column, newest = (row - first) * group, segment.before + row
        for t in range(newest + 1, segment.before + first + rows):
            scores[t, column : column + group] = _HIDDEN


@numba.njit(**INLINED)
def _attend(job: Any, segment: Any, parts: Any, share: int, scratch: int) -> None:
    """One share. `scratch`: address of the lines of queries, totals, mixed and scores."""
    dim, group = job.dim, job.heads // job.kv_heads
    head, first, rows = _place(segment, share)
    columns = rows * group
    queries, totals = scratch, scratch + dim * _LINE
    mixed, scores = totals + _LINE, totals + _LINE + 4 * PANEL * dim
    _transpose(job, segment.row + first, head, columns, matrix(queries, dim, COLUMNS))
    tokens = segment.before + (first + rows if segment.is_prompt else 0)
    own, store = segment.own, first * segment.store_row + head * segment.store_head
    own_keys, own_values = segment.own_keys + store, segment.own_values + store
    t = 0
    for number in range(segment.first_part, segment.first_part + segment.num_parts):
        part = parts[number]
        count, keys = min(part.tokens, tokens - t), part.keys + head * part.key_head
        _score(keys, part.key_row, count, queries, columns, dim, scores + t * _LINE, keys)
        t += count
    for row in range(rows if own else 0):
        place, target = row * segment.store_row, scores + t * _LINE + 4 * row * group
        keys, values, mine = own_keys + place, own_values + place, queries + 4 * row * group
        _score(keys, 4 * dim, own, mine, group, dim, target, values)
    if segment.is_prompt:
        _hide(segment, first, rows, group, matrix(scores, t, COLUMNS))
    for column in range(0, columns, LANES):
        softmax_columns(scores + 4 * column, _LINE, t + own, totals + 4 * column)
    vector(mixed, columns * dim)[:] = 0
    t = 0
    for number in range(segment.first_part, segment.first_part + segment.num_parts):
        part = parts[number]
        count, values = min(part.tokens, tokens - t), part.values + head * part.value_head
        _mix(scores + t * _LINE, columns, values, part.value_row, count, dim, mixed)
        t += count
    for row in range(rows if own else 0):
        weights, target = scores + t * _LINE + 4 * row * group, mixed + 4 * row * group * dim
        _mix(weights, group, own_values + row * segment.store_row, 4 * dim, own, dim, target)
    _write(job, segment.row + first, head, vector(totals, columns), matrix(mixed, columns, dim))


def _attention(address: Any) -> None:
    """Some shares; every thread runs it until none is left."""
    job = numba.carray(pointer(address), 1, ATTENTION)[0]
    segments = numba.carray(pointer(job.segments), job.num_segments, SEGMENT)
    parts = numba.carray(pointer(job.parts), job.num_parts, PART)
    floats = np.empty(
        COLUMNS * (job.dim + 1 + job.longest) + (PANEL + 1) * job.dim + CACHE_LINE, np.float32
    )
    scratch, stores = aligned(floats), address + 8  # the second counter
    share, number = next_share(stores), 0
    while share < job.num_shares:
        number = _segment_of(segments, share, number)
        _store(job, segments[number], share)
        share = next_share(stores)
    if job.barrier:
        call(job.barrier, 0)
    share, number = next_share(address), 0
    while share < job.num_shares:
        number = _segment_of(segments, share, number)
        _attend(job, segments[number], parts, share, scratch)
        share = next_share(address)
    hold(floats)


attention = Kernel(_attention)


def supports(shape: KVShape, heads: int) -> bool:
    """Whether compiled attention serves heads of this size and number."""
    return shape.head_dim % LANES == 0 and heads // shape.kv_heads <= PANEL


def num_blocks(rows: int, group: int) -> int:
    """Shares of a segment's rows per head of keys: at most PANEL columns each, and at least four
    for the threads to share where that fills vectors."""
    columns = rows * group
    return max(-(-rows // (PANEL // group)), min(-(-columns // LANES), 4))


class CPUAttention:
    """Attention of one forward pass, an `attention.Decoder`; made anew for each."""

    def __init__(self, shape: KVShape, heads: int, segments: Sequence[Segment]) -> None:
        """`supports(shape, heads)` must hold."""
        self._shape = shape
        self._heads = heads
        self._segments: list[tuple[int, Segment]] = []  # with their first rows
        start = 0
        for segment in segments:
            self._segments.append((start, segment))
            start += segment.num_rows
        # Prompts first: their shares are the largest.
        self._segments.sort(key=lambda pair: isinstance(pair[1], DecodeSegment))
        self._tables: _Tables | None = None

    def attend(self, layer: int, qkv: QKV, output: Tensor, scale: float) -> None:
        """Store the rows' keys and values, write their attention to `output` [R, heads, d].

        qkv: [heads, R, d], [kv_heads, R, d], [kv_heads, R, d]; any strides but the last.
        """
        job = self.jobs([layer], qkv, output, scale)
        longest = int(job["longest"][0])
        attention.run(job.view(np.int64), work=2 * longest * output.numel())

    def jobs(self, layers: Sequence[int], qkv: QKV, output: Tensor, scale: float) -> Table:
        """The jobs of layers [layers], of kind ATTENTION; see `attend`."""
        shape = self._shape
        if self._tables is None:
            self._tables = _Tables(self._segments, shape, self._heads // shape.kv_heads)
        tables = self._tables
        jobs = np.zeros(len(layers), ATTENTION)
        for name, tensor in zip(("query", "key", "value"), qkv, strict=True):
            head, row, last = tensor.stride()
            assert last == 1
            jobs[name] = tensor.data_ptr()
            jobs[f"{name}_row"], jobs[f"{name}_head"] = 4 * row, 4 * head
        for name, table in (("segments", tables.segments), ("parts", tables.parts)):
            jobs[name] = table.ctypes.data + table.strides[0] * np.asarray(layers)
            jobs[f"num_{name}"] = table.shape[1]
        jobs["barrier"], jobs["output"] = BARRIER, output.data_ptr()
        jobs["heads"], jobs["kv_heads"], jobs["dim"] = self._heads, shape.kv_heads, shape.head_dim
        jobs["longest"], jobs["num_shares"] = tables.longest, tables.shares
        jobs["scale"] = scale
        return jobs


class _Tables:
    """Segments and parts of all layers, [layers, number]."""

    def __init__(self, segments: Sequence[tuple[int, Segment]], shape: KVShape, group: int) -> None:
        self._shape = shape
        self._parts: list[Table] = []
        self.longest = self.shares = 0
        self.segments = np.zeros((shape.layers, len(segments)), SEGMENT)
        for number, (start, segment) in enumerate(segments):
            record = self.segments[:, number]
            blocks = num_blocks(segment.num_rows, group)
            record["first_share"], record["blocks"] = self.shares, blocks
            record["block_rows"] = -(-segment.num_rows // blocks)
            record["row"], record["rows"] = start, segment.num_rows
            self.shares += blocks * shape.kv_heads
            record["first_part"] = len(self._parts)
            if isinstance(segment, PrefillSegment):
                self._fill_prompt(record, segment)
            else:
                self._fill_rows(record, segment)
            record["num_parts"] = len(self._parts) - record["first_part"]
            self.longest = max(self.longest, segment.position + 1)
        self.parts = np.zeros((shape.layers, len(self._parts)), PART)
        for number, part in enumerate(self._parts):
            self.parts[:, number] = part

    def _fill_prompt(self, record: Table, segment: PrefillSegment) -> None:
        *earlier, own = segment.pieces
        counts = [*(piece.num_tokens for piece in earlier), segment.offset + segment.num_rows]
        self._add_parts(segment.pieces, counts)
        record["before"], record["is_prompt"] = segment.start, 1
        if not segment.stored:
            offset = 4 * segment.offset * self._shape.head_dim
            record["new_key"] = [key.data_ptr() + offset for key in own.keys]
            record["new_value"] = [value.data_ptr() + offset for value in own.values]
            record["store_row"] = 4 * self._shape.head_dim
            record["store_head"] = [4 * key.stride(0) for key in own.keys]

    def _fill_rows(self, record: Table, segment: DecodeSegment) -> None:
        suffix, token = segment.suffix, 4 * self._shape.head_dim
        counts = [piece.num_tokens for piece in segment.pieces]
        self._add_parts(segment.pieces, counts)
        record["before"], record["own"] = sum(counts), suffix.length + 1
        for name, kv in (("key", suffix.keys), ("value", suffix.values)):
            store = np.array([kv(layer).data_ptr() for layer in range(self._shape.layers)])
            record[f"own_{name}s"] = store
            record[f"new_{name}"] = store + suffix.length * token
        record["store_head"] = suffix.tokens_room * token
        record["store_row"] = suffix.tokens_room * token * self._shape.kv_heads

    def _add_parts(self, pieces: Sequence[PromptKV], counts: Sequence[int]) -> None:
        """The first `counts` tokens of the pieces."""
        for piece, count in zip(pieces, counts, strict=True):
            part = np.zeros(self._shape.layers, PART)
            part["tokens"] = count
            part["keys"] = [key.data_ptr() for key in piece.keys]
            part["values"] = [value.data_ptr() for value in piece.values]
            part["key_row"] = part["value_row"] = 4 * self._shape.head_dim
            part["key_head"] = part["value_head"] = [4 * key.stride(0) for key in piece.keys]
            self._parts.append(part)
