"""Parts of a text that can be its answer: its last number, what is boxed, a match in it.

Callers steer the texts and the expressions: everything takes linear time, but for an expression's
matches, of which all together can take quadratic time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from typing import TypeAlias

from specrej.isolated import compile_pattern

# From a text; None: it has none.
Extract: TypeAlias = Callable[[str], str | None]

# The sign of "5-3" is not the number's.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+\u2212])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?%?"
)
_BOX_OR_BRACE = re.compile(r"\\boxed\{|[{}]")


def last_number(text: str) -> str | None:
    """As it is written."""
    numbers: list[str] = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def value_of(number: str) -> Decimal | None:
    """The value of a text that is a number, with or without a percent sign; None: it is another."""
    if not _NUMBER.fullmatch(number):
        return None
    return Decimal(number.rstrip("%").replace(",", "").replace("\u2212", "-"))


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} of LaTeX that is closed; braces in it are balanced."""
    opened, last = list[int](), (0, -1)  # where boxes begin, -1: other braces; the last box's ends
    for mark in _BOX_OR_BRACE.finditer(text):
        if mark[0] != "}":
            opened.append(mark.end() if mark[0] != "{" else -1)
        elif opened and (begin := opened.pop()) >= 0:
            last = max(last, (begin, mark.start()))
    return text[slice(*last)] if last[0] else None


def by_expression(pattern: str, most: int, max_mem: int = 8 << 20) -> Extract:
    """The last match of RE2's `pattern`, or its first group if it has any.

    most: characters at the end of a text that are read; max_mem: bytes of the compiled expression.
    Raises ValueError: the pattern is not one of RE2, or takes more bytes.
    """
    compiled = compile_pattern(pattern, max_mem)

    def extract(text: str) -> str | None:
        matches = deque(compiled.finditer(text[-most:]), maxlen=1)
        return matches[0][min(1, compiled.groups)] if matches else None

    return extract
