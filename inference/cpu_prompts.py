"""Attention of a prompt's rows, compiled by numba: many rows that see the same tokens.

Rows and the heads that share their keys stand side by side in panels: scores are products of keys,
as they lie in memory, with a panel of queries, and what comes out is one of values with a panel of
weights. So neither keys nor values are laid out anew, and softmax goes down the columns, all lanes
at once. All tensors are float32. Knows addresses and sizes only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from inference.cpu_exp import HIDDEN, cap, weigh_columns
from inference.cpu_jobs import OPTIONS, matrix, vector
from inference.cpu_tiles import PANEL, TILE_ROWS, tile
from inference.cpu_vectors import LANES
from inference.cpu_words import (
    COUNT,
    DIM,
    FIRST,
    HEADS,
    KEY,
    KEY_HEAD,
    KEY_ROW,
    KEYS,
    KV_HEADS,
    NUM_PARTS,
    OFFSET,
    OUTPUT,
    OWN_KEYS,
    OWN_VALUES,
    PART,
    QUERY,
    QUERY_HEAD,
    QUERY_ROW,
    ROOM,
    ROW,
    ROWS,
    SEEN,
    START,
    STORED,
    VALUE,
    VALUE_HEAD,
    VALUE_ROW,
    VALUES,
    WINDOW,
)

_weigh = weigh_columns(PANEL // LANES)
_rows, _row = tile(TILE_ROWS), tile(1)
_columns, _column = (tile(rows, by_column=True, adds=True) for rows in (TILE_ROWS, 1))


@numba.njit(**OPTIONS)
def attend_panel(
    job: Any, prompt: Any, parts: Any, head: int, panel: int, reals: Any, scratch: Any
) -> None:
    """Some rows of a prompt, `PANEL` pairs of a row and one of the heads that share `head`'s keys.

    scratch: float32 [2 * DIM + 1 + tokens, PANEL], int64 [PANEL] twice.
    """
    dim, group = job[DIM], job[HEADS] // job[KV_HEADS]
    floats, positions, places = scratch
    queries, mixed = floats[:dim], floats[dim : 2 * dim]
    totals, scores = floats[2 * dim], floats[2 * dim + 1 :]
    first_row = panel * PANEL // group
    rows = min(prompt[ROWS], (panel * PANEL + PANEL - 1) // group + 1)  # from the first on
    if panel == 0 and prompt[OWN_KEYS]:
        _store(job, prompt, head)
    for lane in range(PANEL):
        row, number = _place(prompt, panel, lane, group)
        positions[lane] = prompt[START] + row
        place = (prompt[ROW] + row) * job[QUERY_ROW] + (head * group + number) * job[QUERY_HEAD]
        places[lane] = place
    rows_of_all = vector(job[QUERY], places[PANEL - 1] + places[0] + dim)
    for j in range(dim):
        for lane in range(PANEL):
            queries[j, lane] = rows_of_all[places[lane] + j]
    tokens = _score(job, prompt, parts, head, rows, queries, scores)
    _hide(prompt, first_row, rows, positions, scores)
    _softmax(scores, tokens, reals[0], reals[1], totals)
    _mix(job, prompt, parts, head, rows, scores, mixed)
    for lane in range(min(PANEL, prompt[ROWS] * group - panel * PANEL)):
        row, number = _place(prompt, panel, lane, group)
        at = (prompt[ROW] + row) * job[HEADS] + head * group + number
        output, inverse = vector(job[OUTPUT] + 4 * at * dim, dim), np.float32(1) / totals[lane]
        for j in range(dim):
            output[j] = mixed[j, lane] * inverse


@numba.njit(**OPTIONS)
def _place(prompt: Any, panel: int, lane: int, group: int) -> Any:
    """A lane's row and its head's number in the group; beyond the last pair, the last one's."""
    pair = min(panel * PANEL + lane, prompt[ROWS] * group - 1)
    return pair // group, pair % group


@numba.njit(**OPTIONS)
def _store(job: Any, prompt: Any, head: int) -> None:
    """Put the rows' keys and values into their store."""
    rows, dim = prompt[ROWS], job[DIM]
    base = 4 * (head * prompt[ROOM] + prompt[OFFSET]) * dim
    keys = matrix(prompt[OWN_KEYS] + base, rows, dim)
    values = matrix(prompt[OWN_VALUES] + base, rows, dim)
    for row in range(rows):
        at = prompt[ROW] + row
        key = vector(job[KEY] + 4 * (at * job[KEY_ROW] + head * job[KEY_HEAD]), dim)
        value = vector(job[VALUE] + 4 * (at * job[VALUE_ROW] + head * job[VALUE_HEAD]), dim)
        for j in range(dim):
            keys[row, j] = key[j]
            values[row, j] = value[j]


@numba.njit(**OPTIONS)
def _score(
    job: Any, prompt: Any, parts: Any, head: int, rows: int, queries: Any, scores: Any
) -> int:
    """Products of all tokens that stand before the panel's last row with its queries; how many."""
    dim, t = job[DIM], 0
    for number in range(prompt[PART], prompt[PART] + prompt[NUM_PARTS]):
        part = parts[number]
        keys = part[KEYS] + 4 * dim * (head * part[STORED] + part[FIRST])
        _times(keys, 4 * dim, part[COUNT], queries, dim, scores[t:])
        t += part[COUNT]
    keys = job[KEY] + 4 * (prompt[ROW] * job[KEY_ROW] + head * job[KEY_HEAD])
    _times(keys, 4 * job[KEY_ROW], rows, queries, dim, scores[t:])
    return t + rows


@numba.njit(**OPTIONS)
def _times(first: int, stride: int, count: int, panel: Any, inputs: int, result: Any) -> None:
    """result[count, PANEL] = rows[count, inputs] . panel[inputs, PANEL]."""
    at, target = panel.ctypes.data, result.ctypes.data
    if count < TILE_ROWS:
        for row in range(count):
            _row(first + row * stride, stride, at, inputs, target + 4 * PANEL * row, 0, 0)
        return
    for row in range(0, count, TILE_ROWS):
        here = min(row, count - TILE_ROWS)  # the last tile may overlap the one before
        _rows(first + here * stride, stride, at, inputs, target + 4 * PANEL * here, 0, 0)


@numba.njit(**OPTIONS)
def _hide(prompt: Any, first_row: int, rows: int, positions: Any, scores: Any) -> None:
    """What stands after a lane's row, or before its window, has no weight."""
    before = prompt[START] - prompt[SEEN]
    for t in range(before + first_row + 1, before + rows):
        position = prompt[SEEN] + t
        for lane in range(PANEL):
            if position > positions[lane]:
                scores[t, lane] = HIDDEN
    if prompt[WINDOW]:
        for t in range(max(0, before + rows - prompt[WINDOW])):
            position = prompt[SEEN] + t
            for lane in range(PANEL):
                if position <= positions[lane] - prompt[WINDOW]:
                    scores[t, lane] = HIDDEN


@numba.njit(**OPTIONS)
def _softmax(scores: Any, tokens: int, scale: Any, softcap: Any, totals: Any) -> None:
    """Weights in place of scores, to be divided by `totals`, lane by lane.

    softcap * tanh(score / softcap) first where softcap > 0.
    """
    if softcap > 0:
        cap(scores[:tokens], scale, softcap)
        scale = np.float32(1)
    _weigh(scores.ctypes.data, tokens, scale, totals.ctypes.data)


@numba.njit(**OPTIONS)
def _mix(job: Any, prompt: Any, parts: Any, head: int, rows: int, weights: Any, mixed: Any) -> None:
    """mixed[DIM, PANEL] = values[tokens, DIM], turned, . weights[tokens, PANEL]."""
    dim, t = job[DIM], 0
    mixed[:] = 0
    for number in range(prompt[PART], prompt[PART] + prompt[NUM_PARTS]):
        part = parts[number]
        values = part[VALUES] + 4 * dim * (head * part[STORED] + part[FIRST])
        _add_turned(values, 4 * dim, part[COUNT], weights[t:], dim, mixed)
        t += part[COUNT]
    values = job[VALUE] + 4 * (prompt[ROW] * job[VALUE_ROW] + head * job[VALUE_HEAD])
    _add_turned(values, 4 * job[VALUE_ROW], rows, weights[t:], dim, mixed)


@numba.njit(**OPTIONS)
def _add_turned(
    first: int, stride: int, inputs: int, panel: Any, columns: int, result: Any
) -> None:
    """result[columns, PANEL] += matrix[inputs, columns], turned, . panel[inputs, PANEL]."""
    at, target = panel.ctypes.data, result.ctypes.data
    whole = columns // TILE_ROWS * TILE_ROWS
    for j in range(0, whole, TILE_ROWS):
        _columns(first + 4 * j, stride, at, inputs, target + 4 * PANEL * j, 0, 0)
    for j in range(whole, columns):
        _column(first + 4 * j, stride, at, inputs, target + 4 * PANEL * j, 0, 0)
