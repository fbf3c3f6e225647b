"""Panels of weights in fewer bytes than float32, and their way back, to the last bit.

Where rows are few, a product takes as long as its weights take to be read. What a checkpoint
stores in 4, 8 or 16 bits per weight fills a float32 without needing all of it; `compact` finds such
a form, and products turn a part of a panel into float32 in a core's cache before they multiply.

Forms: `FLOAT32` as they are; `BFLOAT16`; `INT8` and `INT4`, per group of `GROUP` inputs of one
output a scale and a minimum, and for each weight how many scales it lies above that. In memory, a
panel's groups follow each other: scales [PANEL], minima [PANEL], then counts: bytes [GROUP, PANEL],
or bytes [GROUP / 2, PANEL] with the group's first inputs in their lower halves and the others in
their upper halves.

Knows addresses and sizes only.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_jobs import OPTIONS
from inference.cpu_tiles import PANEL
from inference.cpu_vectors import LANES, Code

FLOAT32, BFLOAT16, INT8, INT4 = range(4)

GROUP = 32
_HEAD_BYTES = 2 * 4 * PANEL
_VECTORS = range(PANEL // LANES)


@numba.njit(**OPTIONS)
def bytes_of(form: int, inputs: int) -> int:
    """What so many inputs of a panel take; of groups, whole ones."""
    if form == FLOAT32:
        return 4 * PANEL * inputs
    if form == BFLOAT16:
        return 2 * PANEL * inputs
    counts = GROUP * PANEL
    return inputs // GROUP * (_HEAD_BYTES + (counts if form == INT8 else counts // 2))


@intrinsic
def _from_bfloat16(_context: Any, _source: Any, _inputs: Any, _target: Any) -> Any:
    """bfloat16 are the upper halves of float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, inputs, target = arguments
        code = Code(builder)
        with cgutils.for_range(builder, inputs) as loop:
            at = code.offset(source, loop.index, 2 * PANEL)
            to = code.offset(target, loop.index, 4 * PANEL)
            for number in _VECTORS:
                halves = code.integers(at, 2 * LANES * number, bits=16)
                code.put(code.upper_halves(halves), to, 4 * LANES * number)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _from_groups(form: int) -> Any:
    """Group by group; scales and minima stay in registers."""
    group_bytes = bytes_of.py_func(form, GROUP)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, inputs, target = arguments
        code = Code(builder)
        groups = builder.sdiv(inputs, code.constant(GROUP))
        with cgutils.for_range(builder, groups) as group:
            at = code.offset(source, group.index, group_bytes)
            to = code.offset(target, group.index, 4 * PANEL * GROUP)
            scales, minima = (
                [code.vector(at, 4 * (first + LANES * number)) for number in _VECTORS]
                for first in (0, PANEL)
            )
            counts_at = builder.add(at, code.constant(_HEAD_BYTES))
            rows = GROUP // 2 if form == INT4 else GROUP
            with cgutils.for_range(builder, code.constant(rows)) as loop:
                from_row = code.offset(counts_at, loop.index, PANEL)
                to_row = code.offset(to, loop.index, 4 * PANEL)
                for number in _VECTORS:
                    counts = code.integers(from_row, LANES * number, bits=8)
                    parts = code.nibbles(counts) if form == INT4 else (counts,)
                    for part, some in enumerate(parts):
                        weights = code.scaled(some, scales[number], minima[number])
                        code.put(weights, to_row, 4 * (LANES * number + part * rows * PANEL))
        return context.get_dummy_value()

    @intrinsic
    def turn(_context: Any, _source: Any, _inputs: Any, _target: Any) -> Any:
        return types.void(*[types.int64] * 3), generate

    return turn


_from_int8, _from_int4 = _from_groups(INT8), _from_groups(INT4)


@numba.njit(**OPTIONS)
def dequantize(form: int, source: int, inputs: int, target: int) -> None:
    """So many inputs of a panel to float32 [inputs, PANEL]; of groups, whole ones."""
    if form == BFLOAT16:
        _from_bfloat16(source, inputs, target)
    elif form == INT8:
        _from_int8(source, inputs, target)
    else:
        _from_int4(source, inputs, target)
