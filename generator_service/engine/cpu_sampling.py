"""Draws from whole distributions on a CPU, in compiled code that handles one row at a time.

Replaces `sampling._sample_block` for draws without top_k, top_p and min_p, and for the most likely
token; with or without a structured output.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrej_models.cpu.jobs import OPTIONS, Kernel, job_record, layout, vector
from specrej_models.cpu.tiles import exp, maximum, next_share, pointer

_DRAW = layout(
    "shares rows logits vocabulary uniform forbidden num_forbidden allowed num_words tokens "
    "logprobs",
    "temperature",
)

# Weights per block: a draw finds its block by the blocks' sums, then its token in the block.
_BLOCK = 256

# Logits may be minus infinity, which OPTIONS assume away.
_WITH_INFINITY = {**OPTIONS, "fastmath": {"nnan", "nsz", "reassoc", "contract", "arcp"}}
_INLINED = {**_WITH_INFINITY, "inline": "always"}


def draw(
    logits: Tensor,
    temperature: float,
    uniform: Tensor | None,
    forbidden: Collection[int],
    allowed: NDArray[np.uint32] | None = None,
) -> tuple[Tensor, Tensor]:
    """Next tokens [rows] and their log-probabilities [rows] under the untouched distribution.

    logits: float32 [rows, vocabulary]; uniform: float64 [rows], None for the most likely tokens;
    `forbidden` tokens are not drawn; allowed: bits [rows, words] of the tokens that are.
    """
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    undrawn = np.array(sorted(forbidden), np.int64)
    job = job_record(
        _DRAW,
        rows=rows,
        logits=logits.data_ptr(),
        vocabulary=vocabulary,
        uniform=0 if uniform is None else uniform.data_ptr(),
        forbidden=undrawn.ctypes.data,
        num_forbidden=len(undrawn),
        allowed=0 if allowed is None else allowed.ctypes.data,
        num_words=0 if allowed is None else allowed.shape[1],
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
        temperature=temperature,
    )
    _kernel.run(job, 16 * logits.numel())
    return tokens, logprobs


@numba.njit(**_WITH_INFINITY)
def _highest(logits: Any) -> Any:
    highest = logits[0]
    for j in range(logits.size):
        highest = maximum(highest, logits[j])
    return highest


@numba.njit(**_WITH_INFINITY)
def _weigh(logits: Any, most: Any, scale: Any, weights: Any) -> Any:
    """Set weights to exp((logit - most) * scale), 0 for minus infinity; returns their sum."""
    total = np.float32(0)
    for j in range(logits.size):
        weights[j] = exp((logits[j] - most) * scale)
        total += weights[j]
    return total


@numba.njit(**_WITH_INFINITY)
def _weigh_blocks(logits: Any, most: Any, scale: Any, weights: Any, sums: Any) -> Any:
    """Set `sums` to the sum of each block's weights; returns the sum of all."""
    total = 0.0
    for block in range(sums.size):
        sums[block] = _weigh(logits[block * _BLOCK :][:_BLOCK], most, scale, weights)
        total += sums[block]
    return total


@numba.njit(**_WITH_INFINITY)
def _passes(weights: Any, target: Any) -> Any:
    """The first index whose running sum is above the target, and the sum before it.

    Always one of weight above 0: rounding may push the target past the end.
    """
    running, last, before = 0.0, 0, 0.0
    for j in range(weights.size):
        if weights[j] > 0:
            last, before = j, running
            running += weights[j]
            if running > target:
                break
    return last, before


@numba.njit(**_WITH_INFINITY)
def _select(logits: Any, words: Any, selected: Any) -> None:
    """Set `selected` to the logits whose bits are set, and minus infinity elsewhere."""
    for number in range(min(words.size, -(-logits.size // 32))):
        word, part = words[number], logits[32 * number :][:32]
        for j in range(part.size):
            is_set = (word >> np.uint32(j)) & np.uint32(1)
            selected[32 * number + j] = part[j] if is_set else np.float32(-np.inf)


@numba.njit(**_INLINED)
def _draw_row(job: Any, row: int, weights: Any, sums: Any, held: Any, selected: Any) -> None:
    vocabulary, one = job.vocabulary, np.float32(1)
    logits = untouched_logits = vector(job.logits + 4 * row * vocabulary, vocabulary)
    untouched = _highest(logits)
    total = sum_of_weights = _weigh_blocks(logits, untouched, one, weights, sums)
    if job.allowed:
        address = pointer(job.allowed + 4 * row * job.num_words)
        _select(logits, numba.carray(address, job.num_words, np.uint32), selected)
        logits = selected
    forbidden = numba.carray(pointer(job.forbidden), job.num_forbidden, np.int64)
    for number in range(forbidden.size):
        held[number] = logits[forbidden[number]]
        logits[forbidden[number]] = -np.inf
    is_cut = forbidden.size or job.allowed
    most = _highest(logits) if is_cut else untouched
    if job.uniform:
        scale = np.float32(1 / job.temperature)
        if scale != one or is_cut:
            sum_of_weights = _weigh_blocks(logits, most, scale, weights, sums)
        uniform = numba.carray(pointer(job.uniform), job.rows, np.float64)[row]
        # The token at which the running sum of weights passes the target: its block, then itself.
        target = uniform * sum_of_weights
        block, before = _passes(sums, target)
        part = logits[block * _BLOCK :][:_BLOCK]
        _weigh(part, most, scale, weights)
        token = block * _BLOCK + _passes(weights[: part.size], target - before)[0]
    else:
        token = 0
        while logits[token] != most and token + 1 < vocabulary:
            token += 1
    numba.carray(pointer(job.tokens), job.rows, np.int64)[row] = token
    vector(job.logprobs, job.rows)[row] = untouched_logits[token] - untouched - math.log(total)
    for number in range(forbidden.size):
        logits[forbidden[number]] = held[number]


def _draw(address: Any) -> None:
    """Some rows; every thread runs it until none is left."""
    job = numba.carray(pointer(address), 1, _DRAW)[0]
    weights, held = np.empty(_BLOCK, np.float32), np.empty(job.num_forbidden, np.float32)
    selected = np.empty(job.vocabulary if job.allowed else 0, np.float32)
    sums = np.empty(-(-job.vocabulary // _BLOCK), np.float64)
    row = next_share(address)
    while row < job.rows:
        _draw_row(job, row, weights, sums, held, selected)
        row = next_share(address)


_kernel = Kernel(_draw)
