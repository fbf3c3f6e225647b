"""Products of rows with weights, compiled by numba.

A decode step reads all weights once. Each thread prefetches its next panel of weights while it
multiplies with the current one, so that a product takes about as long as the longer of reading and
multiplying (benchmarks/results/linear.json). A row's results do not depend on its batch: all tiles
sum in the same order.

Weights lie in panels of `PANEL` outputs, [panels, inputs, PANEL], the last one filled with zeros,
and biases too, [panels, PANEL]. With few rows a product takes as long as its weights take to be
read, so weights may have a second form in fewer bytes, from which each float32 is restored to the
last bit:

* `BFLOAT16`: [panels, inputs, PANEL] upper halves of float32.
* `INT8`, `INT4`: weight = minimum + count * scale, one scale and one minimum for `GROUP` inputs of
  an output. A panel's groups follow each other: scales [PANEL], minima [PANEL], then counts: bytes
  [GROUP, PANEL], or bytes [GROUP / 2, PANEL] with the group's first inputs in their lower halves
  and the others in their upper halves.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from specrej_models.cpu.jobs import OPTIONS, Kernel, aligned, hold, layout, matrix, vector
from specrej_models.cpu.tiles import (
    CACHE_LINE,
    LANES,
    LINES,
    PANEL,
    TILE_ROWS,
    TILE_VECTORS,
    next_share,
    pointer,
    restore,
    tile,
)

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
GROUP = 32

PRODUCT = layout("shares rows input inputs weight form bias output outputs")

# Rows up to which weights in fewer bytes save more time than restoring them takes: one tile's.
MAX_COMPACT_ROWS = TILE_ROWS

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

# Inputs of a panel that are restored at once: they stay in the first-level cache.
_RESTORED_AT_ONCE = 3 * GROUP

_full, _half, _one = (tile(rows, TILE_VECTORS) for rows in (TILE_ROWS, TILE_ROWS // 2, 1))


_from_byte, _from_lower, _from_upper = restore(8, 0), restore(4, 0), restore(4, 4)


@numba.njit(**OPTIONS)
def _multiply(
    rows: int, left: Any, panel: int, inputs: int, results: int, adds: int, ahead: Any
) -> None:
    """results[rows, PANEL] = or += left[rows, inputs] . panel[inputs, PANEL]; see `tile`."""
    left, right, result = (left[0], left[1], 4), (panel, 4 * PANEL), (results, 4 * PANEL)
    if rows == 1:
        _one(rows, left, right, inputs, result, adds, ahead)
    elif rows <= TILE_ROWS // 2:
        _half(rows, left, right, inputs, result, adds, ahead)
    else:
        _full(rows, left, right, inputs, result, adds, ahead)


@numba.njit(**OPTIONS)
def bytes_of(form: int, inputs: int) -> int:
    """Bytes of a panel with this number of inputs, a multiple of GROUP for integer forms."""
    if form == FLOAT32:
        return 4 * PANEL * inputs
    if form == BFLOAT16:
        return 2 * PANEL * inputs
    counts = GROUP * PANEL if form == INT8 else GROUP * PANEL // 2
    return inputs // GROUP * (8 * PANEL + counts)


@numba.njit(**OPTIONS)
def _restore(form: int, source: int, inputs: int, target: int) -> None:
    """So many inputs of a panel to float32 [inputs, PANEL]; of groups, whole ones."""
    if form == BFLOAT16:
        halves = numba.carray(pointer(source), inputs * PANEL, np.uint16)
        bits = numba.carray(pointer(target), inputs * PANEL, np.uint32)
        for j in range(inputs * PANEL):
            bits[j] = np.uint32(halves[j]) << np.uint32(16)
        return
    for _ in range(inputs // GROUP):
        for i in range(GROUP if form == INT8 else GROUP // 2):
            for j in range(0, 4 * PANEL, 4 * LANES):
                counts, weights = (
                    source + 8 * PANEL + i * PANEL + j // 4,
                    target + 4 * PANEL * i + j,
                )
                scales, minima = source + j, source + 4 * PANEL + j
                if form == INT8:
                    _from_byte(counts, scales, minima, weights)
                else:
                    _from_lower(counts, scales, minima, weights)
                    _from_upper(counts, scales, minima, weights + 2 * PANEL * GROUP)
        source += bytes_of(form, GROUP)
        target += 4 * PANEL * GROUP


@numba.njit(**OPTIONS)
def _put(job: Any, row: int, rows: int, panel: int, results: Any) -> None:
    """A panel's results for some rows, with the bias, to the job's output."""
    first = panel * PANEL
    count = min(PANEL, job.outputs - first)
    for number in range(rows):
        target = vector(job.output + 4 * ((row + number) * job.outputs + first), count)
        sums = results[number]
        if job.bias:
            bias = vector(job.bias + 4 * panel * PANEL, PANEL)
            for j in range(PANEL):
                sums[j] += bias[j]
        for j in range(count):
            target[j] = sums[j]


def _product(address: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(pointer(address), 1, PRODUCT)[0]
    form, inputs = job.form, job.inputs
    panels = -(-job.outputs // PANEL)
    panel_bytes = bytes_of(form, inputs)
    # Vectors that cross cache lines take twice as long: rows of both begin at one.
    at_once = inputs if form == FLOAT32 else min(inputs, _RESTORED_AT_ONCE)
    lines = TILE_ROWS + (0 if form == FLOAT32 else at_once)
    floats = np.empty(lines * PANEL + CACHE_LINE, np.float32)
    results = aligned(floats)
    restored = results + 4 * TILE_ROWS * PANEL
    shares = panels * -(-job.rows // _ROWS_AT_ONCE)
    share = next_share(address)
    while share < shares:
        following = next_share(address)
        first, panel = share // panels * _ROWS_AT_ONCE, share % panels
        last = min(job.rows, first + _ROWS_AT_ONCE)
        # The tiles of this panel prefetch the next one in equal parts.
        ahead = job.weight + following % panels * panel_bytes
        step = max(1, panel_bytes // (-(-(last - first) // TILE_ROWS) * LINES * inputs))
        for row in range(first, last, TILE_ROWS):
            rows = min(TILE_ROWS, last - row)
            for done in range(0, inputs, at_once):
                count = min(inputs - done, at_once)
                weights = job.weight + panel * panel_bytes + bytes_of(form, done)
                if form != FLOAT32:
                    _restore(form, weights, count, restored)
                    weights = restored
                left = job.input + 4 * (inputs * row + done), 4 * inputs
                _multiply(rows, left, weights, count, results, done > 0, (ahead, step))
                ahead += count * LINES * step
            _put(job, row, rows, panel, matrix(results, rows, PANEL))
        share = following
    hold(floats)


product = Kernel(_product)
