"""Products of a few to a few hundred float32 rows with weights, compiled by numba.

A decode step reads all weights once. Libraries read them and multiply in turns; here each thread
asks for its next panel of weights while it multiplies with the last one, so that a product takes
about as long as the longer of the two (`python -m benchmarks.linear`). Each result is summed up in
the same order whatever the number of rows, so that a row's results do not depend on its batch.

Weights lie in panels of `PANEL` outputs: [panels, inputs, PANEL], the last one filled with zeros.
Knows addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from generator_service.cpu_jobs import OPTIONS, Kernel, next_share, vector

# int64 words of a product's job; the first is its counter.
ROWS, INPUT, INPUTS, WEIGHT, BIAS, OUTPUT, OUTPUTS, ADDS = range(1, 9)
WORDS = 9

# A tile of results stays in registers: rows times vectors of outputs, beside one input's vectors of
# weights and one value of the rows. 32 registers of 16 floats hold 8 x 3, 16 of 8 hold 4 x 3.
_WIDE = "avx512f" in {name for name, has in binding.get_host_cpu_features().items() if has}
_LANES, _TILE_ROWS = (16, 8) if _WIDE else (8, 4)
_VECTORS = 3
PANEL = _LANES * _VECTORS

# Rows whose inputs stay in a core's cache beside a panel of weights.
_ROWS_AT_ONCE = 128

_CACHE_LINE = 64
_LINES = -(-4 * PANEL // _CACHE_LINE)  # of one input's weights


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
        code = _Code(builder)
        sums = [[code.vector_of_zeros() for _ in range(_VECTORS)] for _ in range(rows)]
        starts = [code.offset(first_row, inputs, 4 * row) for row in range(rows)]
        with cgutils.for_range(builder, inputs) as loop:
            for number in range(fetches):
                at = code.offset(code.constant(number), loop.index, fetches)
                code.fetch(code.offset(fetch, at, step))
            here = code.offset(panel, loop.index, 4 * PANEL)
            weights = [code.vector(here, 4 * _LANES * number) for number in range(_VECTORS)]
            for start, row_sums in zip(starts, sums, strict=True):
                value = code.everywhere(code.offset(start, loop.index, 4))
                for weight, total in zip(weights, row_sums, strict=True):
                    code.add_product(value, weight, total)
        for number, total in enumerate(total for row_sums in sums for total in row_sums):
            code.store(total, result, 4 * _LANES * number)
        return context.get_dummy_value()

    return generate


class _Code:
    """LLVM instructions on vectors of `_LANES` float32 at int64 addresses."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._float = ir.FloatType()
        self._vector = ir.VectorType(self._float, _LANES)
        self._byte = ir.IntType(8).as_pointer()
        self._add = self._function(
            f"llvm.fma.v{_LANES}f32", ir.FunctionType(self._vector, [self._vector] * 3)
        )
        number = ir.IntType(32)
        self._prefetch = self._function(
            "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [self._byte, *[number] * 3])
        )

    def _function(self, name: str, kind: Any) -> Any:
        known = self._builder.module.globals.get(name)
        return known or ir.Function(self._builder.module, kind, name)

    def constant(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def offset(self, base: Any, count: Any, size: Any) -> Any:
        """base + count * size."""
        size = self.constant(size) if isinstance(size, int) else size
        return self._builder.add(base, self._builder.mul(count, size))

    def vector_of_zeros(self) -> Any:
        """A variable, which LLVM keeps in a register."""
        place = cgutils.alloca_once(self._builder, self._vector)
        self._builder.store(ir.Constant(self._vector, [0.0] * _LANES), place)
        return place

    def vector(self, address: Any, beyond: int) -> Any:
        loaded = self._builder.load(self._pointer(address, beyond, self._vector))
        loaded.align = 4
        return loaded

    def everywhere(self, address: Any) -> Any:
        """A vector of one float32."""
        unset = ir.Constant(self._vector, ir.Undefined)
        first = ir.Constant(ir.IntType(32), 0)
        value = self._builder.load(self._pointer(address, 0, self._float))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        alone = self._builder.insert_element(unset, value, first)
        return self._builder.shuffle_vector(alone, unset, lanes)

    def add_product(self, value: Any, weight: Any, total: Any) -> None:
        builder = self._builder
        builder.store(builder.call(self._add, [value, weight, builder.load(total)]), total)

    def store(self, total: Any, address: Any, beyond: int) -> None:
        place = self._pointer(address, beyond, self._vector)
        self._builder.store(self._builder.load(total), place).align = 4

    def fetch(self, address: Any) -> None:
        """Ask for a cache line to be read into the second-level cache."""
        read, second_level, data = (ir.Constant(ir.IntType(32), value) for value in (0, 2, 1))
        pointer = self._builder.inttoptr(address, self._byte)
        self._builder.call(self._prefetch, [pointer, read, second_level, data])

    def _pointer(self, address: Any, beyond: int, kind: Any) -> Any:
        at = self._builder.add(address, self.constant(beyond))
        return self._builder.inttoptr(at, kind.as_pointer())


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
def _put(job: Any, row: int, rows: int, output: int, tile: Any) -> None:
    """Results of some rows, for the outputs from `output` on, to where they belong."""
    size = min(PANEL, job[OUTPUTS] - output)
    for number in range(rows):
        target = vector(job[OUTPUT] + 4 * ((row + number) * job[OUTPUTS] + output), size)
        if job[BIAS]:
            bias = vector(job[BIAS] + 4 * output, size)
            for j in range(size):
                tile[number, j] += bias[j]
        if job[ADDS]:
            for j in range(size):
                target[j] += tile[number, j]
        else:
            for j in range(size):
                target[j] = tile[number, j]


def _product(job_words: Any) -> None:
    """Some panels of weights; every thread runs it until none is left."""
    job = numba.carray(job_words, (WORDS,))
    inputs, panels = job[INPUTS], -(-job[OUTPUTS] // PANEL)
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
            _put(job, row, rows, panel * PANEL, tile)
        share = following


product = Kernel(_product)
