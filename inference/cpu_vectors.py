"""LLVM instructions on vectors of float32, for what numba's own loops do too slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_jobs import vector

# Registers: 32 of 16 float32, or 16 of 8.
IS_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if IS_WIDE else 8


# 2**f on [-0.5, 0.5]: Taylor, degree 7, the highest first.
_POWERS = (
    1.5252734e-5,
    1.5403530e-4,
    1.3333558e-3,
    9.6181291e-3,
    5.5504109e-2,
    0.24022651,
    0.69314718,
    1.0,
)
_LOG2_E = 1.4426950408889634

# e**x below it is not told from 0.
_LEAST = -87.0


class Code:
    """LLVM instructions on vectors of `LANES` float32 at int64 addresses."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._float = ir.FloatType()
        self._vector = ir.VectorType(self._float, LANES)
        self._integers = ir.VectorType(ir.IntType(32), LANES)
        self._byte = ir.IntType(8).as_pointer()
        self._add = self._function(
            f"llvm.fma.v{LANES}f32", ir.FunctionType(self._vector, [self._vector] * 3)
        )
        self._round = self._function(
            f"llvm.rint.v{LANES}f32", ir.FunctionType(self._vector, [self._vector])
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

    def vector_of(self, value: float) -> Any:
        """A variable, which LLVM keeps in a register."""
        return self.variable(self.number(value))

    def variable(self, value: Any) -> Any:
        """As `vector_of`, of any vector."""
        place = cgutils.alloca_once(self._builder, self._vector)
        self._builder.store(value, place)
        return place

    def vector(self, address: Any, beyond: int) -> Any:
        loaded = self._builder.load(self._pointer(address, beyond, self._vector))
        loaded.align = 4
        return loaded

    def everywhere(self, address: Any) -> Any:
        """A vector of one float32."""
        return self.spread(self._builder.load(self._pointer(address, 0, self._float)))

    def spread(self, value: Any) -> Any:
        """A vector of one float32 that is in a register."""
        unset = ir.Constant(self._vector, ir.Undefined)
        first = ir.Constant(ir.IntType(32), 0)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        alone = self._builder.insert_element(unset, value, first)
        return self._builder.shuffle_vector(alone, unset, lanes)

    def number(self, value: float) -> Any:
        """A vector of one constant."""
        return ir.Constant(self._vector, [value] * LANES)

    def exp(self, x: Any) -> Any:
        """e**x for x <= 0, also minus infinity; relative error below 2e-7, 0 below -87.

        2**f on [-0.5, 0.5] by a polynomial, times the power of two by its bits.
        """
        builder = self._builder
        is_some = builder.fcmp_ordered(">", x, self.number(_LEAST))
        x = builder.select(is_some, x, self.number(_LEAST))
        x = builder.fmul(x, self.number(_LOG2_E))
        whole = builder.call(self._round, [x])
        f = builder.fsub(x, whole)
        total = self.number(_POWERS[0])
        for power in _POWERS[1:]:
            total = builder.call(self._add, [total, f, self.number(power)])
        exponent = builder.fptosi(whole, self._integers)
        exponent = builder.add(exponent, ir.Constant(self._integers, [127] * LANES))
        exponent = builder.shl(exponent, ir.Constant(self._integers, [23] * LANES))
        power_of_two = builder.bitcast(exponent, self._vector)
        return builder.select(is_some, builder.fmul(total, power_of_two), self.number(0.0))

    def lanes_below(self, count: Any) -> Any:
        """A mask: the first `count` (int64) lanes."""
        integers = self._integers
        number = self._builder.trunc(count, ir.IntType(32))
        unset, first = ir.Constant(integers, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        alone = self._builder.insert_element(unset, number, first)
        zeros = ir.Constant(integers, [0] * LANES)
        counts = self._builder.shuffle_vector(alone, unset, zeros)
        numbers = ir.Constant(integers, list(range(LANES)))
        return self._builder.icmp_signed("<", numbers, counts)

    def some(self, address: Any, mask: Any) -> Any:
        """The vector at an address, 0 where the mask is not set: nothing is read there."""
        kind = ir.FunctionType(
            self._vector,
            [self._vector.as_pointer(), ir.IntType(32), mask.type, self._vector],
        )
        load = self._function(f"llvm.masked.load.v{LANES}f32.p0", kind)
        align = ir.Constant(ir.IntType(32), 4)
        pointer = self._pointer(address, 0, self._vector)
        return self._builder.call(load, [pointer, align, mask, self.number(0.0)])

    def put_some(self, value: Any, address: Any, mask: Any) -> None:
        kind = ir.FunctionType(
            ir.VoidType(),
            [self._vector, self._vector.as_pointer(), ir.IntType(32), mask.type],
        )
        store = self._function(f"llvm.masked.store.v{LANES}f32.p0", kind)
        align = ir.Constant(ir.IntType(32), 4)
        pointer = self._pointer(address, 0, self._vector)
        self._builder.call(store, [value, pointer, align, mask])

    def integers(self, address: Any, beyond: int, bits: int) -> Any:
        """A vector of int32 of so many unsigned integers of fewer bits."""
        kind = ir.VectorType(ir.IntType(bits), LANES)
        loaded = self._builder.load(self._pointer(address, beyond, kind))
        loaded.align = 1
        return self._builder.zext(loaded, self._integers)

    def nibbles(self, counts: Any) -> tuple[Any, Any]:
        """Lower and upper halves of the bytes in a vector of int32."""
        builder = self._builder
        four, mask = (ir.Constant(self._integers, [value] * LANES) for value in (4, 15))
        return builder.and_(counts, mask), builder.lshr(counts, four)

    def upper_halves(self, halves: Any) -> Any:
        """The float32 whose upper 16 bits are these int32, and whose lower are 0."""
        shift = ir.Constant(self._integers, [16] * LANES)
        return self._builder.bitcast(self._builder.shl(halves, shift), self._vector)

    def scaled(self, counts: Any, scale: Any, minimum: Any) -> Any:
        """minimum + count * scale, of int32 counts, rounded once."""
        values = self._builder.sitofp(counts, self._vector)
        return self._builder.call(self._add, [values, scale, minimum])

    def add_product(self, value: Any, weight: Any, total: Any) -> None:
        builder = self._builder
        builder.store(builder.call(self._add, [value, weight, builder.load(total)]), total)

    def at_most(self, value: Any, limit: Any) -> Any:
        less = self._builder.icmp_signed("<", value, limit)
        return self._builder.select(less, value, limit)

    def raise_to(self, value: Any, most: Any) -> None:
        """Lane by lane, a variable becomes `value` where that is higher."""
        builder = self._builder
        known = builder.load(most)
        builder.store(builder.select(builder.fcmp_ordered(">", value, known), value, known), most)

    def highest_lane(self, most: Any) -> Any:
        reduce = self._function(
            f"llvm.vector.reduce.fmax.v{LANES}f32", ir.FunctionType(self._float, [self._vector])
        )
        return self._builder.call(reduce, [self._builder.load(most)])

    def sum_of_lanes(self, totals: Any) -> Any:
        """In pairs, halves against each other."""
        kind = ir.FunctionType(self._float, [self._float, self._vector])
        reduce = self._function(f"llvm.vector.reduce.fadd.v{LANES}f32", kind)
        zero = ir.Constant(self._float, -0.0)
        given = [zero, self._builder.load(totals)]
        return self._builder.call(reduce, given, fastmath=("reassoc",))

    def is_odd(self, value: Any) -> Any:
        return self._builder.trunc(value, ir.IntType(1))

    def store(self, total: Any, address: Any, beyond: int) -> None:
        self.put(self._builder.load(total), address, beyond)

    def put(self, value: Any, address: Any, beyond: int) -> None:
        place = self._pointer(address, beyond, self._vector)
        self._builder.store(value, place).align = 4

    def fetch(self, address: Any, level: int) -> None:
        """Ask for a cache line to be read into the cache of that level, 1 or 2."""
        # LLVM: to be read, how local (3 is the first level), data.
        words = [ir.Constant(ir.IntType(32), value) for value in (0, 4 - level, 1)]
        pointer = self._builder.inttoptr(address, self._byte)
        self._builder.call(self._prefetch, [pointer, *words])

    def _pointer(self, address: Any, beyond: int, kind: Any) -> Any:
        at = self._builder.add(address, self.constant(beyond))
        return self._builder.inttoptr(at, kind.as_pointer())

    def knowing(self, value: Any, known: Sequence[int], emit: Callable[[Any], None]) -> None:
        """Code for each value that is known beforehand, as a constant, and for any other.

        Where a stride is a constant, LLVM needs no instructions to add it up.
        """
        if not known:
            emit(value)
            return
        first = self.constant(known[0])
        is_first = self._builder.icmp_signed("==", value, first)
        with self._builder.if_else(is_first) as (then, otherwise):
            with then:
                emit(first)
            with otherwise:
                self.knowing(value, known[1:], emit)

    def turned(self, rows: list[Any]) -> list[Any]:
        """LANES vectors' columns: half of the vectors are woven into the others, repeatedly."""
        lanes = [lane + half for lane in range(LANES) for half in (0, LANES)]
        low, high = (
            ir.Constant(ir.VectorType(ir.IntType(32), LANES), half)
            for half in (lanes[:LANES], lanes[LANES:])
        )
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(rows[: LANES // 2], rows[LANES // 2 :], strict=True)
            weave = self._builder.shuffle_vector
            rows = [weave(*pair, lanes) for pair in pairs for lanes in (low, high)]
        return rows

    def put_part(self, value: Any, first: int, size: int, count: int, address: Any) -> None:
        """Write the first `count` of the `size` lanes from lane `first` on."""
        integers, part = ir.IntType(32), ir.VectorType(self._float, size)
        lanes = ir.Constant(ir.VectorType(integers, size), list(range(first, first + size)))
        taken = self._builder.shuffle_vector(value, ir.Constant(self._vector, ir.Undefined), lanes)
        mask = ir.Constant(
            ir.VectorType(ir.IntType(1), size), [int(lane < count) for lane in range(size)]
        )
        kind = ir.FunctionType(ir.VoidType(), [part, part.as_pointer(), integers, mask.type])
        store = self._function(f"llvm.masked.store.v{size}f32.p0", kind)
        pointer = self._builder.inttoptr(address, part.as_pointer())
        self._builder.call(store, [taken, pointer, ir.Constant(integers, 4), mask])

    def address_at(self, place: Any) -> Any:
        """The int64 that lies there."""
        return self._builder.load(self._builder.inttoptr(place, ir.IntType(64).as_pointer()))

    def sums(self, totals: list[Any]) -> Any:
        """The vector of the sums of LANES variables' lanes."""
        vectors = [self._builder.load(total) for total in totals]
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self._pairwise(first, second) for first, second in pairs]
        return vectors[0]

    def _pairwise(self, first: Any, second: Any) -> Any:
        """Sums of neighbours, those of the first vector before those of the second."""
        halves = []
        for odd in (0, 1):
            lanes = ir.Constant(
                ir.VectorType(ir.IntType(32), LANES), [2 * lane + odd for lane in range(LANES)]
            )
            halves.append(self._builder.shuffle_vector(first, second, lanes))
        return self._builder.fadd(*halves)


@intrinsic
def _highest_of_vectors(_context: Any, _address: Any, _count: Any) -> Any:
    """The highest of `count` float32, at least LANES; LLVM does not vectorise such a loop."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, count = arguments
        code = Code(builder)
        most, last = code.vector_of(float("-inf")), builder.sub(count, code.constant(LANES))
        rounds = builder.sdiv(builder.add(count, code.constant(LANES - 1)), code.constant(LANES))
        with cgutils.for_range(builder, rounds) as loop:
            # The last vector may overlap the one before it.
            first = code.at_most(builder.mul(loop.index, code.constant(LANES)), last)
            code.raise_to(code.vector(code.offset(address, first, 4), 0), most)
        return code.highest_lane(most)

    return types.float32(types.int64, types.int64), generate


@numba.njit(error_model="numpy", nogil=True)
def highest(address: int, count: int) -> Any:
    """The highest of `count` float32; minus infinity for none."""
    if count >= LANES:
        return _highest_of_vectors(address, count)
    most = np.float32(-np.inf)
    values = vector(address, count)
    for j in range(count):
        most = max(most, values[j])
    return most
