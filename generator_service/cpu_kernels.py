"""What torch does slowly on a CPU with few rows, compiled by numba: all but the products.

A decode step's attention is many tiny products; as torch operations, most of its time goes into
calling them. Here one call per layer serves all rows of all sessions, on torch's own threads. All
tensors are float32; the compiled code is kept on disk, so that only the first start waits for it.
Knows addresses and sizes only.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from generator_service.cpu_jobs import OPTIONS, Kernel, exp, matrix, next_share, vector, words

# Rows a thread takes at a time.
CHUNK_ROWS = 4

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
NORM_ROWS, NORM_INPUT, NORM_OUTPUT, NORM_WEIGHT, NORM_EPSILON, NORM_SIZE = range(1, 7)
NORM_WORDS = 7
ROTATE_ROWS, ROTATE_DATA, ROTATE_COS, ROTATE_SIN, ROTATE_STRIDE = range(1, 6)
ROTATE_HEADS, ROTATE_DIM = 6, 7
ROTATE_WORDS = 8
GATE_ROWS, GATE_INPUT, GATE_OUTPUT, GATE_SIZE = range(1, 5)
GATE_WORDS = 5

# Rows of these that a thread takes at a time.
_ROWS_AT_ONCE = 8


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
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


@numba.njit(**OPTIONS)
def _softmax(scores: Any, tokens: int, scale: Any, softcap: Any) -> None:
    """Weights in place of scores; softcap * tanh(score / softcap) first where softcap > 0."""
    highest = np.float32(-np.inf)
    if softcap > 0:
        for t in range(tokens):
            x = scores[t] * scale / softcap
            e = exp(-2 * abs(x))
            scores[t] = softcap * math.copysign((1 - e) / (1 + e), x)
        scale = np.float32(1)
    for t in range(tokens):
        highest = max(highest, scores[t])
    total = np.float32(0)
    for t in range(tokens):
        weight = exp((scores[t] - highest) * scale)
        scores[t] = weight
        total += weight
    inverse = np.float32(1) / total
    for t in range(tokens):
        scores[t] *= inverse


@numba.njit(**OPTIONS)
def _store(job: Any, segment: Any, row: int, head: int) -> Any:
    """Put a row's new key and value into its store; returns all of its keys and values."""
    dim, length = job[DIM], segment[LENGTH]
    base = 4 * (row * job[KV_HEADS] + head) * segment[ROOM] * dim
    keys = matrix(segment[OWN_KEYS] + base, length, dim)
    values = matrix(segment[OWN_VALUES] + base, length, dim)
    at = segment[ROW] + row
    key = vector(job[KEY] + 4 * (at * job[KEY_ROW] + head * job[KEY_HEAD]), dim)
    value = vector(job[VALUE] + 4 * (at * job[VALUE_ROW] + head * job[VALUE_HEAD]), dim)
    for j in range(dim):
        keys[length - 1, j] = key[j]
        values[length - 1, j] = value[j]
    return keys, values


@numba.njit(**OPTIONS)
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
        _dots(query, matrix(part[KEYS] + first, part[COUNT], dim), part[COUNT], scores[t:])
        t += part[COUNT]


@numba.njit(**OPTIONS)
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
        _mix(weights[t:], matrix(part[VALUES] + first, part[COUNT], dim), part[COUNT], output)
        t += part[COUNT]


@numba.njit(**OPTIONS)
def _attend_row(job: Any, segment: Any, parts: Any, row: int, reals: Any, scores: Any) -> None:
    """All heads of one row; `row` counts within the segment."""
    heads, dim, tokens = job[HEADS], job[DIM], segment[TOKENS]
    group = heads // job[KV_HEADS]
    at, first = segment[ROW] + row, segment[FIRST_OWN]
    own = segment[LENGTH] - first
    for head in range(job[KV_HEADS]):
        keys, values = _store(job, segment, row, head)
        for number in range(head * group, (head + 1) * group):
            query = vector(job[QUERY] + 4 * (at * job[QUERY_ROW] + number * job[QUERY_HEAD]), dim)
            output = vector(job[OUTPUT] + 4 * (at * heads + number) * dim, dim)
            line = (head * segment[ROWS] + row) * group + number - head * group
            shared = vector(segment[SHARED] + 4 * line * tokens, tokens)
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
    segments = numba.carray(words(job[SEGMENTS]), (job[NUM_SEGMENTS], SEGMENT_WORDS))
    last = segments[job[NUM_SEGMENTS] - 1]
    parts = numba.carray(words(job[PARTS]), (last[PART] + last[NUM_PARTS], PART_WORDS))
    reals = vector(job[REALS], 2)
    scores = np.empty(job[LONGEST], np.float32)
    while True:
        chunk = next_share(job_words)
        if chunk >= job[CHUNKS]:
            break
        first = chunk * CHUNK_ROWS
        for number in range(job[NUM_SEGMENTS]):
            segment = segments[number]
            for row in range(max(0, first), min(segment[ROWS], first + CHUNK_ROWS)):
                _attend_row(job, segment, parts, row, reals, scores)
            first -= segment[ROWS]


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


def _gated_silu(job_words: Any) -> None:
    """output = silu(first half of a row) * second half; silu(x) = x / (1 + e**-x)."""
    job = numba.carray(job_words, (GATE_WORDS,))
    rows, size = job[GATE_ROWS], job[GATE_SIZE]
    source = matrix(job[GATE_INPUT], rows, 2 * size)
    target = matrix(job[GATE_OUTPUT], rows, size)
    while True:
        first = next_share(job_words) * _ROWS_AT_ONCE
        if first >= rows:
            break
        for row in range(first, min(rows, first + _ROWS_AT_ONCE)):
            gate, up, output = source[row, :size], source[row, size:], target[row]
            for j in range(size):
                x = gate[j]
                e = exp(-abs(x))
                output[j] = x * up[j] * (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


attention = Kernel(_attention)
rms_norm = Kernel(_rms_norm)
rotate = Kernel(_rotate)
gated_silu = Kernel(_gated_silu)
