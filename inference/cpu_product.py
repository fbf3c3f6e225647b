"""Products of a few to a few hundred float32 rows with weights, compiled by numba.

A decode step reads all weights once. Libraries read them and multiply in turns; here each thread
asks for its next panel of weights while it multiplies with the last one, so that a product takes
about as long as the longer of the two (`python -m benchmarks.linear`). Each result is summed up in
the same order whatever the number of rows, so that a row's results do not depend on its batch.

Weights lie in panels of `PANEL` outputs: [panels, inputs, PANEL], the last one filled with zeros,
in one of the forms of `cpu_weights`, and so do biases, [panels, PANEL], as float32. Knows addresses
and sizes only.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from inference.cpu_jobs import OPTIONS, Kernel, exp, next_share, vector
from inference.cpu_tiles import CACHE_LINE, LINES, PANEL, TILE_ROWS, tile
from inference.cpu_weights import FLOAT32, GROUP, bytes_of, dequantize

# int64 words of a product's job; the first is its counter.
ROWS, INPUT, INPUTS, WEIGHT, FORM, BIAS, OUTPUT, OUTPUTS, ADDS, GATES = range(1, 11)
WORDS = 11

# Where outputs gate others, each panel has as many of both: gates, then what they gate.
HALF = PANEL // 2

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

# Rows up to which weights take longer to be read than to be multiplied with, even if they are to be
# turned into float32 first: which rows of a tile share.
FEW = TILE_ROWS

# Inputs of a panel that are turned at once: they stay in a core's first-level cache.
_TURNED_AT_ONCE = 3 * GROUP


def _tiles_up_to(rows: int) -> Any:
    """Multiplies a tile of `count` rows and adds to results; fetches as `_fetches` says."""
    fewer = _tiles_up_to(rows - 1) if rows > 1 else None
    with_one_fetch, with_all = (tile(rows, fetches, adds=True) for fetches in (1, LINES))

    @numba.njit(**OPTIONS)
    def multiply(
        count: int, data: int, stride: int, panel: int, inputs: int, result: int, fetch: Any
    ) -> None:
        at, fetches, step = fetch
        if count < rows and fewer is not None:
            fewer(count, data, stride, panel, inputs, result, fetch)
        elif fetches == 1:
            with_one_fetch(data, stride, panel, inputs, result, at, step)
        else:
            with_all(data, stride, panel, inputs, result, at, step)

    return multiply


_multiply = _tiles_up_to(TILE_ROWS)


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


@numba.njit(**OPTIONS)
def _fetches(panel_bytes: int, inputs: int, tiles: int) -> Any:
    """Cache lines of the next panel that a tile asks for per input, and the bytes to go on by."""
    count = 1 if panel_bytes <= CACHE_LINE * inputs * tiles else LINES
    return count, max(1, panel_bytes // (tiles * count * inputs))


@numba.njit(**OPTIONS)
def _aligned(rows: int) -> Any:
    """New [rows, PANEL] whose vectors do not lie across cache lines: those take twice as long."""
    floats = np.empty(rows * PANEL + CACHE_LINE // 4, np.float32)
    first = -floats.ctypes.data % CACHE_LINE // 4
    return floats[first : first + rows * PANEL].reshape(rows, PANEL)


def _product(job_words: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(job_words, (WORDS,))
    form, inputs, stride = job[FORM], job[INPUTS], 4 * job[INPUTS]
    panels = -(-job[OUTPUTS] // (HALF if job[GATES] else PANEL))
    panel_bytes = bytes_of(form, inputs)
    results = _aligned(TILE_ROWS)
    at_once = inputs if form == FLOAT32 else min(inputs, _TURNED_AT_ONCE)
    turned = _aligned(0 if form == FLOAT32 else at_once)
    shares = panels * -(-job[ROWS] // _ROWS_AT_ONCE)
    share = next_share(job_words)
    while share < shares:
        following = next_share(job_words)
        first, panel = share // panels * _ROWS_AT_ONCE, share % panels
        last = min(job[ROWS], first + _ROWS_AT_ONCE)
        # The next panel is fetched in equal parts by the tiles of this one.
        fetches, step = _fetches(panel_bytes, inputs, -(-(last - first) // TILE_ROWS))
        fetch = job[WEIGHT] + following % panels * panel_bytes
        for row in range(first, last, TILE_ROWS):
            rows = min(TILE_ROWS, last - row)
            results[:rows] = 0
            for done in range(0, inputs, at_once):
                count = min(inputs - done, at_once)
                weights = job[WEIGHT] + panel * panel_bytes + bytes_of(form, done)
                if form != FLOAT32:
                    dequantize(form, weights, count, turned.ctypes.data)
                    weights = turned.ctypes.data
                data = job[INPUT] + stride * row + 4 * done
                to_fetch = fetch, fetches, step
                _multiply(rows, data, stride, weights, count, results.ctypes.data, to_fetch)
                fetch += count * fetches * step
            _put(job, row, rows, panel, results)
        share = following


product = Kernel(_product)
