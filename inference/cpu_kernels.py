"""What torch does slowly on a CPU with few rows, compiled by numba: all but the products.

A decode step's attention is many tiny products; as torch operations, most of its time goes into
calling them. Here one job per layer serves all rows of all sessions. All tensors are float32. Knows
addresses and sizes only.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from inference.cpu_jobs import OPTIONS, Kernel, matrix, next_share, vector, words
from inference.cpu_prompts import attend_panel
from inference.cpu_rows import attend_rows, row_place, scratch_floats
from inference.cpu_tiles import PANEL
from inference.cpu_words import (
    ALL_PARTS,
    DIM,
    HEADS,
    JOB_WORDS,
    KV_HEADS,
    LONGEST,
    NUM_PROMPTS,
    NUM_SEGMENTS,
    PANELS,
    PART_WORDS,
    PARTS,
    PROMPT_WORDS,
    PROMPTS,
    REALS,
    ROW_PANELS,
    ROWS,
    SEGMENT_WORDS,
    SEGMENTS,
)

# int64 words of the other jobs; the first is their counter.
NORM_ROWS, NORM_INPUT, NORM_OUTPUT, NORM_WEIGHT, NORM_EPSILON, NORM_SIZE = range(1, 7)
NORM_WORDS = 7
ROTATE_ROWS, ROTATE_DATA, ROTATE_COS, ROTATE_SIN, ROTATE_STRIDE = range(1, 6)
ROTATE_HEADS, ROTATE_DIM = 6, 7
ROTATE_WORDS = 8

# Rows of these that a thread takes at a time.
_ROWS_AT_ONCE = 8


@numba.njit(**OPTIONS)
def _panels(prompt: Any, group: int) -> Any:
    """Of one head's rows."""
    return -(-prompt[ROWS] * group // PANEL)


@numba.njit(**OPTIONS)
def _attend_prompts(
    job: Any, prompts: Any, parts: Any, share: int, reals: Any, scratch: Any
) -> None:
    """One head's panel of one prompt."""
    group = job[HEADS] // job[KV_HEADS]
    for number in range(job[NUM_PROMPTS]):
        prompt = prompts[number]
        panels = _panels(prompt, group)
        if share < panels * job[KV_HEADS]:
            head, panel = share // panels, share % panels
            attend_panel(job, prompt, parts, head, panel, reals, scratch)
            return
        share -= panels * job[KV_HEADS]


def _attention(job_words: Any) -> None:
    """Some panels of prompts, then some of rows; every thread runs it until none is left."""
    job = numba.carray(job_words, (JOB_WORDS,))
    segments = numba.carray(words(job[SEGMENTS]), (job[NUM_SEGMENTS], SEGMENT_WORDS))
    prompts = numba.carray(words(job[PROMPTS]), (job[NUM_PROMPTS], PROMPT_WORDS))
    parts = numba.carray(words(job[PARTS]), (job[ALL_PARTS], PART_WORDS))
    reals = vector(job[REALS], 2)
    lines = 2 * job[DIM] + 1 + job[LONGEST] if job[PANELS] else 0
    places = np.empty(PANEL, np.int64), np.empty(PANEL, np.int64)
    scratch = np.empty((lines, PANEL), np.float32), places[0], places[1]
    floats = scratch_floats(job[LONGEST], job[DIM]) if job[ROW_PANELS] else 0
    row_scratch = np.empty(floats, np.float32)
    share = next_share(job_words)
    while share < job[PANELS]:
        _attend_prompts(job, prompts, parts, share, reals, scratch)
        share = next_share(job_words)
    share -= job[PANELS]
    if share < job[ROW_PANELS]:
        place = row_place(job, segments, share)
        while share < job[ROW_PANELS]:
            share = next_share(job_words) - job[PANELS]
            following = row_place(job, segments, share)
            attend_rows(job, segments, parts, place, following, reals, row_scratch.ctypes.data)
            place = following


def _rms_norm(job_words: Any) -> None:
    """output = input / sqrt(mean of squares + epsilon) * weight, row by row."""
    job = numba.carray(job_words, (NORM_WORDS,))
    rows, size = job[NORM_ROWS], job[NORM_SIZE]
    source = matrix(job[NORM_INPUT], rows, size)
    target = matrix(job[NORM_OUTPUT], rows, size)
    weight, epsilon = vector(job[NORM_WEIGHT], size), vector(job[NORM_EPSILON], 1)[0]
    while True:
        first = next_share(job_words) * _ROWS_AT_ONCE
        if first >= rows:
            break
        for row in range(first, min(rows, first + _ROWS_AT_ONCE)):
            squares = np.float32(0)
            for j in range(size):
                squares += source[row, j] * source[row, j]
            factor = np.float32(1 / math.sqrt(squares / np.float32(size) + epsilon))
            for j in range(size):
                target[row, j] = source[row, j] * factor * weight[j]


def _rotate(job_words: Any) -> None:
    """Rotary position embedding (Su et al. 2021) of some heads of each row, in place.

    Halves of a head are rotated against each other, as transformers does.
    """
    job = numba.carray(job_words, (ROTATE_WORDS,))
    rows, stride, heads, dim = (
        job[ROTATE_ROWS],
        job[ROTATE_STRIDE],
        job[ROTATE_HEADS],
        job[ROTATE_DIM],
    )
    data = matrix(job[ROTATE_DATA], rows, stride)
    cosines, sines = matrix(job[ROTATE_COS], rows, dim), matrix(job[ROTATE_SIN], rows, dim)
    half = dim // 2
    while True:
        first = next_share(job_words) * _ROWS_AT_ONCE
        if first >= rows:
            break
        for row in range(first, min(rows, first + _ROWS_AT_ONCE)):
            cosine, sine = cosines[row], sines[row]
            for head in range(heads):
                low = data[row, head * dim : head * dim + half]
                high = data[row, head * dim + half : (head + 1) * dim]
                for j in range(half):
                    x, y = low[j], high[j]
                    low[j] = x * cosine[j] - y * sine[j]
                    high[j] = y * cosine[half + j] + x * sine[half + j]


attention = Kernel(_attention)
rms_norm = Kernel(_rms_norm)
rotate = Kernel(_rotate)
