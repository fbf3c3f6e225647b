"""Files that change while their values are in use."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import pytest

from specrej.reloading_file import ReloadingFile, read_line
from tests.certificates import place


def number(path: Path) -> int:
    return int(path.read_text())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place(tmp_path / "number", "1")
    return tmp_path / "number"


def test_the_value_is_read_once_per_change(path: Path) -> None:
    """Guards against parsing certificates at every connection and tokens at every call, and against
    missing a rotation within the clock's resolution."""
    reads: list[int] = []

    def read() -> int:
        reads.append(number(path))
        return reads[-1]

    watched = ReloadingFile((path,), read)
    assert [watched.get(), watched.get()] == [1, 1]
    place(path, "2")
    assert [watched.get(), watched.get()] == [2, 2]
    before = path.stat()
    place(path, "7")  # of the same length and time
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watched.get() == 7
    assert reads == [1, 2, 7]


@pytest.mark.parametrize("broken", ["secret words", None])
def test_a_broken_change_keeps_the_last_and_is_logged_once(
    path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a typing mistake that stops the service, or floods its log."""
    watched = ReloadingFile((path,), partial(number, path))
    if broken is None:
        path.unlink()
    else:
        place(path, broken)
    with caplog.at_level(logging.WARNING):
        assert [watched.get() for _ in range(5)] == [1] * 5
    assert len(caplog.records) == 1
    assert watched.is_rejected
    place(path, "3")
    assert watched.get() == 3
    assert not watched.is_rejected


def test_a_file_whose_permissions_are_repaired_is_read(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards revoked tokens: neither time, size nor inode change with the permissions."""
    is_closed = False

    def read() -> int:
        if is_closed:
            raise PermissionError(13, "Permission denied")
        return number(path)

    watched = ReloadingFile((path,), read)
    is_closed = True
    place(path, "2")
    assert [watched.get(), watched.get()] == [1, 1]
    assert len(caplog.records) == 1 and watched.is_rejected
    is_closed = False
    assert watched.get() == 2
    assert not watched.is_rejected


def test_a_file_that_is_put_back_is_not_rejected(path: Path) -> None:
    """Guards an alert that would stay for ever: the file in use is there again."""
    watched = ReloadingFile((path,), partial(number, path))
    kept = path.rename(path.with_name("kept"))
    place(path, "words")
    assert watched.get() == 1 and watched.is_rejected
    kept.replace(path)
    assert watched.get() == 1 and not watched.is_rejected


def test_a_file_replaced_while_it_is_read_is_read_again(path: Path) -> None:
    """Guards against a certificate of before with a key of after."""
    replacements = iter(["3", None])

    def read() -> int:
        value = number(path)
        if value > 1 and (new := next(replacements, None)):
            place(path, new)
        return value

    watched = ReloadingFile((path,), read)
    place(path, "2")
    assert watched.get() == 1  # 2 was replaced before it was in force
    assert watched.get() == 3


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo", "schl\u00fcssel", "a\tb", "k" * 8193])
def test_what_no_header_can_hold_is_refused(path: Path, text: str) -> None:
    """Guards against a key that fails at every request instead of at the start."""
    path.write_text(text)
    with pytest.raises(ValueError, match="must hold one line of 1 to 8192 printable ASCII"):
        read_line(path)
