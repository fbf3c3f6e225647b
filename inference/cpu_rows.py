"""Attention of rows that decode, compiled by numba: each sees its prompt, then tokens of its own.

One head of keys, a few rows and the queries that share these keys are done at a time, the queries
side by side, a lane each. Scores of the prompt, whose keys are the same for all of them, are tiles
of keys and queries; those of a row's own tokens are inner products, of which each key is read once.
Softmax goes down the lanes, all at once. What comes out is summed up query by query, for several
in registers, so that each value too is read once. A lane's sums are made in the same order whoever
has the other lanes. All tensors are float32. Knows addresses and sizes only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from inference.cpu_exp import cap, weigh_columns
from inference.cpu_jobs import OPTIONS, matrix, vector
from inference.cpu_row_tiles import (
    LINE,
    MANY,
    QUERIES,
    SOME,
    keys_often,
    keys_once,
    mix_own,
    mix_shared,
    score_own,
    turn_block,
)
from inference.cpu_vectors import LANES
from inference.cpu_words import (
    COUNT,
    DIM,
    FIRST,
    FIRST_OWN,
    HEADS,
    KEY,
    KEY_HEAD,
    KEY_ROW,
    KEYS,
    KV_HEADS,
    LENGTH,
    LONGEST,
    NUM_PARTS,
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
    STORED,
    TOKENS,
    VALUE,
    VALUE_HEAD,
    VALUE_ROW,
    VALUES,
)

_weigh = weigh_columns(1)


@numba.njit(**OPTIONS)
def row_panels(rows: int, group: int) -> int:
    """Shares that one session's rows make for each head of keys that `group` queries share."""
    wide = min(group, LANES)
    return -(-rows // (LANES // wide)) * -(-group // wide)


@numba.njit(**OPTIONS)
def scratch_floats(longest: int, dim: int) -> int:
    """float32 that a thread needs for rows that see up to `longest` tokens."""
    return LANES * (dim + longest + LANES + 3) + (LANES + MANY) * dim


@numba.njit(**OPTIONS)
def attend_rows(
    job: Any, segments: Any, parts: Any, place: Any, following: Any, reals: Any, scratch: int
) -> None:
    """One share, by its `row_place`; what the `following` one will read first is asked for.

    scratch: address of `scratch_floats` float32.
    """
    number, head, first, rows, _, queries = place
    segment, dim, lanes = segments[number], job[DIM], rows * queries
    turned = (scratch + LINE - 1) // LINE * LINE
    totals = turned + LINE * dim
    scores = totals + LINE
    mixed = scores + LINE * (job[LONGEST] + LANES)
    for row in range(first, first + rows):
        _store(job, segment, head, row)
    _score(job, segment, parts, place, turned, scores)
    _softmax(scores, segment[TOKENS] + _seen(segment), reals, totals)
    _mix_prompt(job, segment, parts, head, lanes, scores, mixed)
    next_keys = _own(job, segments[following[0]], following[1], following[2])[0]
    _mix_own(job, segment, place, scores + LINE * segment[TOKENS], mixed, next_keys)
    _write(job, segment, place, mixed, vector(totals, lanes))


@numba.njit(**OPTIONS)
def row_place(job: Any, segments: Any, share: int) -> Any:
    """A share's segment, head of keys, first row, rows, first query and queries.

    Rows are whole, unless more queries than there are lanes share a head; beyond the last share,
    some that there are.
    """
    group = job[HEADS] // job[KV_HEADS]
    number, panels = 0, row_panels(segments[0, ROWS], group)
    while share >= panels * job[KV_HEADS] and number + 1 < segments.shape[0]:
        share -= panels * job[KV_HEADS]
        number += 1
        panels = row_panels(segments[number, ROWS], group)
    head, panel = share // panels % job[KV_HEADS], share % panels
    wide, rows = min(group, LANES), segments[number, ROWS]
    blocks = -(-group // wide)
    rows_at_once = -(-rows * blocks // panels)  # as even as can be
    first, query = panel // blocks * rows_at_once, panel % blocks * wide
    return number, head, first, min(rows_at_once, rows - first), query, min(wide, group - query)


@numba.njit(**OPTIONS)
def _own(job: Any, segment: Any, head: int, row: int) -> Any:
    """Addresses of a row's own keys and values for one head, and bytes to the next row's."""
    size = 4 * segment[ROOM] * job[DIM]
    base = (row * job[KV_HEADS] + head) * size
    return segment[OWN_KEYS] + base, segment[OWN_VALUES] + base, job[KV_HEADS] * size


@numba.njit(**OPTIONS)
def _seen(segment: Any) -> Any:
    """Own tokens that a row sees."""
    return segment[LENGTH] - segment[FIRST_OWN]


@numba.njit(**OPTIONS)
def _store(job: Any, segment: Any, head: int, row: int) -> None:
    """Put a row's new key and value into its store."""
    dim, at = job[DIM], segment[ROW] + row
    keys, values, _ = _own(job, segment, head, row)
    newest = 4 * (segment[LENGTH] - 1) * dim
    new_key, new_value = vector(keys + newest, dim), vector(values + newest, dim)
    key = vector(job[KEY] + 4 * (at * job[KEY_ROW] + head * job[KEY_HEAD]), dim)
    value = vector(job[VALUE] + 4 * (at * job[VALUE_ROW] + head * job[VALUE_HEAD]), dim)
    for j in range(dim):
        new_key[j] = key[j]
        new_value[j] = value[j]


@numba.njit(**OPTIONS)
def _score(job: Any, segment: Any, parts: Any, place: Any, turned: int, scores: int) -> None:
    """Products of all queries with what they see: the prompt, then each row's own tokens."""
    _, head, first, rows, query, queries = place
    dim, to_row, to_query = job[DIM], 4 * job[QUERY_ROW], 4 * job[QUERY_HEAD]
    query += head * (job[HEADS] // job[KV_HEADS])
    source = job[QUERY] + (segment[ROW] + first) * to_row + query * to_query
    _turn(source, to_row, to_query, rows, queries, dim, turned)
    _score_prompt(job, segment, parts, head, turned, scores)
    keys, values, step = _own(job, segment, head, first)
    own = scores + LINE * segment[TOKENS]
    for row in range(rows):
        here = keys + row * step + 4 * segment[FIRST_OWN] * dim
        for q in range(0, queries, QUERIES):
            asked, target = source + row * to_row + q * to_query, own + 4 * (row * queries + q)
            count = min(QUERIES, queries - q)
            # Keys are followed by the values of the same tokens.
            beyond = values - keys
            score_own(asked, to_query, count, dim, here, _seen(segment), target, beyond)


@numba.njit(**OPTIONS)
def _softmax(scores: int, tokens: int, reals: Any, totals: int) -> None:
    """Weights in place of scores, to be divided by `totals`, lane by lane."""
    scale = reals[0]
    if reals[1] > 0:
        cap(matrix(scores, tokens, LANES), scale, reals[1])
        scale = np.float32(1)
    _weigh(scores, tokens, scale, totals)


@numba.njit(**OPTIONS)
def _mix_own(job: Any, segment: Any, place: Any, weights: int, mixed: int, next_keys: int) -> None:
    """Add each row's own values; they are followed by the next share's keys."""
    _, head, first, rows, _, queries = place
    dim = job[DIM]
    _, values, step = _own(job, segment, head, first)
    values += 4 * segment[FIRST_OWN] * dim
    for row in range(rows):
        for q in range(0, queries, QUERIES):
            lane, count = row * queries + q, min(QUERIES, queries - q)
            here, target = weights + 4 * lane, mixed + 4 * lane * dim
            beyond = next_keys - values
            mix_own(here, values + row * step, _seen(segment), count, dim, target, beyond)


@numba.njit(**OPTIONS)
def _write(job: Any, segment: Any, place: Any, mixed: int, totals: Any) -> None:
    _, head, first, rows, query, queries = place
    dim, heads = job[DIM], job[HEADS]
    query += head * (heads // job[KV_HEADS])
    for row in range(rows):
        for q in range(queries):
            lane, at = row * queries + q, (segment[ROW] + first + row) * heads + query + q
            output = vector(job[OUTPUT] + 4 * at * dim, dim)
            sums, inverse = vector(mixed + 4 * lane * dim, dim), np.float32(1) / totals[lane]
            for j in range(dim):
                output[j] = sums[j] * inverse


@numba.njit(**OPTIONS)
def _turn(
    first: int, to_row: int, to_query: int, rows: int, queries: int, dim: int, target: int
) -> None:
    """target[dim, LANES]: queries as columns; beyond the last one, the first one."""
    places = np.empty(LANES, np.int64)
    lane = 0
    for row in range(rows):
        for query in range(queries):
            places[lane] = first + row * to_row + query * to_query
            lane += 1
    places[lane:] = first
    if dim % LANES == 0:
        for j in range(0, dim, LANES):
            turn_block(places.ctypes.data, 4 * j, target + LINE * j)
    else:
        turned = matrix(target, dim, LANES)
        for lane in range(LANES):
            source = vector(places[lane], dim)
            for j in range(dim):
                turned[j, lane] = source[j]


@numba.njit(**OPTIONS)
def _score_prompt(job: Any, segment: Any, parts: Any, head: int, turned: int, scores: int) -> None:
    """Products of the prompt's tokens with all lanes."""
    dim, t = job[DIM], 0
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        keys = part[KEYS] + 4 * dim * (head * part[STORED] + part[FIRST])
        count, target = part[COUNT], scores + LINE * t
        if count < LANES:
            for row in range(count):
                here = keys + 4 * dim * row
                keys_once(here, 4 * dim, turned, dim, target + LINE * row, 0, 0)
        for row in range(0, count if count >= LANES else 0, LANES):
            # The last tile may overlap the one before.
            start = min(row, count - LANES)
            here = keys + 4 * dim * start
            keys_often(here, 4 * dim, turned, dim, target + LINE * start, 0, 0)
        t += count


@numba.njit(**OPTIONS)
def _mix_prompt(
    job: Any, segment: Any, parts: Any, head: int, lanes: int, weights: int, mixed: int
) -> None:
    """mixed[lane] = sum of weights[t, lane] * values[t]; may write MANY lanes too many."""
    dim, t = job[DIM], 0
    sums = vector(mixed, lanes * dim)
    for j in range(lanes * dim):
        sums[j] = 0
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        values = part[VALUES] + 4 * dim * (head * part[STORED] + part[FIRST])
        lane = 0
        while lane < lanes:
            count = MANY if lanes - lane > SOME else SOME
            here, target = weights + LINE * t + 4 * lane, mixed + 4 * lane * dim
            mix_shared(here, values, part[COUNT], min(count, lanes - lane), count, dim, target)
            lane += count
        t += part[COUNT]
