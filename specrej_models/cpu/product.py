"""Products of rows with weights, compiled by numba.

A decode step reads all weights once. Each thread prefetches its next panel of weights while it
multiplies with the current one, so that a product takes about as long as the longer of reading and
multiplying (benchmarks/results/linear.json). A row's results do not depend on its batch: all tiles
sum in the same order.

Weights lie in panels of `PANEL` outputs, [panels, inputs, PANEL], the last one filled with zeros,
and biases too, [panels, PANEL]. With `gates`, the first half of each panel are gates of the second.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from specrej_models.cpu import tiles
from specrej_models.cpu.jobs import OPTIONS, Kernel, aligned, hold, layout, matrix, vector

# `adds`: results are added to the output. `gates`: a result is silu(gate) * what it gates.
PRODUCT = layout("shares rows input inputs weight bias output outputs adds gates")

HALF = tiles.PANEL // 2

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

_full, _half, _one = (
    tiles.tile(rows, tiles.TILE_VECTORS) for rows in (tiles.TILE_ROWS, tiles.TILE_ROWS // 2, 1)
)


@numba.njit(**OPTIONS)
def _multiply(rows: int, left: Any, panel: int, inputs: int, results: int, ahead: Any) -> None:
    """results[rows, PANEL] = left[rows, inputs] . panel[inputs, PANEL]; see `tile`."""
    left, right, result = (
        (left[0], left[1], 4),
        (panel, 4 * tiles.PANEL),
        (results, 4 * tiles.PANEL),
    )
    if rows == 1:
        _one(rows, left, right, inputs, result, 0, ahead)
    elif rows <= tiles.TILE_ROWS // 2:
        _half(rows, left, right, inputs, result, 0, ahead)
    else:
        _full(rows, left, right, inputs, result, 0, ahead)


@numba.njit(**OPTIONS)
def _put(job: Any, row: int, rows: int, panel: int, results: Any) -> None:
    """A panel's results for some rows, with bias and gates, to the job's output."""
    size = HALF if job.gates else tiles.PANEL
    first = panel * size
    count = min(size, job.outputs - first)
    for number in range(rows):
        target = vector(job.output + 4 * ((row + number) * job.outputs + first), count)
        sums = results[number]
        if job.bias:
            bias = vector(job.bias + 4 * panel * tiles.PANEL, tiles.PANEL)
            for j in range(tiles.PANEL):
                sums[j] += bias[j]
        if job.gates:  # silu(x) = x / (1 + e**-x)
            for j in range(HALF):
                x, one = sums[j], np.float32(1)
                e = tiles.exp(-abs(x))
                sums[j] = x * sums[HALF + j] * (one if x >= 0 else e) / (one + e)
        if job.adds:
            for j in range(count):
                target[j] += sums[j]
        else:
            for j in range(count):
                target[j] = sums[j]


def _product(address: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(tiles.pointer(address), 1, PRODUCT)[0]
    inputs = job.inputs
    panels = -(-job.outputs // (HALF if job.gates else tiles.PANEL))
    panel_bytes = 4 * tiles.PANEL * inputs
    # Vectors that cross cache lines take twice as long: rows of results begin at one.
    floats = np.empty(tiles.TILE_ROWS * tiles.PANEL + tiles.CACHE_LINE, np.float32)
    results = aligned(floats)
    shares = panels * -(-job.rows // _ROWS_AT_ONCE)
    share = tiles.next_share(address)
    while share < shares:
        following = tiles.next_share(address)
        first, panel = share // panels * _ROWS_AT_ONCE, share % panels
        last = min(job.rows, first + _ROWS_AT_ONCE)
        # The tiles of this panel prefetch the next one in equal parts.
        ahead = job.weight + following % panels * panel_bytes
        step = max(1, panel_bytes // (-(-(last - first) // tiles.TILE_ROWS) * tiles.LINES * inputs))
        weights = job.weight + panel * panel_bytes
        for row in range(first, last, tiles.TILE_ROWS):
            rows = min(tiles.TILE_ROWS, last - row)
            left = job.input + 4 * (inputs * row), 4 * inputs
            _multiply(rows, left, weights, inputs, results, (ahead, step))
            ahead += inputs * tiles.LINES * step
            _put(job, row, rows, panel, matrix(results, rows, tiles.PANEL))
        share = following
    hold(floats)


product = Kernel(_product)
