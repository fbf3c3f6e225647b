"""Files of JSON lines that are continued after an interruption, also one within a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines that parse: an interrupted write leaves one that does not. None without a file."""
    lines = []
    # Bytes, since an incomplete line may not be valid UTF-8.
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def add_line(path: Path, line: Line) -> None:
    """Append a line; creates the file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # End a line that was not written to its end, so that this one can be parsed.
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        is_torn = file.read(1) not in (b"", b"\n")
        text = "\n" * is_torn + json.dumps(line, ensure_ascii=False) + "\n"
        file.write(text.encode())
