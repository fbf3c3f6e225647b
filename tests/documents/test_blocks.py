"""Every command in the documents is run by a test, or marked with the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.blocks import (
    BLOCKS,
    COMMANDS,
    OTHERS,
    ROOT,
    RUNNABLE,
    UNMARKED,
    Block,
    blocks_of,
)

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problem_of(block: Block) -> str:
    """What is wrong with a block's language or mark; "": nothing."""
    if block.language not in COMMANDS | OTHERS:
        return f"the language must be one of {', '.join(sorted(COMMANDS | OTHERS))}"
    if not block.mark and block.language in COMMANDS - RUNNABLE:
        return f"{block.language} needs a mark"
    kind, _, rest = block.mark.partition(": ")
    if kind == "run":
        path, _, test = rest.partition("::")
        if not (ROOT / path).is_file():
            return f"there is no {path}"
        if not test:
            return f"a mark names a test of {path}"
        if f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8"):
            return f"{path} has no {test}"
    elif kind == "not run" and len(rest.split()) < 2:
        return "a reason must have two words or more"
    elif kind not in {"", "run", "not run"}:
        return f"a mark is 'run: TEST' or 'not run: REASON', not {block.mark!r}"
    return ""


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_has_a_language_and_a_valid_mark(block: Block) -> None:
    """Guards against blocks that no test runs, without a reason."""
    assert problem_of(block) == "", block.place


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nls\n```", "language"),
        ("<!-- run: tests/gone.py -->\n```sh\nls\n```", "no tests/gone.py"),
        ("<!-- run: tests/documents/test_blocks.py::test_gone -->\n```sh\nls\n```", "no test_gone"),
        ("<!-- run: tests/documents/test_blocks.py -->\n```sh\nls\n```", "names a test"),
        ("<!-- not run: slow -->\n```sh\nls\n```", "reason"),
        ("<!-- later -->\n```sh\nls\n```", "mark"),
        ("```go\nmain()\n```", "go needs a mark"),
        ("```sh\nls\n```", ""),
    ],
)
def test_bad_marks_are_problems(text: str, problem: str) -> None:
    """Guards against a check that accepts everything."""
    (block,) = blocks_of("page.md", f"# Title\n\n{text}\n")
    assert block.place.startswith("page.md:")
    assert problem in problem_of(block) and bool(problem) == bool(problem_of(block))


def test_the_blocks_are_found() -> None:
    """Guards against a pattern that matches few of them."""
    fences = sum(
        (ROOT / name).read_text(encoding="utf-8").count("\n```")
        for name in {block.place.partition(":")[0] for block in BLOCKS}
    )
    assert len(BLOCKS) == fences // 2
    assert len(UNMARKED) > 15


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_named_targets_exist(page: Path) -> None:
    """Guards against `make` targets that were renamed."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]+)", text, re.MULTILINE))
    assert named <= TARGETS
