"""Where compiled code is kept."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from specrej.inference import cpu_jobs
from specrej.inference.cpu_jobs import Kernel, cache_folder


def test_code_is_kept_apart_for_each_text_that_goes_into_it(tmp_path: Path) -> None:
    """Guards against a kernel that goes on with an older form of what it calls."""
    called = tmp_path / "cpu_called.py"
    called.write_text("1")
    before = cache_folder(tmp_path, tmp_path)
    assert cache_folder(tmp_path, tmp_path) == before
    called.write_text("2")
    assert cache_folder(tmp_path, tmp_path) != before


def test_a_process_waits_for_another_that_compiles() -> None:
    """Guards against services that start together and all compile the same kernels."""
    assert cpu_jobs._CACHE
    made = threading.Thread(target=Kernel, args=(_nothing,))
    with (cpu_jobs._CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made.start()
        made.join(0.2)
        assert made.is_alive()
    made.join(60)
    assert not made.is_alive()


def test_a_cache_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against a service that cannot start because it cannot lock the folder."""
    monkeypatch.setattr(cpu_jobs, "_CACHE", tmp_path / "missing")
    assert Kernel(_nothing).address


def _nothing(address: int) -> None:
    pass
