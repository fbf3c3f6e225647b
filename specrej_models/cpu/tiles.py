"""All code that is written as LLVM IR: matrix tiles in registers, and a softmax on columns.

`tile(rows, vectors)` makes a function that computes

    result[r, c]  =  or +=  sum over i of  left[r, i] * right[i, c]

for up to `rows` rows and exactly `vectors * LANES` neighbouring columns. All sums stay in vector
registers for the whole loop over i. Each step of the loop loads `vectors` vectors of row i of
`right`, broadcasts `rows` single values of `left`, and does `rows * vectors` fused multiply-adds:

    registers        AVX-512: 32 of 16 lanes      AVX2: 16 of 8 lanes
    sums             8 rows x 3 vectors = 24      4 rows x 3 vectors = 12
    others           3 of right, 1 of left        3 of right, 1 of left

The 12 or more independent sums cover the latency of a multiply-add (4 to 5 cycles, two per cycle).
Strides are arguments, which cost nothing where they are constants: the tile is inlined. So it does

    products         left = rows of activations      right = a panel of weights
    scores           left = keys, one row a token    right = queries, one column each
    weighted sums    left = columns of the scores    right = values, one row a token

* Order: every sum runs over i in ascending order in one register lane, so a row's result has the
  same last bit whatever its batch. With `adds`, sums start from what `result` holds.
* Bounds: with fewer rows than the tile has, the pointers of the missing rows repeat the last row,
  which is stored more than once, with equal values. `right` and `result` have all columns.
* Prefetches per step: the row of `right` `_AHEAD` steps from now, into the first-level cache; and,
  by `ahead = (address, step)`, `LINES` cache lines, `step` bytes apart, into the second-level
  cache: what the caller reads next, spread evenly over the tiles before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

IS_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if IS_WIDE else 8  # float32 per vector
TILE_ROWS = 8 if IS_WIDE else 4
TILE_VECTORS = 3
PANEL = LANES * TILE_VECTORS  # columns of the widest tile
CACHE_LINE = 64
LINES = -(-4 * PANEL // CACHE_LINE)  # prefetches per step of a tile's loop
_AHEAD = 16

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _INTEGERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)

# 2**f on [-0.5, 0.5]: Taylor, degree 7, the highest power first.
_POWERS = np.cumprod([1.0, *(math.log(2) / k for k in range(1, 8))])[::-1]
_LEAST = -87.0  # e**x below it is 0


def _emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a compiled function of one that emits its instructions with an `ir.IRBuilder`."""

    def function(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            value = emit(builder, *arguments)
            return context.get_dummy_value() if value is None else value

        def typed(*_arguments: Any) -> Any:
            return result(*kinds), generate

        # Its first parameter is numba's typing context.
        kind = inspect.Parameter.POSITIONAL_ONLY
        parameters = [inspect.Parameter(f"_{n}", kind) for n in range(len(kinds) + 1)]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return function


def tile(rows: int, vectors: int) -> Any:
    """A compiled function of (count, left, right, inputs, result, adds, ahead).

    `count` rows, 1 <= count <= rows; left: (address, bytes between rows, bytes between inputs);
    right: (address, bytes between inputs); result: (address, bytes between rows); `adds`: 0 or 1;
    ahead: (address, bytes between prefetches).
    """
    one, pair, triple = types.int64, *(types.UniTuple(types.int64, size) for size in (2, 3))

    @_emitted(types.void, one, triple, pair, one, pair, one, pair)
    def multiply(builder: Any, *arguments: Any) -> None:
        count, left, right, inputs, result, adds, ahead = arguments
        left, left_row, left_input = cgutils.unpack_tuple(builder, left, 3)
        right, right_input = cgutils.unpack_tuple(builder, right, 2)
        result, result_row = cgutils.unpack_tuple(builder, result, 2)
        ahead, step = cgutils.unpack_tuple(builder, ahead, 2)
        zero, is_sum = ir.Constant(_VECTOR, None), builder.icmp_signed("!=", adds, _INT64(0))
        last = builder.sub(count, _INT64(1))
        starts, targets, sums = [], [], []
        for row in range(rows):
            number = builder.select(builder.icmp_signed("<", last, _INT64(row)), last, _INT64(row))
            starts.append(_at(builder, left, number, left_row))
            targets.append(_at(builder, result, number, result_row))
            there = [_load(builder, targets[row], 4 * LANES * v) for v in range(vectors)]
            begins = [builder.select(is_sum, value, zero) for value in there]
            sums.append([cgutils.alloca_once_value(builder, value) for value in begins])
        with cgutils.for_range(builder, inputs) as loop:
            for line in range(LINES):
                number = builder.add(builder.mul(loop.index, _INT64(LINES)), _INT64(line))
                _prefetch(builder, _at(builder, ahead, number, step), level=2)
            here = _at(builder, right, loop.index, right_input)
            soon = _at(builder, here, _INT64(_AHEAD), right_input)
            for byte in range(0, 4 * LANES * vectors, CACHE_LINE):
                _prefetch(builder, builder.add(soon, _INT64(byte)), level=1)
            columns = [_load(builder, here, 4 * LANES * vector) for vector in range(vectors)]
            for start, row_sums in zip(starts, sums, strict=True):
                at = _at(builder, start, loop.index, left_input)
                value = builder.load(builder.inttoptr(at, _FLOAT.as_pointer()), align=4)
                value = builder.insert_element(zero, value, _INT32(0))
                value = builder.shuffle_vector(value, zero, ir.Constant(_INTEGERS, None))
                for column, total in zip(columns, row_sums, strict=True):
                    product = _float_call(builder, "fma", value, column, builder.load(total))
                    builder.store(product, total)
        for target, row_sums in zip(targets, sums, strict=True):
            for vector, total in enumerate(row_sums):
                _store(builder, builder.load(total), target, 4 * LANES * vector)

    return multiply


@_emitted(types.void, *[types.int64] * 4)
def softmax_columns(builder: Any, scores: Any, line: Any, tokens: Any, totals: Any) -> None:
    """Column by column, scores become exp(score - highest), and `totals` their sums.

    Addresses of scores, `line` bytes between tokens, and of totals; `LANES` columns, one a lane.
    """
    highest = cgutils.alloca_once_value(builder, _load(builder, scores, 0))
    total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None))
    with cgutils.for_range(builder, tokens) as loop:
        score = _load(builder, _at(builder, scores, loop.index, line), 0)
        builder.store(_float_call(builder, "maxnum", builder.load(highest), score), highest)
    with cgutils.for_range(builder, tokens) as loop:
        at = _at(builder, scores, loop.index, line)
        weight = _exp(builder, builder.fsub(_load(builder, at, 0), builder.load(highest)))
        _store(builder, weight, at, 0)
        # With a flag, numba adds none of its own: they let the sum's order depend on `tokens`.
        builder.store(builder.fadd(builder.load(total), weight, flags=("nsz",)), total)
    _store(builder, builder.load(total), totals, 0)


@_emitted(types.float32, types.float32)
def exp(builder: Any, x: Any) -> Any:
    """e**x for x <= 0, 0 below -87; relative error below 1e-5. LLVM vectorises its loops."""
    return _exp(builder, x)


@_emitted(types.float32, types.float32, types.float32)
def maximum(builder: Any, first: Any, second: Any) -> Any:
    """The larger of two. LLVM vectorises its loops, but not those of Python's max."""
    return _float_call(builder, "maxnum", first, second)


@_emitted(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """An address as a pointer that `numba.carray` takes."""
    return builder.inttoptr(address, cgutils.voidptr_t)


@_emitted(types.int64, types.int64)
def next_share(builder: Any, counter: Any) -> Any:
    """Add 1 to the int64 at an address, atomically; returns what it was."""
    place = builder.inttoptr(counter, _INT64.as_pointer())
    return builder.atomic_rmw("add", place, _INT64(1), "monotonic")


@_emitted(types.void, types.int64, types.int64)
def call(builder: Any, function: Any, argument: Any) -> None:
    """Call the compiled void(int64) function at an address."""
    kind = ir.FunctionType(ir.VoidType(), [_INT64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


def _exp(builder: Any, x: Any) -> Any:
    """Of one float32 or a vector: 2**f by a polynomial, times the power of two by its bits."""
    is_vector = isinstance(x.type, ir.VectorType)

    def constant(value: float) -> Any:
        return ir.Constant(x.type, [value] * LANES if is_vector else value)

    is_some = builder.fcmp_ordered(">", x, constant(_LEAST))
    x = builder.fmul(builder.select(is_some, x, constant(_LEAST)), constant(1 / math.log(2)))
    whole = _float_call(builder, "rint", x)
    fraction, total = builder.fsub(x, whole), constant(_POWERS[0])
    for power in _POWERS[1:]:
        total = _float_call(builder, "fma", total, fraction, constant(power))
    bits = builder.fmul(builder.fadd(whole, constant(127)), constant(2**23))
    bits = builder.fptosi(bits, _INTEGERS if is_vector else _INT32)
    total = builder.fmul(total, builder.bitcast(bits, x.type))
    return builder.select(is_some, total, constant(0))


def _float_call(builder: Any, name: str, *arguments: Any) -> Any:
    """LLVM's intrinsic function of that name, on float32 or vectors of them."""
    kind = arguments[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    signature = ir.FunctionType(kind, [kind] * len(arguments))
    function = builder.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), signature)
    return builder.call(function, arguments)


def _at(builder: Any, base: Any, count: Any, size: Any) -> Any:
    return builder.add(base, builder.mul(count, size))


def _load(builder: Any, address: Any, offset: int) -> Any:
    at = builder.inttoptr(builder.add(address, _INT64(offset)), _VECTOR.as_pointer())
    return builder.load(at, align=4)


def _store(builder: Any, value: Any, address: Any, offset: int) -> None:
    at = builder.inttoptr(builder.add(address, _INT64(offset)), _VECTOR.as_pointer())
    builder.store(value, at, align=4)


def _prefetch(builder: Any, address: Any, level: int) -> None:
    """Of data to be read, into the cache of that level, 1 or 2."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    place = builder.inttoptr(address, cgutils.voidptr_t)
    builder.call(function, [place, _INT32(0), _INT32(4 - level), _INT32(1)])
