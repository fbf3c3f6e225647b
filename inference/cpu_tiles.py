"""Inner products of a few rows with panels of `PANEL` columns, in registers; see `cpu_product`.

Knows addresses and sizes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_vectors import IS_WIDE, LANES, Code

# A tile of results stays in registers: rows times vectors of columns, beside one input's vectors of
# the panel and one value of the rows. 32 registers of 16 floats hold 8 x 3, 16 of 8 hold 4 x 3.
TILE_ROWS = 8 if IS_WIDE else 4
_VECTORS = 3
PANEL = LANES * _VECTORS

CACHE_LINE = 64
LINES = -(-4 * PANEL // CACHE_LINE)  # of one input's columns

# Inputs before its turn that a panel's line is asked for from the second-level cache.
_AHEAD = 16


def tile(
    rows: int,
    fetches: int = 0,
    *,
    vectors: int = _VECTORS,
    by_column: bool = False,
    adds: bool = False,
    strides: Sequence[int] = (),
) -> Any:
    """result[rows, PANEL] = rows[rows, inputs] . panel[inputs, PANEL], as an intrinsic.

    Of other `vectors`, panel and result are as many vectors wide.

    Arguments: address of the rows and `stride`, address of the panel, number of inputs, address of
    the result; for `fetches` cache lines asked for per input, the address of the first and the
    bytes to go on by. `stride` is the bytes from row to row; if `by_column`, from input to input,
    and the rows are neighbours. If it `adds`, sums go on from what is there, as if inputs before
    these had led to it. There is faster code for some `strides`.
    """

    generate = _generator(rows, fetches, vectors, by_column, adds, strides)

    @intrinsic
    def multiply(
        _context: Any,
        _rows: Any,
        _stride: Any,
        _panel: Any,
        _inputs: Any,
        _result: Any,
        _fetch: Any,
        _step: Any,
    ) -> Any:
        return types.void(*[types.int64] * 7), generate

    return multiply


def _generator(
    rows: int, fetches: int, vectors: int, by_column: bool, adds: bool, strides: Sequence[int]
) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        first_row, any_stride, panel, inputs, result, fetch, step = arguments
        code = Code(builder)

        def multiply(stride: Any) -> None:
            width = 4 * LANES
            places = [[width * (vectors * row + v) for v in range(vectors)] for row in range(rows)]
            zero = code.number(0.0)
            sums = [
                [code.variable(code.vector(result, at) if adds else zero) for at in of_row]
                for of_row in places
            ]
            to_row: Any = 4 if by_column else stride
            to_input: Any = stride if by_column else 4
            starts = [code.offset(first_row, code.constant(row), to_row) for row in range(rows)]
            with cgutils.for_range(builder, inputs) as loop:
                for number in range(fetches):
                    at = code.offset(code.constant(number), loop.index, fetches)
                    code.fetch(code.offset(fetch, at, step), level=2)
                here = code.offset(panel, loop.index, 4 * LANES * vectors)
                for line in range(LINES if fetches else 0):
                    ahead = code.constant(4 * LANES * vectors * _AHEAD + CACHE_LINE * line)
                    code.fetch(builder.add(here, ahead), level=1)
                columns = [code.vector(here, 4 * LANES * number) for number in range(vectors)]
                for start, row_sums in zip(starts, sums, strict=True):
                    value = code.everywhere(code.offset(start, loop.index, to_input))
                    for column, total in zip(columns, row_sums, strict=True):
                        code.add_product(value, column, total)
            for of_row, row_sums in zip(places, sums, strict=True):
                for at, total in zip(of_row, row_sums, strict=True):
                    code.store(total, result, at)

        code.knowing(any_stride, strides, multiply)
        return context.get_dummy_value()

    return generate
