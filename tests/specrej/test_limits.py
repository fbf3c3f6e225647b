"""Lengths are checked before conversion: at the limits a message passes, one beyond is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.contracts.validation import MAX_CHARACTERS, MAX_ITEMS, check_lengths
from specrej.v1 import orchestrator_pb2
from tests.serving import part

REQUESTS = [
    method.input_type
    for file in (generator_pb2, orchestrator_pb2, reward_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_WITHOUT_PATH = "GenerateStreamRequest.request"


def violations_of(message: Any) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in check_lengths(message)]


def is_text(field: Any) -> bool:
    return bool(field.type == field.TYPE_STRING)


def name_of(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"


def fields_of(descriptor: Any, outer: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a message, as the fields that lead to it."""
    for field in descriptor.fields:
        yield (*outer, field)
        if field.message_type:
            yield from fields_of(field.message_type, (*outer, field))


def filled(descriptor: Any, fields: tuple[Any, ...], value: Any) -> Any:
    """A message whose last of these fields has the value; the others lead to it."""
    field, *inner = fields
    if inner:
        part = filled(field.message_type, tuple(inner), value)
        value = [part] if field.is_repeated else part
    return GetMessageClass(descriptor)(**{field.name: value})


def path_of(fields: tuple[Any, ...]) -> str:
    """The path in errors; the first item of each repeated field but the last."""
    *outer, last = (field for field in fields if name_of(field) != _WITHOUT_PATH)
    steps = [f"{field.name}[0]" if field.is_repeated else field.name for field in outer]
    return ".".join([*steps, last.name])


FIELDS = [(request, fields) for request in REQUESTS for fields in fields_of(request)]
LISTS = [item for item in FIELDS if item[1][-1].is_repeated]
TEXTS = [item for item in FIELDS if is_text(item[1][-1])]


def id_of(value: Any) -> str:
    return path_of(value) if isinstance(value, tuple) else str(value.name)


@pytest.mark.parametrize(("request_", "fields"), LISTS, ids=id_of)
def test_one_item_more_than_the_limit_is_refused(request_: Any, fields: tuple[Any, ...]) -> None:
    """Guards against a new repeated field without a limit, and a limit that is off by one."""
    field = fields[-1]
    most = MAX_ITEMS[name_of(field)]
    item: Any = "" if is_text(field) else 300
    item = GetMessageClass(field.message_type)() if field.message_type else item
    assert violations_of(filled(request_, fields, [item] * most)) == []
    beyond = filled(request_, fields, [item] * (most + 1))
    assert violations_of(beyond) == [(path_of(fields), f"must have at most {most} items")]


@pytest.mark.parametrize(("request_", "fields"), TEXTS, ids=id_of)
def test_one_character_more_than_the_limit_is_refused(
    request_: Any, fields: tuple[Any, ...]
) -> None:
    """Guards against a new text without a limit, and one that counts bytes."""
    field = fields[-1]
    most, index = MAX_CHARACTERS[name_of(field)], "[1]" if field.is_repeated else ""
    for size, expected in (
        (most, []),
        (most + 1, [f"must have at most {most} characters, has {most + 1}"]),
    ):
        text: Any = "\U0001f468" * size
        message = filled(request_, fields, ["", text] if field.is_repeated else text)
        assert violations_of(message) == [(path_of(fields) + index, what) for what in expected]


def test_the_items_of_a_long_list_are_not_visited() -> None:
    """Guards the event loop and memory: each item takes a hundred times its bytes as an object."""
    data = part(2, part(1, b"") * (4 * 2**20))  # 8 MiB of empty messages
    message = orchestrator_pb2.GenerateRequest.FromString(data)
    began = time.process_time()
    assert violations_of(message) == [("prompt.messages", "must have at most 1024 items")]
    assert time.process_time() - began < 0.5


def test_unknown_fields_are_not_violations() -> None:
    """Guards clients of later versions."""
    data = part(100, b"x" * 8_000_000) + b"\xa1\x06" + bytes(8)
    assert violations_of(orchestrator_pb2.GenerateRequest.FromString(data)) == []
