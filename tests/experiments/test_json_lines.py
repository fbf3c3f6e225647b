"""The files of branching, live runs and collections, which are continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.json_lines import add_line, read_lines

FIRST = {"text": "naïve\u2028🙂\n"}


@pytest.mark.parametrize(
    ("torn", "kept"), [('{"a": "é'.encode()[:-1], []), (b"{", []), (b'{"a": 1}', [{"a": 1}])]
)
def test_file_is_continued_after_an_interruption(
    tmp_path: Path, torn: bytes, kept: list[object]
) -> None:
    """Guards a line that merges with an incomplete one, and a whole last one without an end."""
    path = tmp_path / "new" / "lines.jsonl"
    assert read_lines(path) == []
    add_line(path, FIRST)
    with path.open("ab") as file:
        file.write(torn)
    assert read_lines(path) == [FIRST, *kept]
    for number in range(2):
        add_line(path, {"number": number})
    assert read_lines(path) == [FIRST, *kept, {"number": 0}, {"number": 1}]
