"""Products of a few to a few hundred float32 rows with weights, compiled by numba.

A decode step reads all weights once. Libraries read them and multiply in turns; here each thread
asks for its next panel of weights while it multiplies with the last one, so that a product takes
about as long as the longer of the two (`python -m benchmarks.linear`). Each result is summed up in
the same order whatever the number of rows, so that a row's results do not depend on its batch.

Weights lie in panels of `PANEL` outputs: [panels, inputs, PANEL], the last one filled with zeros,
and so do biases, [panels, PANEL]. Knows addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_jobs import OPTIONS, Kernel, exp, next_share, vector
from inference.cpu_vectors import IS_WIDE, LANES, Code

# int64 words of a product's job; the first is its counter.
ROWS, INPUT, INPUTS, WEIGHT, BIAS, OUTPUT, OUTPUTS, ADDS, GATES = range(1, 10)
WORDS = 10

# A tile of results stays in registers: rows times vectors of outputs, beside one input's vectors of
# weights and one value of the rows. 32 registers of 16 floats hold 8 x 3, 16 of 8 hold 4 x 3.
_TILE_ROWS = 8 if IS_WIDE else 4
_VECTORS = 3
PANEL = LANES * _VECTORS

# Where outputs gate others, each panel has as many of both: gates, then what they gate.
HALF = PANEL // 2

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

_CACHE_LINE = 64
_LINES = -(-4 * PANEL // _CACHE_LINE)  # of one input's weights

# Inputs before its turn that a weight is asked for from the second-level cache.
_AHEAD = 16


def _tile(rows: int, fetches: int) -> Any:
    """An inner product of `rows` rows with a panel, and `fetches` cache lines asked for per input.

    Arguments: addresses of the rows and of the panel, inputs, address of the result
    [rows, PANEL], address to fetch from and the bytes to go on by.
    """

    @intrinsic
    def multiply(
        _context: Any, _rows: Any, _panel: Any, _inputs: Any, _result: Any, _fetch: Any, _step: Any
    ) -> Any:
        return types.void(*[types.int64] * 6), _generator(rows, fetches)

    return multiply


def _generator(rows: int, fetches: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        first_row, panel, inputs, result, fetch, step = arguments
        code = Code(builder)
        sums = [[code.vector_of(0.0) for _ in range(_VECTORS)] for _ in range(rows)]
        starts = [code.offset(first_row, inputs, 4 * row) for row in range(rows)]
        with cgutils.for_range(builder, inputs) as loop:
            for number in range(fetches):
                at = code.offset(code.constant(number), loop.index, fetches)
                code.fetch(code.offset(fetch, at, step), level=2)
            here = code.offset(panel, loop.index, 4 * PANEL)
            for line in range(_LINES):
                ahead = code.constant(4 * PANEL * _AHEAD + _CACHE_LINE * line)
                code.fetch(builder.add(here, ahead), level=1)
            weights = [code.vector(here, 4 * LANES * number) for number in range(_VECTORS)]
            for start, row_sums in zip(starts, sums, strict=True):
                value = code.everywhere(code.offset(start, loop.index, 4))
                for weight, total in zip(weights, row_sums, strict=True):
                    code.add_product(value, weight, total)
        for number, total in enumerate(total for row_sums in sums for total in row_sums):
            code.store(total, result, 4 * LANES * number)
        return context.get_dummy_value()

    return generate


# One for each number of rows; a full tile also with fewer fetches, as more tiles share them.
_one, _two, _three, _four, _five, _six, _seven = (_tile(rows, _LINES) for rows in range(1, 8))
_full, _full_twice, _full_often = (_tile(_TILE_ROWS, fetches) for fetches in (_LINES, 2, 1))


@numba.njit(**OPTIONS)
def _multiply(
    rows: int, data: int, panel: int, inputs: int, result: int, fetch: int, step: int, fetches: int
) -> None:
    """A tile of up to _TILE_ROWS rows."""
    if rows == _TILE_ROWS:
        if fetches == 1:
            _full_often(data, panel, inputs, result, fetch, step)
        elif fetches == 2:
            _full_twice(data, panel, inputs, result, fetch, step)
        else:
            _full(data, panel, inputs, result, fetch, step)
    elif rows == 1:
        _one(data, panel, inputs, result, fetch, step)
    elif rows == 2:
        _two(data, panel, inputs, result, fetch, step)
    elif rows == 3:
        _three(data, panel, inputs, result, fetch, step)
    elif rows == 4:
        _four(data, panel, inputs, result, fetch, step)
    elif rows == 5:
        _five(data, panel, inputs, result, fetch, step)
    elif rows == 6:
        _six(data, panel, inputs, result, fetch, step)
    else:
        _seven(data, panel, inputs, result, fetch, step)


@numba.njit(**OPTIONS)
def _gate(tile: Any) -> None:
    """silu(gates) * what they gate, in place of the gates; silu(x) = x / (1 + e**-x)."""
    for j in range(HALF):
        x = tile[j]
        e = exp(-abs(x))
        tile[j] = x * tile[HALF + j] * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@numba.njit(**OPTIONS)
def _put(job: Any, row: int, rows: int, panel: int, tile: Any) -> None:
    """A panel's results for some rows, with bias and gates, to where they belong."""
    size = HALF if job[GATES] else PANEL
    first = panel * size
    count = min(size, job[OUTPUTS] - first)
    for number in range(rows):
        target = vector(job[OUTPUT] + 4 * ((row + number) * job[OUTPUTS] + first), count)
        if job[BIAS]:
            bias = vector(job[BIAS] + 4 * panel * PANEL, PANEL)
            for j in range(PANEL):
                tile[number, j] += bias[j]
        if job[GATES]:
            _gate(tile[number])
        if job[ADDS]:
            for j in range(count):
                target[j] += tile[number, j]
        else:
            for j in range(count):
                target[j] = tile[number, j]


def _product(job_words: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(job_words, (WORDS,))
    inputs, panels = job[INPUTS], -(-job[OUTPUTS] // (HALF if job[GATES] else PANEL))
    panel_bytes = 4 * inputs * PANEL
    tile = np.empty((_TILE_ROWS, PANEL), np.float32)
    shares = panels * -(-job[ROWS] // _ROWS_AT_ONCE)
    share = next_share(job_words)
    while share < shares:
        following = next_share(job_words)
        first, panel = share // panels * _ROWS_AT_ONCE, share % panels
        last = min(job[ROWS], first + _ROWS_AT_ONCE)
        tiles = -(-(last - first) // _TILE_ROWS)
        fetches = max(1, -(-_LINES // tiles))
        # The next panel is fetched in equal parts by the tiles of this one.
        step = max(1, 4 * PANEL // (tiles * fetches))
        fetch = job[WEIGHT] + following % panels * panel_bytes
        for row in range(first, last, _TILE_ROWS):
            rows = min(_TILE_ROWS, last - row)
            data = job[INPUT] + 4 * row * inputs
            weights = job[WEIGHT] + panel * panel_bytes
            _multiply(rows, data, weights, inputs, tile.ctypes.data, fetch, step, fetches)
            fetch += inputs * fetches * step
            _put(job, row, rows, panel, tile)
        share = following


product = Kernel(_product)
