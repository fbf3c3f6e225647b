"""Loops over e**x on whole vectors: a softmax's weights. Knows addresses and sizes only.

LLVM's own vectors of such loops are half as wide, and their integers twice as wide as need be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_jobs import OPTIONS, exp
from inference.cpu_vectors import LANES, Code

# A score that nobody has: infinity is not for arithmetic that counts on there being none.
HIDDEN = np.float32(-1e30)


@numba.njit(**OPTIONS)
def cap(scores: Any, scale: Any, softcap: Any) -> None:
    """softcap * tanh(score * scale / softcap) in place of scores [tokens, lanes], but of HIDDEN."""
    for t in range(scores.shape[0]):
        for lane in range(scores.shape[1]):
            if scores[t, lane] > HIDDEN:
                x = scores[t, lane] * scale / softcap
                e = exp(-2 * abs(x))
                tanh = (1 - e) / (1 + e)
                scores[t, lane] = softcap * (tanh if x >= 0 else -tanh)


@intrinsic
def weigh(_context: Any, _source: Any, _target: Any, _count: Any, _most: Any, _scale: Any) -> Any:
    """target[i] = exp((source[i] - most) * scale); returns their sum.

    Addresses of float32 [count], the same or apart; `most` is at least their highest; what is minus
    infinity, or too far below it, becomes 0.
    """
    kinds = (types.int64, types.int64, types.int64, types.float32, types.float32)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, target, count, most, scale = arguments
        code = Code(builder)
        most, scale, sums = code.spread(most), code.spread(scale), code.vector_of(0.0)

        def weight(values: Any) -> Any:
            return code.exp(builder.fmul(builder.fsub(values, most), scale))

        whole = builder.udiv(count, code.constant(LANES))
        with cgutils.for_range(builder, whole) as loop:
            at = builder.mul(loop.index, code.constant(4 * LANES))
            weights = weight(code.vector(builder.add(source, at), 0))
            code.put(weights, builder.add(target, at), 0)
            builder.store(builder.fadd(builder.load(sums), weights), sums)
        done = builder.mul(whole, code.constant(LANES))
        rest, at = builder.sub(count, done), builder.mul(done, code.constant(4))
        with builder.if_then(builder.icmp_signed(">", rest, code.constant(0))):
            mask = code.lanes_below(rest)
            weights = weight(code.some(builder.add(source, at), mask))
            code.put_some(weights, builder.add(target, at), mask)
            weights = builder.select(mask, weights, code.number(0.0))
            builder.store(builder.fadd(builder.load(sums), weights), sums)
        return code.sum_of_lanes(sums)

    return types.float32(*kinds), generate


def weigh_columns(vectors: int) -> Any:
    """An intrinsic for scores of as many vectors of columns.

    Column by column, scores [count, columns] become exp((score - highest) * scale). Addresses of
    float32; `totals` [columns] become their sums.
    """

    @intrinsic
    def weigh(_context: Any, _scores: Any, _count: Any, _scale: Any, _totals: Any) -> Any:
        kinds = (types.int64, types.int64, types.float32, types.int64)
        return types.void(*kinds), _columns_generator(vectors)

    return weigh


def _columns_generator(vectors: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, count, scale, totals = arguments
        code = Code(builder)
        places, width = range(vectors), 4 * LANES * vectors
        scale = code.spread(scale)
        highest = [code.vector_of(float("-inf")) for _ in places]
        sums = [code.vector_of(0.0) for _ in places]
        with cgutils.for_range(builder, count) as loop:
            row = code.offset(scores, loop.index, width)
            for place in places:
                code.raise_to(code.vector(row, 4 * LANES * place), highest[place])
        with cgutils.for_range(builder, count) as loop:
            row = code.offset(scores, loop.index, width)
            for place in places:
                below = builder.fsub(
                    code.vector(row, 4 * LANES * place), builder.load(highest[place])
                )
                weights = code.exp(builder.fmul(below, scale))
                code.put(weights, row, 4 * LANES * place)
                builder.store(builder.fadd(builder.load(sums[place]), weights), sums[place])
        for place in places:
            code.store(sums[place], totals, 4 * LANES * place)
        return context.get_dummy_value()

    return generate
