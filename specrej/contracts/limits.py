"""Limits of what a request may contain, checked on its bytes before any object is made.

A field of two bytes takes a hundred times as much as an object, so a message is parsed only if no
repeated field and no text is too long. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any

# Default limits of what a peer may send.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # between services
MAX_PUBLIC_MESSAGE_BYTES = 8 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024

MAX_PROMPT_CHARACTERS = 1_000_000  # of all messages
MAX_DECISION_TOKENS = 1024
MAX_REWARDS = 8
MAX_BATCH = 65_536  # candidates that a service can be configured for
_NAME_CHARACTERS = 256
MAX_TOKEN_CHARACTERS = 128  # of a token; the longest of common vocabularies are white space
_TEXT_CHARACTERS = 2**17 * MAX_TOKEN_CHARACTERS  # of a candidate: as many tokens as it may have

# All repeated fields of requests: how many items each may have. For public requests, these and the
# numbers of characters are rules of the schema, too.
_ITEMS: Mapping[str, int] = {
    "Prompt.messages": 1024,
    "Sampling.stop": 16,
    "Sampling.stop_token_ids": 64,
    "Sampling.logit_bias": 1024,
    "Sampling.bad_words": 64,
    "Schedule.tokens": MAX_DECISION_TOKENS,
    "Selection.rewards": MAX_REWARDS,
    "OpenSession.started": MAX_BATCH,
    "StartedCandidate.token_ids": 2**17,
    "PruneSession.keep": MAX_BATCH,
    "PruneSession.forks": MAX_BATCH,
    "ScoreRequest.responses": MAX_BATCH,
    "ScoreBatch.candidates": MAX_BATCH,
}
# All texts of requests: how many characters each may have.
_CHARACTERS: Mapping[str, int] = {
    "Message.role": _NAME_CHARACTERS,
    "Message.content": MAX_PROMPT_CHARACTERS,
    "Prompt.text": MAX_PROMPT_CHARACTERS,
    "Sampling.stop": 256,
    "Sampling.bad_words": 256,
    "JsonSchema.schema": 65_536,
    "Regex.pattern": 4096,
    "Grammar.lark": 65_536,
    "GenerateRequest.model": _NAME_CHARACTERS,
    "WeightedReward.name": _NAME_CHARACTERS,
    "GetRecordRequest.request_id": _NAME_CHARACTERS,
    "OpenSession.cache_salt": 128,
    "OpenSession.adapter": _NAME_CHARACTERS,
    "ScoreRequest.reward": _NAME_CHARACTERS,
    "ScoreRequest.responses": _TEXT_CHARACTERS,
    "OpenScoring.reward": _NAME_CHARACTERS,
    "ScoreCandidate.text": _TEXT_CHARACTERS,
}
# Its fields have the same paths in errors as those of Generate.
_WITHOUT_PATH = "GenerateStreamRequest.request"

_UNBOUNDED = 2**63
# A longer list of numbers must be packed into one field, as encoders of proto3 do. To scan millions
# of fields takes seconds.
_LONG_LIST = 1024
# Fields that a request may have beyond those of this schema, as later versions have.
_UNKNOWN_FIELDS = 256

# Bytes that are not the first of a character in UTF-8, and not the last of a varint.
_NOT_FIRST = bytes(range(0x80, 0xC0))
_NOT_LAST = bytes(range(0x80, 0x100))
_LENGTH_DELIMITED = 2  # wire type of texts, messages and packed numbers
_MAX_BYTE = 0x7F  # of a varint, the largest of one byte


def check(data: bytes, descriptor: Any) -> None:
    """Check a serialized request, whose message has this descriptor.

    Raises:
        InvalidRequest: every field that is too long; or the bytes are no message.
    """
    kind = _kind(descriptor)
    if len(data) <= kind.always_valid_bytes:
        return
    scan = _Scan(data, kind.max_fields + _UNKNOWN_FIELDS)
    try:
        scan.message(kind, 0, len(data), "")
    except _TooManyFields:
        if not scan.violations:
            scan.violations.append(Violation("request", "has too many fields"))
    except (IndexError, ValueError):
        raise malformed() from None
    raise_if_any(scan.violations)


def malformed() -> InvalidRequest:
    """The error for bytes that are no message."""
    return InvalidRequest([Violation("request", "must be a valid message")])


@dataclass(frozen=True, slots=True)
class _Field:
    """A text, a message or a repeated field."""

    name: str
    is_repeated: bool
    max_items: int  # 1 if it is not repeated
    max_characters: int  # of a text; else unbounded
    message: _Kind | None

    @property
    def is_number(self) -> bool:
        return not self.message and self.max_characters == _UNBOUNDED

    @property
    def max_fields(self) -> int:
        if self.is_number and self.max_items > _LONG_LIST:
            return 1
        return self.max_items * (1 + (self.message.max_fields if self.message else 0))

    @property
    def always_valid_list_bytes(self) -> int:
        """No list of at most this size has too many items: each takes two bytes, packed one."""
        return self.max_items * (1 if self.is_number else 2)

    @property
    def always_valid_bytes(self) -> int:
        """No item of at most this size exceeds a limit."""
        return self.message.always_valid_bytes if self.message else self.max_characters


@dataclass(frozen=True, slots=True)
class _Kind:
    """A message type; its fields by number, without those that are numbers."""

    fields: Mapping[int, _Field]
    always_valid_bytes: int  # no message of at most this size exceeds a limit
    max_fields: int  # of a message within all limits


@cache
def _kind(descriptor: Any) -> _Kind:
    """Raises KeyError: a repeated field or a text has no limit."""
    fields = {item.number: _field(item) for item in descriptor.fields}
    limited = {n: item for n, item in fields.items() if item.is_repeated or not item.is_number}
    smallest = [item.always_valid_bytes for item in limited.values()]
    smallest += [item.always_valid_list_bytes for item in limited.values() if item.is_repeated]
    num_fields = sum(item.max_fields for item in fields.values())
    return _Kind(limited, min(smallest, default=_UNBOUNDED), num_fields)


def _field(described: Any) -> _Field:
    name = f"{described.containing_type.name}.{described.name}"
    is_text = described.type == described.TYPE_STRING
    return _Field(
        "" if name == _WITHOUT_PATH else described.name,
        described.is_repeated,
        _ITEMS[name] if described.is_repeated else 1,
        _CHARACTERS[name] if is_text else _UNBOUNDED,
        _kind(described.message_type) if described.message_type else None,
    )


class _TooManyFields(Exception):
    """The message has more fields than its limits allow in all."""


class _Scan:
    """One pass over the fields of a message, without those that cannot exceed a limit."""

    def __init__(self, data: bytes, max_fields: int) -> None:
        self._data = data
        self._fields_left = max_fields
        self.violations: list[Violation] = []

    def message(self, kind: _Kind, start: int, end: int, path: str) -> None:
        """Check data[start:end]. Raises _TooManyFields; IndexError or ValueError: malformed."""
        counts: dict[int, int] = {}
        for number, wire_type, first, last in _fields(self._data, start, end):
            if not self._fields_left:
                raise _TooManyFields
            self._fields_left -= 1
            if field := kind.fields.get(number):
                num_before = counts.get(number, 0)
                num_items = 1
                if wire_type == _LENGTH_DELIMITED and field.is_number:  # packed
                    num_items = len(self._data[first:last].translate(None, _NOT_LAST))
                counts[number] = num_before + num_items
                if counts[number] > field.max_items:
                    if num_before <= field.max_items:
                        self._too_many(field, path)
                elif last - first > field.always_valid_bytes:
                    self._long_item(field, num_before, first, last, path)

    def _too_many(self, field: _Field, path: str) -> None:
        most = f"must have at most {field.max_items} items" if field.is_repeated else "must be one"
        self.violations.append(Violation(path + field.name or "request", most))

    def _long_item(self, field: _Field, index: int, first: int, last: int, path: str) -> None:
        path += f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.message:
            self.message(field.message, first, last, f"{path}." if path else "")
            return
        num_characters = len(self._data[first:last].translate(None, _NOT_FIRST))
        if num_characters > field.max_characters:
            most = f"must have at most {field.max_characters} characters, has {num_characters}"
            self.violations.append(Violation(path, most))


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, first and last position of each field's value in data[start:end].

    Raises IndexError or ValueError: malformed.
    """
    while start < end:
        tag, first = data[start], start + 1
        if tag > _MAX_BYTE:
            tag, first = _varint(data, start)
        match tag & 7:
            case 2:  # texts, messages and packed numbers
                size, first = data[first], first + 1
                if size > _MAX_BYTE:
                    size, first = _varint(data, first - 1)
                start = first + size
            case 0:
                _, start = _varint(data, first)
            case 1:
                start = first + 8
            case 5:
                start = first + 4
            case _:
                raise ValueError
        if start > end:
            raise ValueError
        yield tag >> 3, tag & 7, first, start


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and the position behind it."""
    value = 0
    for place in range(10):
        byte = data[start + place]
        value |= (byte & _MAX_BYTE) << 7 * place
        if byte <= _MAX_BYTE:
            return value, start + place + 1
    raise ValueError
