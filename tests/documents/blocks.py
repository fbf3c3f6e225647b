"""The blocks of code in the documents, and what runs each of them.

A block of commands or code may have a mark, a comment on the line above:

    <!-- run: tests/FILE.py::TEST -->   that test reads the document, or runs the same program
    <!-- not run: REASON -->

`test_commands.py` runs all others that are in a language of RUNNABLE.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNNABLE = {"sh", "python"}
# README.md has no comments: its blocks without a language, by their beginning.
_README = {
    "make demo": (
        "sh",
        "run: tests/gateway/page/test_demo.py::test_the_demo_prints_the_address_of_the_page",
    ),
    "make up": ("sh", ""),
    "from openai": ("python", "run: tests/e2e/test_gateway.py::test_printed_examples_run"),
    "SPECREJ_GENERATOR_MODEL": ("sh", ""),
}
_BLOCK = re.compile(r"^(?:<!-- (.+) -->\n)?```(.*)\n([\s\S]*?)^```$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, where it is, and its mark, "" without one."""

    place: str
    language: str
    code: str
    mark: str


def blocks_of(name: str, text: str) -> Iterator[Block]:
    """The blocks of a document."""
    for match in _BLOCK.finditer(text):
        mark, language, code = match.groups("")
        if name == "README.md":
            known = (value for start, value in _README.items() if code.startswith(start))
            language, mark = next(known, (language, mark))
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(f"{name}:{line}", language, code, mark)


def _documents() -> Iterator[Block]:
    listed = ["git", "ls-files", "*.md", ":!:experiments/results", ":!:CHANGELOG.md"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in names.stdout.split():
        yield from blocks_of(name, (ROOT / name).read_text(encoding="utf-8"))


BLOCKS = tuple(_documents())
UNMARKED = tuple(b for b in BLOCKS if b.language in RUNNABLE and not b.mark)
