"""What a complete answer votes for, as text; equal answers have one spelling.

They run on the event loop, on texts that a caller can steer: what they read is bounded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any

from specrej import extraction
from specrej.contracts import Vote
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.extraction import Extract

log = logging.getLogger(__name__)

_MAX_CHARACTERS = 65_536  # the end of an answer, which is read
_MAX_MATCHED = 4096  # of these, by an expression: all matches of some take quadratic time
_MAX_EXPRESSION_BYTES = 1 << 20
_MAX_OPENINGS = 64  # of JSON in a text, that are tried


def functions_of(paths: Mapping[str, str]) -> dict[str, Extract]:
    """Extractors by name, from dotted paths such as "my_votes:unit".

    Raises:
        ValueError: there is no such function.
    """
    functions = {}
    for name, path in paths.items():
        try:
            functions[name] = resolve_name(path)
        except Exception as error:  # anything that the module's own code raises
            raise ValueError(f"extractor {name}: {type(error).__name__}: {error}") from None
        if not callable(functions[name]):
            raise ValueError(f"extractor {name}: {path} cannot be called")
    return functions


def extractor(vote: Vote, functions: Mapping[str, Extract]) -> Extract:
    """The extractor of a request.

    Raises:
        InvalidRequest: the expression or pointer is not valid, or there is no such function.
    """
    match vote.extractor:
        case "number":
            return _spelling(extraction.last_number)
        case "boxed":
            return _spelling(extraction.boxed)
        case "regex":
            try:
                found = extraction.by_expression(vote.argument, _MAX_MATCHED, _MAX_EXPRESSION_BYTES)
            except ValueError as error:
                raise _invalid(str(error)) from None
            return _spelling(found)
        case "tool_call":
            return _tool_call
        case "json":
            return _by_pointer(vote.argument)
        case "function":
            if vote.argument in functions:
                return _safely(functions[vote.argument])
            available = ", ".join(functions) or "none"
            raise _invalid(f'unknown extractor "{vote.argument}"; available: {available}')


def _spelling(find: Extract) -> Extract:
    def extract(text: str) -> str | None:
        found = find(text[-_MAX_CHARACTERS:])
        return None if found is None else _spelled(found)

    return extract


def _by_pointer(pointer: str) -> Extract:
    if pointer and not pointer.startswith("/"):
        raise _invalid("must be empty or begin with /: a JSON pointer")
    keys = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]

    def extract(text: str) -> str | None:
        value = _whole(text)
        for key in keys:
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return None if value is None else _canonical(value)

    return extract


def _tool_call(text: str) -> str | None:
    """Name and arguments: in tags as Hermes and Qwen write them, or the first JSON with both."""
    marked = text[-_MAX_CHARACTERS:].partition("<tool_call>")[2].partition("</tool_call>")[0]
    for value in (value for part in (marked, text) for value in _values(part)):
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", value.get("parameters", {}))
            return _canonical({"name": value["name"], "arguments": arguments})
    return None


def _whole(text: str) -> Any:
    """The JSON that a text is, or the first object or list in it."""
    try:
        return json.loads(text[-_MAX_CHARACTERS:])
    except (ValueError, RecursionError):
        return next(iter(_values(text)), None)


def _values(text: str) -> Iterable[Any]:
    """The objects and lists in JSON that a text has, in order."""
    decoder, at = json.JSONDecoder(), 0
    text = text[-_MAX_CHARACTERS:]
    for _ in range(_MAX_OPENINGS):
        starts = [start for mark in "{[" if (start := text.find(mark, at)) >= 0]
        if not starts:
            return
        try:
            value, at = decoder.raw_decode(text, min(starts))
            yield value
        except (ValueError, RecursionError):
            at = min(starts) + 1


def _canonical(value: Any) -> str:
    if isinstance(value, str):
        return _spelled(value)
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _spelled(text: str) -> str:
    """A number in one spelling, 1000 for 1,000, +1000.0 and 1e3, with its percent sign; other text
    without white space around it."""
    text = text.strip()
    number = extraction.value_of(text)
    if number is None:
        return text
    written = f"{number:f}" if number else "0"  # not normalize(), which rounds
    written = written.rstrip("0").rstrip(".") if "." in written else written
    return written + "%" * text.endswith("%")


def _safely(function: Extract) -> Extract:
    def extract(text: str) -> str | None:
        try:
            answer = function(text)
        except Exception:
            log.warning("an extractor failed: the candidate does not vote", exc_info=True)
            return None
        return None if answer is None else str(answer)

    return extract


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest([Violation("selection.vote.argument", description)])
