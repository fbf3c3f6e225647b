"""What torch does slowly on a CPU with few rows, compiled by numba: all but the products.

A decode step's attention is many tiny products; as torch operations, most of its time goes into
calling them. Here one call per layer serves all rows of all sessions, on torch's own threads. All
tensors are float32; the compiled code is kept on disk, so that only the first start waits for it.
Knows addresses and sizes only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_KERNEL = types.void(types.CPointer(types.int64))
_OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "nogil": True}

# Rows a thread takes at a time.
CHUNK_ROWS = 4

# Multiplications below which a second thread costs more than it helps.
_WORTH_SHARING = 100_000

# int64 words of an attention job: addresses, strides in elements, sizes.
COUNTER, CHUNKS, REALS, SEGMENTS, NUM_SEGMENTS, PARTS = range(6)
QUERY, QUERY_ROW, QUERY_HEAD = 6, 7, 8
KEY, KEY_ROW, KEY_HEAD = 9, 10, 11
VALUE, VALUE_ROW, VALUE_HEAD = 12, 13, 14
OUTPUT, HEADS, KV_HEADS, DIM, LONGEST = 15, 16, 17, 18, 19
JOB_WORDS = 20

# A segment: where its rows begin and how many, its suffix store (of `ROOM` tokens per row, of
# which FIRST_OWN .. LENGTH - 1 are seen), its prompt's parts and their tokens. SHARED is the
# address of the products with these tokens, [kv_heads, rows * group, tokens], if there already.
ROW, ROWS, LENGTH, ROOM, FIRST_OWN, PART, NUM_PARTS, TOKENS, SHARED, OWN_KEYS, OWN_VALUES = range(
    11
)
SEGMENT_WORDS = 11

# A part of a prompt: tokens FIRST .. FIRST + COUNT - 1 of a store of STORED.
STORED, FIRST, COUNT, KEYS, VALUES = range(5)
PART_WORDS = 5


# int64 words of the other jobs; the first is their counter.
NORM_ROWS, NORM_INPUT, NORM_OUTPUT, NORM_ADD, NORM_WEIGHT, NORM_EPSILON, NORM_SIZE = range(1, 8)
NORM_WORDS = 8
ROTATE_ROWS, ROTATE_DATA, ROTATE_COS, ROTATE_SIN, ROTATE_STRIDE = range(1, 6)
ROTATE_HEADS, ROTATE_DIM = 6, 7
ROTATE_WORDS = 8
GATE_ROWS, GATE_INPUT, GATE_OUTPUT, GATE_SIZE = range(1, 5)
GATE_WORDS = 5

# Rows of these that a thread takes at a time.
_ROWS_AT_ONCE = 8


@intrinsic
def _floats(_context: Any, _address: Any) -> Any:
    """int64 address to float32 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _words(_context: Any, _address: Any) -> Any:
    """int64 address to int64 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def _float_of(_context: Any, _bits: Any) -> Any:
    """The float32 with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _next(_context: Any, _counter: Any) -> Any:
    """Raise a counter that threads share; what it was."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@numba.njit(inline="always", **_OPTIONS)
def _exp(x: Any) -> Any:
    """e**x for x <= 0 in a form that vectorises; relative error below 2e-7.

    2**f on [-0.5, 0.5] by a polynomial (Taylor, degree 7), times the power of two by its bits.
    """
    x = max(x, np.float32(-87.0)) * np.float32(1.4426950408889634)
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.5252734e-5)
    p = p * f + np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(0.24022651)
    p = p * f + np.float32(0.69314718)
    p = p * f + np.float32(1.0)
    return p * _float_of(np.int32((np.int32(whole) + 127) << 23))


@numba.njit(**_OPTIONS)
def _dots(query: Any, keys: Any, tokens: int, scores: Any) -> None:
    """scores[t] = query . keys[t]; four tokens at a time, so that additions overlap."""
    dim = query.shape[0]
    fours = tokens // 4 * 4
    for t in range(0, fours, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(dim):
            a += query[j] * keys[t, j]
            b += query[j] * keys[t + 1, j]
            c += query[j] * keys[t + 2, j]
            d += query[j] * keys[t + 3, j]
        scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = a, b, c, d
    for t in range(fours, tokens):
        a = np.float32(0)
        for j in range(dim):
            a += query[j] * keys[t, j]
        scores[t] = a


@numba.njit(**_OPTIONS)
def _mix(weights: Any, values: Any, tokens: int, output: Any) -> None:
    """output += sum of weights[t] * values[t]; four tokens per pass over the output."""
    dim = output.shape[0]
    fours = tokens // 4 * 4
    for t in range(0, fours, 4):
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for j in range(dim):
            output[j] += (
                a * values[t, j]
                + b * values[t + 1, j]
                + c * values[t + 2, j]
                + d * values[t + 3, j]
            )
    for t in range(fours, tokens):
        a = weights[t]
        for j in range(dim):
            output[j] += a * values[t, j]


@numba.njit(**_OPTIONS)
def _softmax(scores: Any, tokens: int, scale: Any, softcap: Any) -> None:
    """Weights in place of scores; softcap * tanh(score / softcap) first where softcap > 0."""
    highest = np.float32(-np.inf)
    if softcap > 0:
        for t in range(tokens):
            x = scores[t] * scale / softcap
            e = _exp(-2 * abs(x))
            scores[t] = softcap * math.copysign((1 - e) / (1 + e), x)
        scale = np.float32(1)
    for t in range(tokens):
        highest = max(highest, scores[t])
    total = np.float32(0)
    for t in range(tokens):
        weight = _exp((scores[t] - highest) * scale)
        scores[t] = weight
        total += weight
    inverse = np.float32(1) / total
    for t in range(tokens):
        scores[t] *= inverse


@numba.njit(**_OPTIONS)
def _matrix(address: int, rows: int, columns: int) -> Any:
    return numba.carray(_floats(address), (rows, columns))


@numba.njit(**_OPTIONS)
def _vector(address: int, size: int) -> Any:
    return numba.carray(_floats(address), (size,))


@numba.njit(**_OPTIONS)
def _store(job: Any, segment: Any, row: int, head: int) -> Any:
    """Put a row's new key and value into its store; returns all of its keys and values."""
    dim, length = job[DIM], segment[LENGTH]
    base = 4 * (row * job[KV_HEADS] + head) * segment[ROOM] * dim
    keys = _matrix(segment[OWN_KEYS] + base, length, dim)
    values = _matrix(segment[OWN_VALUES] + base, length, dim)
    at = segment[ROW] + row
    key = _vector(job[KEY] + 4 * (at * job[KEY_ROW] + head * job[KEY_HEAD]), dim)
    value = _vector(job[VALUE] + 4 * (at * job[VALUE_ROW] + head * job[VALUE_HEAD]), dim)
    for j in range(dim):
        keys[length - 1, j] = key[j]
        values[length - 1, j] = value[j]
    return keys, values


@numba.njit(**_OPTIONS)
def _score_prompt(
    job: Any, segment: Any, parts: Any, head: int, query: Any, shared: Any, scores: Any
) -> None:
    """Products of a query with the prompt's tokens, computed or copied."""
    if segment[SHARED]:
        for t in range(segment[TOKENS]):
            scores[t] = shared[t]
        return
    t, dim = 0, job[DIM]
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        first = 4 * dim * (head * part[STORED] + part[FIRST])
        _dots(query, _matrix(part[KEYS] + first, part[COUNT], dim), part[COUNT], scores[t:])
        t += part[COUNT]


@numba.njit(**_OPTIONS)
def _mix_prompt(
    job: Any, segment: Any, parts: Any, head: int, weights: Any, shared: Any, output: Any
) -> None:
    """Add the prompt's values, or leave their weights where the products were."""
    if segment[SHARED]:
        for t in range(segment[TOKENS]):
            shared[t] = weights[t]
        return
    t, dim = 0, job[DIM]
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        first = 4 * dim * (head * part[STORED] + part[FIRST])
        _mix(weights[t:], _matrix(part[VALUES] + first, part[COUNT], dim), part[COUNT], output)
        t += part[COUNT]


@numba.njit(**_OPTIONS)
def _attend_row(job: Any, segment: Any, parts: Any, row: int, reals: Any, scores: Any) -> None:
    """All heads of one row; `row` counts within the segment."""
    heads, dim, tokens = job[HEADS], job[DIM], segment[TOKENS]
    group = heads // job[KV_HEADS]
    at, first = segment[ROW] + row, segment[FIRST_OWN]
    own = segment[LENGTH] - first
    for head in range(job[KV_HEADS]):
        keys, values = _store(job, segment, row, head)
        for number in range(head * group, (head + 1) * group):
            query = _vector(job[QUERY] + 4 * (at * job[QUERY_ROW] + number * job[QUERY_HEAD]), dim)
            output = _vector(job[OUTPUT] + 4 * (at * heads + number) * dim, dim)
            line = (head * segment[ROWS] + row) * group + number - head * group
            shared = _vector(segment[SHARED] + 4 * line * tokens, tokens)
            _score_prompt(job, segment, parts, head, query, shared, scores)
            _dots(query, keys[first:], own, scores[tokens:])
            _softmax(scores, tokens + own, reals[0], reals[1])
            for j in range(dim):
                output[j] = 0
            _mix_prompt(job, segment, parts, head, scores, shared, output)
            _mix(scores[tokens:], values[first:], own, output)


def _attention(job_words: Any) -> None:
    """Some chunks of rows; every thread runs it until no chunk is left."""
    job = numba.carray(job_words, (JOB_WORDS,))
    segments = numba.carray(_words(job[SEGMENTS]), (job[NUM_SEGMENTS], SEGMENT_WORDS))
    last = segments[job[NUM_SEGMENTS] - 1]
    parts = numba.carray(_words(job[PARTS]), (last[PART] + last[NUM_PARTS], PART_WORDS))
    reals = _vector(job[REALS], 2)
    scores = np.empty(job[LONGEST], np.float32)
    while True:
        chunk = _next(job_words)
        if chunk >= job[CHUNKS]:
            break
        first = chunk * CHUNK_ROWS
        for number in range(job[NUM_SEGMENTS]):
            segment = segments[number]
            for row in range(max(0, first), min(segment[ROWS], first + CHUNK_ROWS)):
                _attend_row(job, segment, parts, row, reals, scores)
            first -= segment[ROWS]


def _rms_norm(job_words: Any) -> None:
    """output = input / sqrt(mean of squares + epsilon) * weight, row by row.

    Where there is something to add, it is added to the input first, in place.
    """
    job = numba.carray(job_words, (NORM_WORDS,))
    rows, size = job[NORM_ROWS], job[NORM_SIZE]
    source = _matrix(job[NORM_INPUT], rows, size)
    target = _matrix(job[NORM_OUTPUT], rows, size)
    more = _matrix(job[NORM_ADD], rows, size)
    weight, epsilon = _vector(job[NORM_WEIGHT], size), _vector(job[NORM_EPSILON], 1)[0]
    while True:
        first = _next(job_words) * _ROWS_AT_ONCE
        if first >= rows:
            break
        for row in range(first, min(rows, first + _ROWS_AT_ONCE)):
            if job[NORM_ADD]:
                for j in range(size):
                    source[row, j] += more[row, j]
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
    data = _matrix(job[ROTATE_DATA], rows, stride)
    cosines, sines = _matrix(job[ROTATE_COS], rows, dim), _matrix(job[ROTATE_SIN], rows, dim)
    half = dim // 2
    while True:
        first = _next(job_words) * _ROWS_AT_ONCE
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


def _gated_silu(job_words: Any) -> None:
    """output = silu(first half of a row) * second half; silu(x) = x / (1 + e**-x)."""
    job = numba.carray(job_words, (GATE_WORDS,))
    rows, size = job[GATE_ROWS], job[GATE_SIZE]
    source = _matrix(job[GATE_INPUT], rows, 2 * size)
    target = _matrix(job[GATE_OUTPUT], rows, size)
    while True:
        first = _next(job_words) * _ROWS_AT_ONCE
        if first >= rows:
            break
        for row in range(first, min(rows, first + _ROWS_AT_ONCE)):
            gate, up, output = source[row, :size], source[row, size:], target[row]
            for j in range(size):
                x = gate[j]
                e = _exp(-abs(x))
                output[j] = x * up[j] * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


def _compiled(kernel: Callable[..., Any]) -> Any:
    """A kernel's machine code, kept on disk where there is a place that can be written to."""
    try:
        return numba.cfunc(_KERNEL, cache=True, **_OPTIONS)(kernel)
    except RuntimeError:  # numba's word for no such place
        return numba.cfunc(_KERNEL, **_OPTIONS)(kernel)


def _open_mp() -> Any:
    """Runs a function on all of torch's own threads; None where torch is built without libgomp."""
    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not path.exists():
        return None
    run = ctypes.CDLL(str(path)).GOMP_parallel
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run.restype = None
    return run


_ON_ALL_THREADS = _open_mp()
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Job:
    """What a kernel is to do, in int64 words that stay where they are."""

    def __init__(self, num_words: int) -> None:
        self.words = np.zeros(num_words, np.int64)
        self.address: int = self.words.ctypes.data


class Kernel:
    """Compiled code that takes the address of its job."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._compiled = _compiled(function)
        self._address: int = self._compiled.address
        self._call = _CALL(self._address)

    def run(self, job: Job, words: Sequence[int], work: int) -> None:
        """Fill a job and run it, on all threads if `work` (multiplications) is worth it."""
        job.words[0] = 0  # the counter by which threads share it
        job.words[1 : 1 + len(words)] = words
        threads = torch.get_num_threads()
        if _ON_ALL_THREADS is None or threads == 1 or work < _WORTH_SHARING:
            self._call(job.address)
        else:
            _ON_ALL_THREADS(self._address, job.address, threads, 0)


attention = Kernel(_attention)
rms_norm = Kernel(_rms_norm)
rotate = Kernel(_rotate)
gated_silu = Kernel(_gated_silu)
