"""Attention of all rows of a forward pass, compiled by numba.

A share of the work is one head of keys, some rows of one segment and the queries of these rows that
share the head. The queries are columns, row by row, up to `PANEL` of them. Then, all in tiles of
`cpu_tiles`:

1. Scores [tokens, columns] = keys . queries, first of the tokens that all rows of the segment see
   (the parts of their prompt, each key read once for all columns), then of each row's own tokens
   (each key read once for the columns of its row).
2. A softmax down each column; its sum is divided by at the end.
3. Mixed [columns, dim] = weights, transposed, . values, of the same parts and tokens.

Before all shares, the new keys and values of all rows are stored: a segment may see those of
another one of the pass, as a text sees its prompt, whose share another thread may not have begun.

Rows that decode stand at one position and see the same tokens of the prompt. Rows of a prompt see
each other too, in the last part; for each row the scores of later tokens, and of those before its
window, are hidden before the softmax. A column's sums run over tokens in their order, whatever the
other columns are. All tensors are float32. Tables: `cpu_layout`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from specrej_models.cpu.jobs import INLINED, OPTIONS, Kernel, aligned, hold, matrix, vector
from specrej_models.cpu.layout import ATTENTION, PART, SEGMENT
from specrej_models.cpu.tiles import (
    CACHE_LINE,
    LANES,
    LINES,
    PANEL,
    TILE_ROWS,
    TILE_VECTORS,
    call,
    exp,
    next_share,
    pointer,
    softmax_columns,
    tile,
)

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
    """Hide from each row of a prompt the tokens after it and before its window."""
    for row in range(first, first + rows):
        column, newest = (row - first) * group, segment.before + row
        for t in range(newest + 1, segment.before + first + rows):
            scores[t, column : column + group] = _HIDDEN
        if segment.window:
            for t in range(newest + 1 - segment.window):
                scores[t, column : column + group] = _HIDDEN


@numba.njit(**OPTIONS)
def _cap(scores: Any, softcap: Any) -> None:
    """softcap * tanh(score / softcap) in place, of scores that are not hidden."""
    for i in range(scores.size):
        x, one = scores[i] / softcap, np.float32(1)
        e = exp(np.float32(-2) * abs(x))
        capped = softcap * (one - e) / (one + e)
        scores[i] = scores[i] if scores[i] <= _HIDDEN else capped if x >= 0 else -capped


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
    lines = matrix(scores, t + own, COLUMNS)
    if segment.is_prompt:
        _hide(segment, first, rows, group, lines)
    if job.softcap > 0:
        _cap(vector(scores, (t + own) * COLUMNS), np.float32(job.softcap))
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
