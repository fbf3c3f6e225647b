"""What torch does slowly on a CPU with few rows, compiled by numba: all but the products.

A decode step's attention is many tiny products; as torch operations, most of its time goes into
calling them. Here one job per layer serves all rows of all sessions. All tensors are float32. Knows
addresses and sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu_exp import weigh
from inference.cpu_jobs import OPTIONS, Kernel, exp, matrix, next_share, vector, words
from inference.cpu_prompts import attend_panel
from inference.cpu_tiles import PANEL
from inference.cpu_vectors import LANES, Code, highest
from inference.cpu_words import (
    ALL_PARTS,
    CHUNKS,
    COUNT,
    DIM,
    FIRST,
    FIRST_OWN,
    HEADS,
    JOB_WORDS,
    KEY,
    KEY_HEAD,
    KEY_ROW,
    KEYS,
    KV_HEADS,
    LENGTH,
    LONGEST,
    NUM_PARTS,
    NUM_PROMPTS,
    NUM_SEGMENTS,
    OUTPUT,
    OWN_KEYS,
    OWN_VALUES,
    PANELS,
    PART,
    PART_WORDS,
    PARTS,
    PROMPT_WORDS,
    PROMPTS,
    QUERY,
    QUERY_HEAD,
    QUERY_ROW,
    REALS,
    ROOM,
    ROW,
    ROWS,
    SEGMENT_WORDS,
    SEGMENTS,
    STORED,
    TOKENS,
    VALUE,
    VALUE_HEAD,
    VALUE_ROW,
    VALUES,
)

# Rows a thread takes at a time.
CHUNK_ROWS = 4

# int64 words of the other jobs; the first is their counter.
NORM_ROWS, NORM_INPUT, NORM_OUTPUT, NORM_WEIGHT, NORM_EPSILON, NORM_SIZE = range(1, 7)
NORM_WORDS = 7
ROTATE_ROWS, ROTATE_DATA, ROTATE_COS, ROTATE_SIN, ROTATE_STRIDE = range(1, 6)
ROTATE_HEADS, ROTATE_DIM = 6, 7
ROTATE_WORDS = 8

# Rows of these that a thread takes at a time.
_ROWS_AT_ONCE = 8


def _dot_tile(fetches: bool) -> Any:
    @intrinsic
    def dots(
        _context: Any, _query: Any, _dim: Any, _keys: Any, _tokens: Any, _scores: Any, _beyond: Any
    ) -> Any:
        """scores[t] = query . keys[t] for up to LANES tokens; always sets LANES scores.

        Addresses of [dim], [tokens, dim] and [LANES]; `dim` is a multiple of LANES. With `fetches`,
        what lies `beyond` bytes behind each key is asked for.
        """
        return types.void(*[types.int64] * 6), _dot_generator(fetches)

    return dots


def _dot_generator(fetches: bool) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        query, dim, keys, tokens, scores, beyond = arguments
        code = Code(builder)
        last, size = builder.sub(tokens, code.constant(1)), builder.mul(dim, code.constant(4))
        # Beyond the last token the last one is read again: there may be no memory.
        numbers = [code.at_most(code.constant(number), last) for number in range(LANES)]
        starts = [code.offset(keys, number, size) for number in numbers]
        totals = [code.vector_of(0.0) for _ in starts]
        with cgutils.for_range(builder, builder.udiv(dim, code.constant(LANES))) as loop:
            values = code.vector(code.offset(query, loop.index, 4 * LANES), 0)
            for start, total in zip(starts, totals, strict=True):
                at = code.offset(start, loop.index, 4 * LANES)
                if fetches:
                    code.fetch(builder.add(at, beyond), level=2)
                code.add_product(values, code.vector(at, 0), total)
        code.put(code.sums(totals), scores, 0)
        return context.get_dummy_value()

    return generate


def _mix_tile(vectors: int, fetches: bool) -> Any:
    @intrinsic
    def mix(
        _context: Any,
        _weights: Any,
        _values: Any,
        _dim: Any,
        _tokens: Any,
        _output: Any,
        _beyond: Any,
    ) -> Any:
        """output += sum of weights[t] * values[t], for `vectors` vectors of the dimensions.

        Addresses of [tokens], [tokens, dim] and [dim], the latter two from the first of these
        dimensions on. With `fetches`, what lies `beyond` bytes behind each value is asked for.
        """
        return types.void(*[types.int64] * 6), _mix_generator(vectors, fetches)

    return mix


def _mix_generator(vectors: int, fetches: bool) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weights, values, dim, tokens, output, beyond = arguments
        code = Code(builder)
        size = builder.mul(dim, code.constant(4))
        # Two tokens at a time with sums of their own, as an addition waits for the one before.
        sums = [[code.vector_of(0.0) for _ in range(vectors)] for _ in range(2)]

        def add(token: Any, totals: list[Any]) -> None:
            weight = code.everywhere(code.offset(weights, token, 4))
            here = code.offset(values, token, size)
            for number, total in enumerate(totals):
                at = builder.add(here, code.constant(4 * LANES * number))
                if fetches:
                    code.fetch(builder.add(at, beyond), level=2)
                code.add_product(weight, code.vector(at, 0), total)

        two = code.constant(2)
        with cgutils.for_range(builder, builder.udiv(tokens, two)) as loop:
            even = builder.mul(loop.index, two)
            add(even, sums[0])
            add(builder.add(even, code.constant(1)), sums[1])
        with builder.if_then(code.is_odd(tokens)):
            add(builder.sub(tokens, code.constant(1)), sums[0])
        for number, totals in enumerate(zip(*sums, strict=True)):
            code.add_to(output, 4 * LANES * number, list(totals))
        return context.get_dummy_value()

    return generate


_WIDE_MIX = 4  # vectors
_dot, _dot_fetching = _dot_tile(fetches=False), _dot_tile(fetches=True)
_mix_narrow = _mix_tile(1, fetches=False)
_mix_wide, _mix_wide_fetching = (_mix_tile(_WIDE_MIX, fetches) for fetches in (False, True))


@numba.njit(**OPTIONS)
def _dots(query: int, dim: int, keys: int, tokens: int, scores: int, beyond: int) -> None:
    """scores[t] = query . keys[t], by addresses; may write LANES - 1 scores too many.

    Where `beyond` is not 0, what lies as many bytes behind the keys is asked for.
    """
    if dim % LANES == 0:
        for t in range(0, tokens, LANES):
            here, count, target = keys + 4 * t * dim, min(LANES, tokens - t), scores + 4 * t
            if beyond:
                _dot_fetching(query, dim, here, count, target, beyond)
            else:
                _dot(query, dim, here, count, target, 0)
    else:
        a, b, plain = vector(query, dim), matrix(keys, tokens, dim), vector(scores, tokens)
        for t in range(tokens):
            total = np.float32(0)
            for j in range(dim):
                total += a[j] * b[t, j]
            plain[t] = total


@numba.njit(**OPTIONS)
def _mix(weights: int, values: int, dim: int, tokens: int, output: int, beyond: int) -> None:
    """output += sum of weights[t] * values[t], by addresses.

    Where `beyond` is not 0, what lies as many bytes behind the values is asked for.
    """
    if dim % LANES == 0:
        step = _WIDE_MIX * LANES
        wide = dim // step * step
        for j in range(0, wide, step):
            here, target = values + 4 * j, output + 4 * j
            if beyond:
                _mix_wide_fetching(weights, here, dim, tokens, target, beyond)
            else:
                _mix_wide(weights, here, dim, tokens, target, 0)
        for j in range(wide, dim, LANES):
            _mix_narrow(weights, values + 4 * j, dim, tokens, output + 4 * j, 0)
    else:
        a, b, plain = vector(weights, tokens), matrix(values, tokens, dim), vector(output, dim)
        for t in range(tokens):
            for j in range(dim):
                plain[j] += a[t] * b[t, j]


@numba.njit(**OPTIONS)
def _softmax(scores: Any, tokens: int, scale: Any, softcap: Any) -> None:
    """Weights in place of scores; softcap * tanh(score / softcap) first where softcap > 0."""
    if softcap > 0:
        for t in range(tokens):
            x = scores[t] * scale / softcap
            e = exp(-2 * abs(x))
            scores[t] = softcap * math.copysign((1 - e) / (1 + e), x)
        scale = np.float32(1)
    most = highest(scores.ctypes.data, tokens)
    total = weigh(scores.ctypes.data, scores.ctypes.data, tokens, most, scale)
    inverse = np.float32(1) / total
    for t in range(tokens):
        scores[t] *= inverse


@numba.njit(**OPTIONS)
def _store(job: Any, segment: Any, row: int, head: int) -> Any:
    """Put a row's new key and value into its store; the addresses of all its keys and values."""
    dim, length = job[DIM], segment[LENGTH]
    base = 4 * (row * job[KV_HEADS] + head) * segment[ROOM] * dim
    keys, values = segment[OWN_KEYS] + base, segment[OWN_VALUES] + base
    at, newest = segment[ROW] + row, 4 * (length - 1) * dim
    new_key, new_value = vector(keys + newest, dim), vector(values + newest, dim)
    key = vector(job[KEY] + 4 * (at * job[KEY_ROW] + head * job[KEY_HEAD]), dim)
    value = vector(job[VALUE] + 4 * (at * job[VALUE_ROW] + head * job[VALUE_HEAD]), dim)
    for j in range(dim):
        new_key[j] = key[j]
        new_value[j] = value[j]
    return keys, values


@numba.njit(**OPTIONS)
def _score_prompt(job: Any, segment: Any, parts: Any, head: int, query: int, scores: int) -> None:
    """Products of a query with the prompt's tokens."""
    t, dim = 0, job[DIM]
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        first = 4 * dim * (head * part[STORED] + part[FIRST])
        _dots(query, dim, part[KEYS] + first, part[COUNT], scores + 4 * t, 0)
        t += part[COUNT]


@numba.njit(**OPTIONS)
def _mix_prompt(job: Any, segment: Any, parts: Any, head: int, weights: int, output: int) -> None:
    """Add the prompt's values."""
    t, dim = 0, job[DIM]
    for number in range(segment[PART], segment[PART] + segment[NUM_PARTS]):
        part = parts[number]
        first = 4 * dim * (head * part[STORED] + part[FIRST])
        _mix(weights + 4 * t, part[VALUES] + first, dim, part[COUNT], output, 0)
        t += part[COUNT]


@numba.njit(**OPTIONS)
def _attend_row(job: Any, segment: Any, parts: Any, row: int, reals: Any, scores: Any) -> None:
    """All heads of one row; `row` counts within the segment."""
    heads, dim, tokens = job[HEADS], job[DIM], segment[TOKENS]
    group = heads // job[KV_HEADS]
    at, first = segment[ROW] + row, segment[FIRST_OWN]
    own, scores_at = segment[LENGTH] - first, scores.ctypes.data
    own_at, room = scores_at + 4 * tokens, 4 * segment[ROOM] * dim
    for head in range(job[KV_HEADS]):
        keys, values = _store(job, segment, row, head)
        keys, values = keys + 4 * first * dim, values + 4 * first * dim
        for number in range(head * group, (head + 1) * group):
            # The first query's keys are followed by the values, the last one's values by the keys
            # of the next head, or of the next row.
            to_values = values - keys if number == head * group else 0
            to_keys = keys + room - values if number == (head + 1) * group - 1 else 0
            query = job[QUERY] + 4 * (at * job[QUERY_ROW] + number * job[QUERY_HEAD])
            output = job[OUTPUT] + 4 * (at * heads + number) * dim
            _score_prompt(job, segment, parts, head, query, scores_at)
            _dots(query, dim, keys, own, own_at, to_values)
            _softmax(scores, tokens + own, reals[0], reals[1])
            mixed = vector(output, dim)
            for j in range(dim):
                mixed[j] = 0
            _mix_prompt(job, segment, parts, head, scores_at, output)
            _mix(own_at, values, dim, own, output, to_keys)


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


@numba.njit(**OPTIONS)
def _attend_rows(job: Any, segments: Any, parts: Any, first: int, reals: Any, scores: Any) -> None:
    """One chunk of the rows that decode, from the first on."""
    for number in range(job[NUM_SEGMENTS]):
        segment = segments[number]
        for row in range(max(0, first), min(segment[ROWS], first + CHUNK_ROWS)):
            _attend_row(job, segment, parts, row, reals, scores)
        first -= segment[ROWS]


def _attention(job_words: Any) -> None:
    """Some panels of prompts, then some chunks of rows; every thread runs it until none is left."""
    job = numba.carray(job_words, (JOB_WORDS,))
    segments = numba.carray(words(job[SEGMENTS]), (job[NUM_SEGMENTS], SEGMENT_WORDS))
    prompts = numba.carray(words(job[PROMPTS]), (job[NUM_PROMPTS], PROMPT_WORDS))
    parts = numba.carray(words(job[PARTS]), (job[ALL_PARTS], PART_WORDS))
    reals = vector(job[REALS], 2)
    scores = np.empty(job[LONGEST] + LANES, np.float32)
    lines = 2 * job[DIM] + 1 + job[LONGEST] if job[PANELS] else 0
    places = np.empty(PANEL, np.int64), np.empty(PANEL, np.int64)
    scratch = np.empty((lines, PANEL), np.float32), places[0], places[1]
    while True:
        share = next_share(job_words)
        if share < job[PANELS]:
            _attend_prompts(job, prompts, parts, share, reals, scratch)
        elif share < job[PANELS] + job[CHUNKS]:
            first = (share - job[PANELS]) * CHUNK_ROWS
            _attend_rows(job, segments, parts, first, reals, scores)
        else:
            break


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
