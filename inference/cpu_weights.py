"""Panels of weights in fewer bytes than float32, and their way back, to the last bit.

Where rows are few, a product takes as long as its weights take to be read. What a checkpoint
stores in 4, 8 or 16 bits per weight fills a float32 without needing all of it; `compact` finds such
a form, and products turn a part of a panel into float32 in a core's cache before they multiply.

Forms: `FLOATS` as they are; `HALVES`, bfloat16; `BYTES` and `NIBBLES`, per group of `GROUP` inputs
of one output a step and a lowest weight, and for each weight how many steps it lies above that. In
memory, a panel's groups follow each other: steps [PANEL], lowest [PANEL], then counts: bytes
[GROUP, PANEL], or bytes [GROUP / 2, PANEL] with the group's first inputs in their lower halves and
the others in their upper halves.

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

FLOATS, HALVES, BYTES, NIBBLES = range(4)

GROUP = 32
_HEAD_BYTES = 2 * 4 * PANEL
_GROUP_BYTES = {BYTES: _HEAD_BYTES + GROUP * PANEL, NIBBLES: _HEAD_BYTES + GROUP * PANEL // 2}
_BYTES, _NIBBLES = _GROUP_BYTES[BYTES], _GROUP_BYTES[NIBBLES]
_VECTORS = range(PANEL // LANES)


@numba.njit(**OPTIONS)
def bytes_of(form: int, inputs: int) -> int:
    """What so many inputs of a panel take; of groups, whole ones."""
    if form == FLOATS:
        return 4 * PANEL * inputs
    if form == HALVES:
        return 2 * PANEL * inputs
    return inputs // GROUP * (_BYTES if form == BYTES else _NIBBLES)


@intrinsic
def _from_halves(_context: Any, _source: Any, _inputs: Any, _target: Any) -> Any:
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
    """Group by group; steps and lowest weights stay in registers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, inputs, target = arguments
        code = Code(builder)
        groups = builder.sdiv(inputs, code.constant(GROUP))
        with cgutils.for_range(builder, groups) as group:
            at = code.offset(source, group.index, _GROUP_BYTES[form])
            to = code.offset(target, group.index, 4 * PANEL * GROUP)
            steps, lowest = (
                [code.vector(at, 4 * (first + LANES * number)) for number in _VECTORS]
                for first in (0, PANEL)
            )
            counts_at = builder.add(at, code.constant(_HEAD_BYTES))
            rows = GROUP // 2 if form == NIBBLES else GROUP
            with cgutils.for_range(builder, code.constant(rows)) as loop:
                from_row = code.offset(counts_at, loop.index, PANEL)
                to_row = code.offset(to, loop.index, 4 * PANEL)
                for number in _VECTORS:
                    counts = code.integers(from_row, LANES * number, bits=8)
                    parts = code.nibbles(counts) if form == NIBBLES else (counts,)
                    for part, some in enumerate(parts):
                        weights = code.multiple(some, steps[number], lowest[number])
                        code.put(weights, to_row, 4 * (LANES * number + part * rows * PANEL))
        return context.get_dummy_value()

    @intrinsic
    def turn(_context: Any, _source: Any, _inputs: Any, _target: Any) -> Any:
        return types.void(*[types.int64] * 3), generate

    return turn


_from_bytes, _from_nibbles = _from_groups(BYTES), _from_groups(NIBBLES)


@numba.njit(**OPTIONS)
def expand(form: int, source: int, inputs: int, target: int) -> None:
    """So many inputs of a panel to float32 [inputs, PANEL]; of groups, whole ones."""
    if form == HALVES:
        _from_halves(source, inputs, target)
    elif form == BYTES:
        _from_bytes(source, inputs, target)
    else:
        _from_nibbles(source, inputs, target)
