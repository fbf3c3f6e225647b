"""Compiled jobs on torch's own threads, and what their code is made of. Knows addresses only.

A job is a row of int64 words; the first is a counter by which threads share the work, the others
are addresses, strides and sizes. numba compiles the code and keeps it on disk, so that only the
first start waits for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
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
def doubles(_context: Any, _address: Any) -> Any:
    """int64 address to float64 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.DoubleType().as_pointer())

    return types.CPointer(types.float64)(types.int64), generate


@intrinsic
def words(_context: Any, _address: Any) -> Any:
    """int64 address to int64 pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def _call(_context: Any, _function: Any, _address: Any) -> Any:
    """Call compiled code at an int64 address with a job's address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.void(types.int64, types.int64), generate


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


def kept_in(folder: Path, text_of: Path) -> Path:
    """Where compiled code is kept: apart for each text of all the files that go into it.

    numba looks at a kernel's own file only, and would go on with what others were.
    """
    texts = [path.read_bytes() for path in sorted(text_of.glob("cpu_*.py"))]
    return folder / f"kernels-{hashlib.sha256(b''.join(texts)).hexdigest()[:12]}"


def _keep_apart() -> None:
    """Unless there is no place that can be written to; numba looks for another one then."""
    here = Path(__file__).parent
    folder = Path(numba.config.CACHE_DIR or here / "__pycache__")
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        numba.config.CACHE_DIR = str(kept_in(folder, here))


_keep_apart()


def _compiled(kernel: Callable[..., Any]) -> Any:
    """A kernel's machine code, kept on disk where there is a place that can be written to."""
    try:
        return numba.cfunc(_KERNEL, cache=True, **OPTIONS)(kernel)
    except RuntimeError:  # numba's word for no such place
        return numba.cfunc(_KERNEL, **OPTIONS)(kernel)


def _open_mp() -> Any:
    """The library that torch's threads belong to; None where torch is built without libgomp."""
    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    library.GOMP_parallel.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
    )
    library.GOMP_parallel.restype = None
    return library


_OPEN_MP = _open_mp()

# Whether compiled jobs run on all threads; where they would run on one, torch is faster.
ON_ALL_THREADS = _OPEN_MP is not None

# Threads wait here until all have come; outside of a parallel call it does nothing.
_BARRIER = (ON_ALL_THREADS and ctypes.cast(_OPEN_MP.GOMP_barrier, ctypes.c_void_p).value) or 0

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Job:
    """What a kernel is to do, in int64 words that stay where they are."""

    def __init__(self, num_words: int) -> None:
        self.words = np.zeros(num_words, np.int64)
        self.address: int = self.words.ctypes.data


class Kernel:
    """Compiled code that takes the address of its job."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._compiled = _compiled(function)
        self.address: int = self._compiled.address
        self._function = _FUNCTION(self.address)

    def run(self, job: Job, words: Sequence[int], work: int) -> None:
        """Fill a job and run it, on all threads if `work` (multiplications) is worth it."""
        job.words[0] = 0  # the counter by which threads share it
        job.words[1 : 1 + len(words)] = words
        self.run_filled(job, work)

    def run_filled(self, job: Job, work: int) -> None:
        """Run a job whose words are set."""
        threads = torch.get_num_threads()
        if not ON_ALL_THREADS or threads == 1 or work < _WORTH_SHARING:
            self._function(job.address)
        else:
            _OPEN_MP.GOMP_parallel(self.address, job.address, threads, 0)


# int64 words of a program's own job: address and number of its steps, address of what to wait by.
_STEPS, _NUM_STEPS, _WAIT = range(1, 4)


def _in_turn(job_words: Any) -> None:
    """Jobs one after the other; no thread begins one before all have ended the last."""
    job = numba.carray(job_words, (4,))
    steps = numba.carray(words(job[_STEPS]), (job[_NUM_STEPS], 2))
    for number in range(job[_NUM_STEPS]):
        _call(steps[number, 0], steps[number, 1])
        if job[_WAIT]:
            _call(job[_WAIT], 0)


_in_turn_kernel = Kernel(_in_turn)


class Program:
    """Jobs that run one after the other in one call."""

    def __init__(self, kernels: Sequence[Kernel], num_words: int) -> None:
        """`num_words`: of the longest job."""
        self.words = np.zeros((len(kernels), num_words), np.int64)
        jobs = self.words.ctypes.data + self.words.strides[0] * np.arange(len(kernels))
        self._steps = np.stack([np.array([kernel.address for kernel in kernels]), jobs], axis=1)
        self._steps_at: int = self._steps.ctypes.data
        self._job = Job(4)

    def run(self, first: int, end: int, work: int) -> None:
        """Run the jobs first .. end - 1, whose words are set and whose counters are 0.

        On all threads, if `work` (multiplications) is worth it.
        """
        self._job.words[1:] = self._steps_at + first * self._steps.strides[0], end - first, _BARRIER
        _in_turn_kernel.run_filled(self._job, work)
