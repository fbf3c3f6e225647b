"""Products of a few to a few hundred float32 rows with weights, compiled by numba.

A decode step reads all weights once. Libraries read them and multiply in turns; here each thread
asks for its next panel of weights while it multiplies with the last one, so that a product takes
about as long as the longer of the two (`python -m benchmarks.linear`). Each result is summed up in
the same order whatever the number of rows, so that a row's results do not depend on its batch.

Weights lie in panels of `PANEL` outputs: [panels, inputs, PANEL], the last one filled with zeros,
and so do biases, [panels, PANEL]. Knows addresses and sizes only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from inference.cpu_jobs import OPTIONS, Kernel, exp, next_share, vector
from inference.cpu_tiles import LINES, PANEL, TILE_ROWS, tile

# int64 words of a product's job; the first is its counter.
ROWS, INPUT, INPUTS, WEIGHT, BIAS, OUTPUT, OUTPUTS, ADDS, GATES = range(1, 10)
WORDS = 10

# Where outputs gate others, each panel has as many of both: gates, then what they gate.
HALF = PANEL // 2

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

# One for each number of rows; a full tile also with fewer fetches, as more tiles share them.
_one, _two, _three, _four, _five, _six, _seven = (tile(rows, LINES) for rows in range(1, 8))
_full, _full_twice, _full_often = (tile(TILE_ROWS, fetches) for fetches in (LINES, 2, 1))


@numba.njit(**OPTIONS)
def _multiply(
    rows: int, data: int, panel: int, inputs: int, result: int, fetch: int, step: int, fetches: int
) -> None:
    """A tile of up to TILE_ROWS rows."""
    stride = 4 * inputs
    if rows == TILE_ROWS:
        if fetches == 1:
            _full_often(data, stride, panel, inputs, result, fetch, step)
        elif fetches == 2:
            _full_twice(data, stride, panel, inputs, result, fetch, step)
        else:
            _full(data, stride, panel, inputs, result, fetch, step)
    elif rows == 1:
        _one(data, stride, panel, inputs, result, fetch, step)
    elif rows == 2:
        _two(data, stride, panel, inputs, result, fetch, step)
    elif rows == 3:
        _three(data, stride, panel, inputs, result, fetch, step)
    elif rows == 4:
        _four(data, stride, panel, inputs, result, fetch, step)
    elif rows == 5:
        _five(data, stride, panel, inputs, result, fetch, step)
    elif rows == 6:
        _six(data, stride, panel, inputs, result, fetch, step)
    else:
        _seven(data, stride, panel, inputs, result, fetch, step)


@numba.njit(**OPTIONS)
def _gate(tile: Any) -> None:
    """silu(gates) * what they gate, in place of the gates; silu(x) = x / (1 + e**-x)."""
    for j in range(HALF):
        x = tile[j]
        e = exp(-abs(x))
        tile[j] = x * tile[HALF + j] * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@numba.njit(**OPTIONS)
def _put(job: Any, row: int, rows: int, panel: int, results: Any) -> None:
    """A panel's results for some rows, with bias and gates, to where they belong."""
    size = HALF if job[GATES] else PANEL
    first = panel * size
    count = min(size, job[OUTPUTS] - first)
    for number in range(rows):
        target = vector(job[OUTPUT] + 4 * ((row + number) * job[OUTPUTS] + first), count)
        if job[BIAS]:
            bias = vector(job[BIAS] + 4 * panel * PANEL, PANEL)
            for j in range(PANEL):
                results[number, j] += bias[j]
        if job[GATES]:
            _gate(results[number])
        if job[ADDS]:
            for j in range(count):
                target[j] += results[number, j]
        else:
            for j in range(count):
                target[j] = results[number, j]


def _product(job_words: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(job_words, (WORDS,))
    inputs, panels = job[INPUTS], -(-job[OUTPUTS] // (HALF if job[GATES] else PANEL))
    panel_bytes = 4 * inputs * PANEL
    results = np.empty((TILE_ROWS, PANEL), np.float32)
    shares = panels * -(-job[ROWS] // _ROWS_AT_ONCE)
    share = next_share(job_words)
    while share < shares:
        following = next_share(job_words)
        first, panel = share // panels * _ROWS_AT_ONCE, share % panels
        last = min(job[ROWS], first + _ROWS_AT_ONCE)
        tiles = -(-(last - first) // TILE_ROWS)
        fetches = max(1, -(-LINES // tiles))
        # The next panel is fetched in equal parts by the tiles of this one.
        step = max(1, 4 * PANEL // (tiles * fetches))
        fetch = job[WEIGHT] + following % panels * panel_bytes
        for row in range(first, last, TILE_ROWS):
            rows = min(TILE_ROWS, last - row)
            data = job[INPUT] + 4 * row * inputs
            weights = job[WEIGHT] + panel * panel_bytes
            _multiply(rows, data, weights, inputs, results.ctypes.data, fetch, step, fetches)
            fetch += inputs * fetches * step
            _put(job, row, rows, panel, results)
        share = following


product = Kernel(_product)
