"""Values read from files that may change while a service runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from specrej.telemetry import metrics, names

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_LINE_CHARACTERS = 8192
_SETTLED_S = 5.0  # a file that was written in place and is shorter is complete

_File = tuple[int, int, int] | None
_State = tuple[_File, ...]


class ReloadingFile(Generic[T]):
    """The value that `read` returns for the files at `paths`, read again when one has changed.

    If a changed file cannot be read, the last good value stays in use and one warning is logged
    (errors of `read` must not quote the files). An invalid file is read again when it changes, one
    that cannot be opened at each `get`: its permissions may be repaired. A file that was written in
    place and is shorter is read once it stays so for 5 s: it may be empty for a moment, or lack its
    end. There is no background watch: `get` compares file states, which takes microseconds.
    Thread-safe.

    Raises:
        OSError, ValueError: the first read failed.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._used = _state(self._paths)
        self._rejected: _State | None = None
        self._seen = self._used
        self._settled_s = 0.0  # when what is seen is complete
        self._is_final = True  # whether what is rejected stays so until it changes
        self._value = read()
        metrics.add(names.FILES_REJECTED, 0)  # the metric is exported from now on

    def get(self) -> T:
        """The value; the same object until a file changes."""
        with self._lock:
            state = _state(self._paths)
            if state == self._used:
                self._accept()
            elif (state != self._rejected or not self._is_final) and self._is_settled(state):
                self._read_again(state)
            return self._value

    def _is_settled(self, state: _State) -> bool:
        """Whether no file is shorter in place, or all have been as they are for `_SETTLED_S`."""
        if state != self._seen:
            is_shorter = any(map(_is_shorter, self._used, self._seen, state))
            self._settled_s = time.monotonic() + _SETTLED_S * is_shorter
            self._seen = state
        return time.monotonic() >= self._settled_s

    def _accept(self) -> None:
        if self._rejected is not None:
            metrics.add(names.FILES_REJECTED, -1)
            self._rejected = None

    def _read_again(self, state: _State) -> None:
        problem: Exception | None = None
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            problem = error
        if _state(self._paths) != state:
            return  # replaced while being read: the next call reads again
        paths = ", ".join(str(path) for path in self._paths)
        if problem is None:
            self._accept()
            self._value, self._used = value, state
            log.info("%s changed and is in use", paths)
            return
        if self._rejected is None:
            metrics.add(names.FILES_REJECTED, 1)
        is_final = not isinstance(problem, OSError)
        if (state, is_final) != (self._rejected, self._is_final):
            log.warning("%s changed and cannot be used, keeping the last: %s", paths, problem)
        self._rejected, self._is_final = state, is_final


def _state(paths: Sequence[Path]) -> _State:
    """Modification time, size and inode of each file; None for a missing one."""
    return tuple(_state_of(path) for path in paths)


def _is_shorter(used: _File, seen: _File, now: _File) -> bool:
    """Whether the file last seen was written in place, and is shorter than the one in use."""
    return bool(used and seen and now and seen[2] == now[2] and now[1] < used[1])


def _state_of(path: Path) -> _File:
    try:
        status = path.stat()
    except OSError:
        return None
    # The inode differs for a replaced file of equal size and time.
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_line(path: Path) -> str:
    """The one line of a file, such as a key that is sent in a header.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another number of lines, or other characters than printable ASCII.
    """
    line = path.read_text("ascii", "replace").strip()
    if not (line.isascii() and line.isprintable() and 0 < len(line) <= _MAX_LINE_CHARACTERS):
        most = _MAX_LINE_CHARACTERS
        raise ValueError(f"{path} must hold one line of 1 to {most} printable ASCII characters")
    return line
