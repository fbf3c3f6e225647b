"""Where compiled code is kept, and which threads run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from specrej_models.cpu.jobs import cache_folder


def test_code_is_kept_apart_for_each_text_that_goes_into_it(tmp_path: Path) -> None:
    """Guards against a kernel that goes on with an older form of what it calls."""
    called = tmp_path / "called.py"
    called.write_text("1")
    before = cache_folder(tmp_path, tmp_path)
    assert cache_folder(tmp_path, tmp_path) == before
    called.write_text("2")
    assert cache_folder(tmp_path, tmp_path) != before


_SECOND_THREADS = """
import ctypes, os, torch
from specrej_models.cpu import jobs as cpu_jobs

def num_threads():
    return len(os.listdir("/proc/self/task"))

torch.ones(10**6).exp_()
before = num_threads()
nothing = cpu_jobs._FUNCTION(lambda address: None)
cpu_jobs._OPEN_MP.GOMP_parallel(ctypes.cast(nothing, ctypes.c_void_p), None, 2, 0)
print(before, num_threads() - before)
"""


def test_kernels_run_on_torch_s_threads_where_another_library_has_them(tmp_path: Path) -> None:
    """Guards against two sets of threads, of which each waits for the cores on which the other one
    spins: beside libiomp5 a draw took 9 ms in place of 2."""
    library = shutil.copy(Path(torch.__file__).parent / "lib" / "libgomp.so.1", tmp_path)
    environment = {**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", _SECOND_THREADS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, more = map(int, run.stdout.split())
    assert before > 1 and not more
