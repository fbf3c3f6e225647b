"""The prose rules of the project: a program, a request or a process is no person."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PERSONS = r"who|whoever|whom|nobody|somebody|everybody|anybody|strangers?"
VERBS = r"tells?|told|says?|said|kn[eo]ws?|believes?|forg[eo]ts?|speaks?|talks?|wants?|ask(s|ed)?"
BANNED = re.compile(rf"\b({PERSONS}|{VERBS})\b", re.IGNORECASE)
# Quotations of prompts, models' texts and other programs' names.
ALLOWED = re.compile(r"\bwell[- ]known\b|\bask\w* for\b|`[^`]*`|https?://\S+|\"Talk to them\.\"")
# Generated: stubs and results.
SKIPPED = ("specrej/v1/", "specrej/backend/", "clients/typescript/src/gen/", "experiments/results/")
PATTERNS = "*.py *.md *.proto *.yaml *.yml *.toml *.jinja *.ts *.go *.java Makefile .ci/run"
LISTED = subprocess.check_output(f"git ls-files {PATTERNS}".split(), cwd=ROOT, text=True)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings; whole files where they are not Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return enumerate(text.splitlines(), 1)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    parts = [t for t in tokens if t.type == tokenize.COMMENT or t.string.startswith('"""')]
    return ((n, line) for t in parts for n, line in enumerate(t.string.splitlines(), t.start[0]))


def test_prose_has_no_persons() -> None:
    hits = []
    for name in LISTED.split():
        # Most files have none of the words, and are not cut into tokens.
        if name.startswith(SKIPPED) or not BANNED.search((ROOT / name).read_text("utf-8")):
            continue
        lines = [(n, ALLOWED.sub("", line)) for n, line in prose(ROOT / name)]
        hits += [f"{name}:{n}: {line.strip()}" for n, line in lines if BANNED.search(line)]
    assert not hits, "\n".join(hits)
