"""Values in files that change while a service runs: certificates, tokens. Standard library only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_State = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """What `read` makes of the files at `paths`, made again when one of them has changed.

    A change that cannot be read leaves the last good value in force, and is logged once, without
    anything that the files hold (`read` must not quote them in its errors). Nothing is watched in
    the background: `get` looks, which takes microseconds. For any thread.

    Raises:
        OSError, ValueError: there is no good value to begin with.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = _state(self._paths)
        self._value = read()

    def get(self) -> T:
        """The value; the very same object for as long as the files do not change."""
        with self._lock:
            state = _state(self._paths)
            if state != self._seen:
                self._read_again(state)
            return self._value

    def _read_again(self, state: _State) -> None:
        problem: Exception | None = None
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            problem = error
        if _state(self._paths) != state:
            return  # replaced while it was read: the next look begins anew
        self._seen = state
        names = ", ".join(str(path) for path in self._paths)
        if problem is None:
            self._value = value
            log.info("%s changed and is in force", names)
        else:
            log.warning("%s changed and is no good, the last stays in force: %s", names, problem)


def _state(paths: Sequence[Path]) -> _State:
    """What changes whenever a file does; None for one that is not there."""
    return tuple(_state_of(path) for path in paths)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode tells a replaced file even if it is as long and, to the clock, as old.
    return found.st_mtime_ns, found.st_size, found.st_ino
