"""RMS norm, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from specrej_models.cpu.jobs import Kernel, layout, matrix, vector
from specrej_models.cpu.tiles import next_share, pointer

NORM = layout("shares rows input output weight size", "epsilon")

# Rows that a thread takes at a time.
_ROWS = 8


def _rms_norm(address: Any) -> None:
    """output = input / sqrt(mean of squares + epsilon) * weight, row by row."""
    job = numba.carray(pointer(address), 1, NORM)[0]
    rows, size = job.rows, job.size
    source, target = matrix(job.input, rows, size), matrix(job.output, rows, size)
    weight, epsilon = vector(job.weight, size), np.float32(job.epsilon)
    first = next_share(address) * _ROWS
    while first < rows:
        for row in range(first, min(rows, first + _ROWS)):
            squares = np.float32(0)
            for j in range(size):
                squares += source[row, j] * source[row, j]
            factor = np.float32(1 / math.sqrt(squares / np.float32(size) + epsilon))
            for j in range(size):
                target[row, j] = source[row, j] * factor * weight[j]
        first = next_share(address) * _ROWS


rms_norm = Kernel(_rms_norm)
