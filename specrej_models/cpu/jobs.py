"""Compiled kernels on torch's own threads, and the jobs they read.

A job is a record of 8-byte fields in memory that stays where it is. Its first field, `shares`, is
the counter by which threads take shares of the work; the others are addresses, strides and sizes.
numba compiles the kernels and stores the code on disk: only the first start on a machine compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from specrej_models.cpu.tiles import CACHE_LINE, call, pointer

JobRecord = NDArray[np.int64]

OPTIONS: dict[str, Any] = {
    "fastmath": True,
    "error_model": "numpy",
    "nogil": True,
    # Only kernels call these functions; wrappers for Python and C would take time to compile.
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
# Of a large function with one caller, which would else be optimised twice.
INLINED = {**OPTIONS, "inline": "always"}

# Multiplications below which a second thread costs more than it saves.
_WORTH_SHARING = 100_000


def layout(names: str, reals: str = "") -> np.dtype[np.void]:
    """A record of int64 fields `names`, then float64 fields `reals`, all separated by spaces."""
    return np.dtype(
        [(n, np.int64) for n in names.split()] + [(n, np.float64) for n in reals.split()]
    )


def job_record(kind: np.dtype[np.void], /, **values: Any) -> JobRecord:
    """A record with these values as int64; other fields are 0."""
    assert kind.names is not None
    assert values.keys() <= set(kind.names)
    record = np.array([tuple(values.get(name, 0) for name in kind.names)], kind)
    return record.view(np.int64)


@numba.njit(**OPTIONS)
def vector(address: int, size: int) -> Any:
    """The float32 at an address."""
    return numba.carray(pointer(address), size, np.float32)


@numba.njit(**OPTIONS)
def aligned(floats: Any) -> Any:
    """The first address in an array at which a cache line begins; `hold` it while it is used."""
    return np.int64(floats.ctypes.data) + CACHE_LINE - 1 & -CACHE_LINE


@numba.njit(**OPTIONS)
def hold(floats: Any) -> None:
    """Use an array, so that numba does not free it earlier: a use of its address does not count."""
    floats[0] = 0


@numba.njit(**OPTIONS)
def matrix(address: int, rows: int, columns: int) -> Any:
    """As `vector`."""
    return numba.carray(pointer(address), (rows, columns), np.float32)


def cache_folder(folder: Path, sources: Path) -> Path:
    """Where compiled code is stored: a folder per content of the kernels' sources.

    numba compares the date of a kernel's own file only, and would reuse code whose callees changed.
    """
    texts = [path.read_bytes() for path in sorted(sources.glob("*.py"))]
    return folder / f"kernels-{hashlib.sha256(b''.join(texts)).hexdigest()[:12]}"


def _create_cache() -> None:
    """Choose the folder of compiled code, unless it is not writable: numba chooses another one."""
    here = Path(__file__).parent
    folder = Path(numba.config.CACHE_DIR or here / "__pycache__")
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        folder = cache_folder(folder, here)
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)


_create_cache()


def _open_mp() -> Any:
    """The library of torch's threads; None if it has another interface than GNU's.

    `import torch` makes its OpenMP library global, or uses a preloaded one: libiomp5 has the same
    functions. A second set of threads would wait for the cores on which the first one spins.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "GOMP_parallel"):
        return None
    address, count = ctypes.c_void_p, ctypes.c_uint
    library.GOMP_parallel.argtypes = (address, address, count, count)
    library.GOMP_parallel.restype = None
    return library


_OPEN_MP = _open_mp()

# Whether compiled jobs run on all threads; where they would run on one, torch is faster.
ON_ALL_THREADS = _OPEN_MP is not None

# Waits until all threads of a parallel call have called it; returns at once outside of one.
BARRIER = (ON_ALL_THREADS and ctypes.cast(_OPEN_MP.GOMP_barrier, ctypes.c_void_p).value) or 0

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Kernel:
    """Compiled code that takes the address of its job; compiled at its first use."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._source = function

    @cached_property
    def _compiled(self) -> Any:
        """Of this process, or loaded from where an earlier one has stored it."""
        signature = types.void(types.int64)
        try:
            return numba.cfunc(signature, cache=True, **OPTIONS)(self._source)
        except (RuntimeError, OSError):  # no folder is writable, or not by this user
            return numba.cfunc(signature, **OPTIONS)(self._source)

    @cached_property
    def _function(self) -> Any:
        return _FUNCTION(self.address)

    @property
    def address(self) -> int:
        """Of the compiled function, for `tiles.call`."""
        address: int = self._compiled.address
        return address

    def run(self, job: JobRecord, work: int) -> None:
        """Run a job whose counter is 0, on all threads if `work` (multiplications) is worth it."""
        threads = torch.get_num_threads()
        if not ON_ALL_THREADS or threads == 1 or work < _WORTH_SHARING:
            self._function(job.ctypes.data)
        else:
            _OPEN_MP.GOMP_parallel(self.address, job.ctypes.data, threads, 0)


_PROGRAM = layout("shares steps num_steps barrier")


def _run_steps(address: Any) -> None:
    """Jobs one after the other; no thread begins one before all threads have ended the last."""
    job = numba.carray(pointer(address), 1, _PROGRAM)[0]
    steps = numba.carray(pointer(job.steps), (job.num_steps, 2), np.int64)
    for number in range(job.num_steps):
        call(steps[number, 0], steps[number, 1])
        if job.barrier:
            call(job.barrier, 0)


_run_steps_kernel = Kernel(_run_steps)


class Program:
    """Jobs that run one after the other in one call."""

    def __init__(self, kernels: Sequence[Kernel], job_fields: int) -> None:
        """`job_fields`: of the longest job. The caller fills in `records` [jobs, job_fields]."""
        self.records = np.zeros((len(kernels), job_fields), np.int64)
        jobs = self.records.ctypes.data + self.records.strides[0] * np.arange(len(kernels))
        self._steps = np.stack([np.array([kernel.address for kernel in kernels]), jobs], axis=1)
        self._job = job_record(
            _PROGRAM, steps=self._steps.ctypes.data, num_steps=len(kernels), barrier=BARRIER
        )

    def run(self, work: int) -> None:
        """Run the jobs, whose counters are 0, on all threads if `work` is worth it."""
        _run_steps_kernel.run(self._job, work)
