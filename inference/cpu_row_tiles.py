"""What attention of rows that decode is made of: inner products and sums of a few rows at a time.

Scores and weights stand in lines of `LANES` columns, one for each query. Sizes of heads that are
usual have code of their own, as constants need fewer instructions; those that are no multiple of
`LANES` are left to plain loops. Knows addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_jobs import OPTIONS, matrix, vector
from inference.cpu_tiles import tile
from inference.cpu_vectors import IS_WIDE, LANES, Code

LINE = 4 * LANES  # bytes of one token's scores

# Sizes of heads for which there is faster code.
_DIMS = (64, 128)

# Queries whose scores of own tokens are made at once, of so many tokens.
QUERIES = 4
_OWN_TOKENS = LANES // QUERIES

# Vectors of values that are mixed at once, for so many queries with the same values.
_WIDE = 4 if IS_WIDE else 2
MANY, SOME = 6, 3

keys_often, keys_once = (
    tile(rows, vectors=1, strides=[4 * dim for dim in _DIMS]) for rows in (LANES, 1)
)


@intrinsic
def turn_block(_context: Any, _places: Any, _beyond: Any, _target: Any) -> Any:
    """target[LANES, LANES]: what lies `beyond` bytes behind LANES addresses, as columns."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        places, beyond, target = arguments
        code = Code(builder)
        starts = [
            code.address_at(builder.add(places, code.constant(8 * lane))) for lane in range(LANES)
        ]
        rows = [code.vector(builder.add(start, beyond), 0) for start in starts]
        for number, column in enumerate(code.turned(rows)):
            code.put(column, target, LINE * number)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _own_tile(queries: int) -> Any:
    @intrinsic
    def score(
        _context: Any,
        _first: Any,
        _stride: Any,
        _dim: Any,
        _keys: Any,
        _tokens: Any,
        _scores: Any,
        _beyond: Any,
    ) -> Any:
        """scores[t, q] = query q . keys[t] for up to _OWN_TOKENS tokens; always sets so many.

        Addresses of the first of some queries, `stride` bytes apart, of keys [tokens, dim] and of
        scores, LANES apart. What lies `beyond` bytes behind each key is asked for. `dim` is a
        multiple of LANES.
        """
        return types.void(*[types.int64] * 7), _own_generator(queries)

    return score


def _own_generator(queries: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        first, stride, any_dim, keys, tokens, scores, beyond = arguments
        code = Code(builder)
        last = builder.sub(tokens, code.constant(1))
        asked = [code.offset(first, code.constant(query), stride) for query in range(queries)]

        def score(dim: Any) -> None:
            size = builder.mul(dim, code.constant(4))
            # Beyond the last token the last one is read again: there may be no memory.
            starts = [
                code.offset(keys, code.at_most(code.constant(token), last), size)
                for token in range(_OWN_TOKENS)
            ]
            totals = [[code.vector_of(0.0) for _ in asked] for _ in starts]
            with cgutils.for_range(builder, builder.udiv(dim, code.constant(LANES))) as loop:
                at = builder.mul(loop.index, code.constant(LINE))
                values = [code.vector(builder.add(query, at), 0) for query in asked]
                for start, sums in zip(starts, totals, strict=True):
                    here = builder.add(start, at)
                    code.fetch(builder.add(here, beyond), level=2)
                    key = code.vector(here, 0)
                    for value, total in zip(values, sums, strict=True):
                        code.add_product(value, key, total)
            nothing = [code.vector_of(0.0)] * (QUERIES - queries)
            found = code.sums([each for sums in totals for each in (*sums, *nothing)])
            for token in range(_OWN_TOKENS):
                target = builder.add(scores, code.constant(LINE * token))
                code.put_part(found, token * QUERIES, QUERIES, queries, target)

        code.knowing(any_dim, _DIMS, score)
        return context.get_dummy_value()

    return generate


_own_one, _own_two, _own_three, _own_four = (_own_tile(queries) for queries in range(1, 5))


@numba.njit(**OPTIONS)
def score_own(
    first: int,
    stride: int,
    queries: int,
    dim: int,
    keys: int,
    tokens: int,
    scores: int,
    beyond: int,
) -> None:
    """scores[t, q] = query q . keys[t]; may write _OWN_TOKENS - 1 lines too many."""
    if dim % LANES:
        a, plain = matrix(keys, tokens, dim), matrix(scores, tokens, LANES)
        for t in range(tokens):
            for q in range(queries):
                b, total = vector(first + q * stride, dim), np.float32(0)
                for j in range(dim):
                    total += a[t, j] * b[j]
                plain[t, q] = total
        return
    for t in range(0, tokens, _OWN_TOKENS):
        here, left, target = keys + 4 * t * dim, tokens - t, scores + LINE * t
        if queries == 1:
            _own_one(first, stride, dim, here, left, target, beyond)
        elif queries == 2:
            _own_two(first, stride, dim, here, left, target, beyond)
        elif queries == 3:
            _own_three(first, stride, dim, here, left, target, beyond)
        else:
            _own_four(first, stride, dim, here, left, target, beyond)


def _mix_tile(queries: int, vectors: int, *, fetches: bool) -> Any:
    @intrinsic
    def mix(
        _context: Any,
        _weights: Any,
        _values: Any,
        _dim: Any,
        _tokens: Any,
        _output: Any,
        _beyond: Any,
    ) -> Any:
        """output[q] += sum of weights[t, q] * values[t], for `vectors` vectors of the dimensions.

        Addresses of weights, LANES apart, of [tokens, dim] and of [queries, dim], the latter two
        from the first of these dimensions on. With `fetches`, what lies `beyond` bytes behind the
        values is asked for.
        """
        return types.void(*[types.int64] * 6), _mix_generator(queries, vectors, fetches)

    return mix


def _mix_generator(queries: int, vectors: int, fetches: bool) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weights, values, any_dim, tokens, output, beyond = arguments
        code = Code(builder)

        def mix(dim: Any) -> None:
            size = builder.mul(dim, code.constant(4))
            rows = [code.offset(output, code.constant(query), size) for query in range(queries)]
            sums = [
                [code.variable(code.vector(row, LINE * number)) for number in range(vectors)]
                for row in rows
            ]
            with cgutils.for_range(builder, tokens) as loop:
                here = code.offset(values, loop.index, size)
                for number in range(vectors if fetches else 0):
                    ahead = builder.add(beyond, code.constant(LINE * number))
                    code.fetch(builder.add(here, ahead), level=2)
                loaded = [code.vector(here, LINE * number) for number in range(vectors)]
                line = code.offset(weights, loop.index, LINE)
                for query, totals in enumerate(sums):
                    weight = code.everywhere(builder.add(line, code.constant(4 * query)))
                    for value, total in zip(loaded, totals, strict=True):
                        code.add_product(weight, value, total)
            for row, totals in zip(rows, sums, strict=True):
                for number, total in enumerate(totals):
                    code.store(total, row, LINE * number)

        code.knowing(any_dim, _DIMS, mix)
        return context.get_dummy_value()

    return generate


_many_wide, _some_wide = (_mix_tile(queries, _WIDE, fetches=False) for queries in (MANY, SOME))
_many_narrow, _some_narrow = (_mix_tile(queries, 1, fetches=False) for queries in (MANY, SOME))
_one_wide, _two_wide, _three_wide, _four_wide = (
    _mix_tile(queries, _WIDE, fetches=True) for queries in range(1, QUERIES + 1)
)
_one_narrow = _mix_tile(1, 1, fetches=True)


@numba.njit(**OPTIONS)
def mix_shared(
    weights: int, values: int, tokens: int, lanes: int, at_once: int, dim: int, target: int
) -> None:
    """target[lane] += sum of weights[t, lane] * values[t]."""
    if dim % LANES:
        _mix_plainly(weights, values, tokens, lanes, dim, target)
        return
    wide = dim // (_WIDE * LANES) * _WIDE * LANES
    for j in range(0, wide, _WIDE * LANES):
        if at_once == MANY:
            _many_wide(weights, values + 4 * j, dim, tokens, target + 4 * j, 0)
        else:
            _some_wide(weights, values + 4 * j, dim, tokens, target + 4 * j, 0)
    for j in range(wide, dim, LANES):
        if at_once == MANY:
            _many_narrow(weights, values + 4 * j, dim, tokens, target + 4 * j, 0)
        else:
            _some_narrow(weights, values + 4 * j, dim, tokens, target + 4 * j, 0)


@numba.njit(**OPTIONS)
def mix_own(
    weights: int, values: int, tokens: int, lanes: int, dim: int, target: int, beyond: int
) -> None:
    """As `mix_shared`, for up to QUERIES lanes; what lies `beyond` the values is asked for."""
    if dim % LANES:
        _mix_plainly(weights, values, tokens, lanes, dim, target)
        return
    wide = dim // (_WIDE * LANES) * _WIDE * LANES
    for j in range(0, wide, _WIDE * LANES):
        here, there = values + 4 * j, target + 4 * j
        if lanes == 1:
            _one_wide(weights, here, dim, tokens, there, beyond)
        elif lanes == 2:
            _two_wide(weights, here, dim, tokens, there, beyond)
        elif lanes == 3:
            _three_wide(weights, here, dim, tokens, there, beyond)
        else:
            _four_wide(weights, here, dim, tokens, there, beyond)
    for j in range(wide, dim, LANES):
        for lane in range(lanes):
            there = target + 4 * (lane * dim + j)
            _one_narrow(weights + 4 * lane, values + 4 * j, dim, tokens, there, beyond)


@numba.njit(**OPTIONS)
def _mix_plainly(weights: int, values: int, tokens: int, lanes: int, dim: int, target: int) -> None:
    a, b = matrix(weights, tokens, LANES), matrix(values, tokens, dim)
    sums = matrix(target, lanes, dim)
    for t in range(tokens):
        for lane in range(lanes):
            for j in range(dim):
                sums[lane, j] += a[t, lane] * b[t, j]
