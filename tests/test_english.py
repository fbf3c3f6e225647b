"""The prose rules of the project: a program, a request or a process is no person."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PERSONS = r"who|whoever|whom|nobody|somebody|everybody|anybody|strangers?"
VERBS = r"tells?|told|says?|said|kn[eo]ws?|believes?|forg[eo]ts?|speaks?|talks?|wants?|ask(s|ed)?"
BANNED = re.compile(rf"\b({PERSONS}|{VERBS})\b", re.IGNORECASE)
# Quotations of prompts, models' texts and other programs' names.
ALLOWED = re.compile(r"\bwell[- ]known\b|\bask\w* for\b|`[^`]*`|https?://\S+|\"Talk to them\.\"")
# Generated files, and results.
GENERATED = ("specrej/v1/", "specrej/backend/v1/", "clients/typescript/src/gen/")
SKIPPED = (*GENERATED, "experiments/results/")
PATTERNS = ["*.py", "*.md", "*.proto", "*.yaml", "*.ts", "*.go", "*.java", "Makefile"]
LISTING = ["git", "ls-files", *PATTERNS]
FILES = subprocess.run(LISTING, cwd=ROOT, capture_output=True, text=True).stdout.split()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings; whole files where they are not Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            yield from enumerate(token.string.splitlines(), token.start[0])


@pytest.mark.parametrize("name", [f for f in FILES if not f.startswith(SKIPPED)])
def test_prose_has_no_persons(name: str) -> None:
    lines = [(n, ALLOWED.sub("", line)) for n, line in prose(ROOT / name)]
    hits = [f"{name}:{n}: {line.strip()}" for n, line in lines if BANNED.search(line)]
    assert not hits, "\n".join(hits)
