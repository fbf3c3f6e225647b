"""Compiled jobs on torch's own threads, and what their code is made of. Knows addresses only.

A job is a row of int64 words; the first is a counter by which threads share the work, the others
are addresses, strides and sizes. numba compiles the code and keeps it on disk, so that only the
first start waits for it.
"""

from __future__ import annotations

import ctypes
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
OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "nogil": True}

# Multiplications below which a second thread costs more than it helps.
_WORTH_SHARING = 100_000


@intrinsic
def floats(_context: Any, _address: Any) -> Any:
    """int64 address to float32 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def words(_context: Any, _address: Any) -> Any:
    """int64 address to int64 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def next_share(_context: Any, _counter: Any) -> Any:
    """Raise a counter that threads share; what it was."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def float_of(_context: Any, _bits: Any) -> Any:
    """The float32 with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always", **OPTIONS)
def exp(x: Any) -> Any:
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
    return p * float_of(np.int32((np.int32(whole) + 127) << 23))


@numba.njit(**OPTIONS)
def matrix(address: int, rows: int, columns: int) -> Any:
    return numba.carray(floats(address), (rows, columns))


@numba.njit(**OPTIONS)
def vector(address: int, size: int) -> Any:
    return numba.carray(floats(address), (size,))


def _compiled(kernel: Callable[..., Any]) -> Any:
    """A kernel's machine code, kept on disk where there is a place that can be written to."""
    try:
        return numba.cfunc(_KERNEL, cache=True, **OPTIONS)(kernel)
    except RuntimeError:  # numba's word for no such place
        return numba.cfunc(_KERNEL, **OPTIONS)(kernel)


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

# Whether compiled jobs run on all threads; where they would run on one, torch is faster.
ON_ALL_THREADS = _ON_ALL_THREADS is not None
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
        if not ON_ALL_THREADS or threads == 1 or work < _WORTH_SHARING:
            self._call(job.address)
        else:
            _ON_ALL_THREADS(self._address, job.address, threads, 0)
