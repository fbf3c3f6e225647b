"""Draws from whole distributions on a CPU: one compiled pass per row instead of many over all.

What `sampling._sample_block` does with torch for a draw that is not cut by top_k or top_p, and for
the most likely token.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from inference.cpu_exp import weigh
from inference.cpu_jobs import OPTIONS, Job, Kernel, doubles, next_share, vector, words
from inference.cpu_vectors import highest

# int64 words of a job; the first is its counter.
_ROWS, _LOGITS, _VOCABULARY, _UNIFORM, _TEMPERATURE, _FORBIDDEN, _NUM_FORBIDDEN = range(1, 8)
_TOKENS, _LOGPROBS = 8, 9
_WORDS = 10

# Weights that are summed up together, and in which the token is then looked for.
_BLOCK = 256

# Logits may be minus infinity, which OPTIONS assume away.
_WITH_INFINITY = {**OPTIONS, "fastmath": {"nnan", "nsz", "reassoc", "contract", "arcp"}}


def draw(
    logits: Tensor, temperature: float, uniform: Tensor | None, forbidden: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Next tokens [rows] and their log-probabilities [rows] under the untouched distribution.

    logits: float32 [rows, vocabulary]; uniform: float64 [rows], None for the most likely tokens;
    `forbidden` tokens are not drawn.
    """
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    scale = np.array([temperature])
    taboo = np.array(sorted(forbidden), np.int64)
    job = (
        rows,
        logits.data_ptr(),
        vocabulary,
        0 if uniform is None else uniform.data_ptr(),
        scale.ctypes.data,
        taboo.ctypes.data,
        len(taboo),
        tokens.data_ptr(),
        logprobs.data_ptr(),
    )
    _kernel.run(Job(_WORDS), job, 16 * logits.numel())
    return tokens, logprobs


@numba.njit(**_WITH_INFINITY)
def _weights(logits: Any, most: Any, scale: Any, weights: Any) -> Any:
    """Fill in exp((logit - most) * scale); returns their sum."""
    return weigh(logits.ctypes.data, weights.ctypes.data, logits.shape[0], most, scale)


@numba.njit(**_WITH_INFINITY)
def _sums(logits: Any, most: Any, scale: Any, weights: Any, sums: Any) -> Any:
    """Fill in the sum of each block's weights; returns the sum of all."""
    total = 0.0
    for block in range(sums.shape[0]):
        first = block * _BLOCK
        part = logits[first : min(first + _BLOCK, logits.shape[0])]
        sums[block] = _weights(part, most, scale, weights)
        total += sums[block]
    return total


@numba.njit(**_WITH_INFINITY)
def _passes(weights: Any, target: Any) -> Any:
    """The first index whose running sum is above the target, and what was summed up before it.

    Always one of weight above 0: rounding may push the target past the end.
    """
    running, last, before = 0.0, 0, 0.0
    for j in range(weights.shape[0]):
        if weights[j] > 0:
            last, before = j, running
            running += weights[j]
            if running > target:
                break
    return last, before


@numba.njit(**_WITH_INFINITY)
def _inverse(logits: Any, most: Any, scale: Any, sums: Any, weights: Any, target: Any) -> Any:
    """The token at which the running sum of weights passes the target."""
    block, before = _passes(sums, target)
    first = block * _BLOCK
    part = logits[first : min(first + _BLOCK, logits.shape[0])]
    _weights(part, most, scale, weights)
    inside, _ = _passes(weights[: part.shape[0]], target - before)
    return first + inside


@numba.njit(**_WITH_INFINITY)
def _first(logits: Any, value: Any) -> Any:
    for j in range(logits.shape[0]):
        if logits[j] == value:
            return j
    return 0


@numba.njit(**_WITH_INFINITY)
def _draw_row(job: Any, row: int, weights: Any, sums: Any, taken: Any) -> None:
    vocabulary, one = job[_VOCABULARY], np.float32(1)
    logits_at = job[_LOGITS] + 4 * row * vocabulary
    logits, untouched = vector(logits_at, vocabulary), highest(logits_at, vocabulary)
    total = _sums(logits, untouched, one, weights, sums)
    forbidden = numba.carray(words(job[_FORBIDDEN]), (job[_NUM_FORBIDDEN],))
    for number in range(forbidden.shape[0]):
        taken[number] = logits[forbidden[number]]
        logits[forbidden[number]] = -np.inf
    most = highest(logits_at, vocabulary) if forbidden.shape[0] else untouched
    if job[_UNIFORM]:
        scale = np.float32(1 / numba.carray(doubles(job[_TEMPERATURE]), (1,))[0])
        sum_of_weights = total
        if scale != one or forbidden.shape[0]:
            sum_of_weights = _sums(logits, most, scale, weights, sums)
        target = numba.carray(doubles(job[_UNIFORM]), (job[_ROWS],))[row] * sum_of_weights
        token = _inverse(logits, most, scale, sums, weights, target)
    else:
        token = _first(logits, most)
    numba.carray(words(job[_TOKENS]), (job[_ROWS],))[row] = token
    vector(job[_LOGPROBS], job[_ROWS])[row] = logits[token] - untouched - math.log(total)
    for number in range(forbidden.shape[0]):
        logits[forbidden[number]] = taken[number]


def _draw(job_words: Any) -> None:
    """Some rows; every thread runs it until none is left."""
    job = numba.carray(job_words, (_WORDS,))
    weights = np.empty(_BLOCK, np.float32)
    sums = np.empty(-(-job[_VOCABULARY] // _BLOCK), np.float64)
    taken = np.empty(job[_NUM_FORBIDDEN], np.float32)
    row = next_share(job_words)
    while row < job[_ROWS]:
        _draw_row(job, row, weights, sums, taken)
        row = next_share(job_words)


_kernel = Kernel(_draw)
