"""Files that change while their values are in use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from specrej import reloading_file
from specrej.reloading_file import ReloadingFile, read_line
from specrej.telemetry import metrics
from tests.certificates import place


def number(path: Path) -> int:
    return int(path.read_text())


@pytest.fixture
def num_rejected(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The metric of rejected files."""
    counts: list[float] = []
    monkeypatch.setattr(metrics, "add", lambda _, count: counts.append(count))
    return lambda: sum(counts)


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


def test_a_file_that_is_shorter_in_place_counts_once_it_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards calls against a tokens file that is truncated and then written again."""
    now_s = 0.0
    monkeypatch.setattr(reloading_file, "time", SimpleNamespace(monotonic=lambda: now_s))
    place(path, "one two three")
    watched = ReloadingFile((path,), path.read_text)
    for written in ("", "one"):
        path.write_text(written)
        assert watched.get() == "one two three"
        now_s += 4.0
        assert watched.get() == "one two three"
    path.write_text("one two three four")
    assert watched.get() == "one two three four"
    path.write_text("one")
    assert watched.get() == "one two three four"
    now_s += 5.0
    assert watched.get() == "one"
    place(path, "")  # renamed: at once
    assert watched.get() == ""


@pytest.mark.parametrize("broken", ["invalid", "missing", "closed"])
def test_an_unusable_change_keeps_the_last_and_is_logged_once(
    path: Path, broken: str, caplog: pytest.LogCaptureFixture, num_rejected: Callable[[], float]
) -> None:
    """Guards against a typing mistake that stops the service, or floods its log, and revoked tokens
    against permissions that are repaired: neither time, size nor inode change with them."""
    is_closed, num_reads = False, 0

    def read() -> int:
        nonlocal num_reads
        num_reads += 1
        if is_closed:
            raise PermissionError(13, "Permission denied")
        return number(path)

    watched = ReloadingFile((path,), read)
    is_closed = broken == "closed"
    place(path, "secret words" if broken == "invalid" else "3")
    if broken == "missing":
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert [watched.get() for _ in range(5)] == [1] * 5
    assert len(caplog.records) == num_rejected() == 1
    assert (num_reads == 2) == (broken == "invalid")  # a large file is not parsed for each call
    if broken == "closed":
        is_closed = False
    else:
        place(path, "3")
    assert watched.get() == 3
    assert num_rejected() == 0


def test_a_file_that_is_put_back_is_not_rejected(
    path: Path, num_rejected: Callable[[], float]
) -> None:
    """Guards an alert that would stay for ever: the file in use is there again."""
    watched = ReloadingFile((path,), partial(number, path))
    kept = path.rename(path.with_name("kept"))
    place(path, "words")
    assert watched.get() == num_rejected() == 1
    kept.replace(path)
    assert watched.get() == 1 and num_rejected() == 0


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
