"""Lengths are checked on bytes: at the limits a request passes, one beyond each is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.contracts import errors, limits
from specrej.contracts.errors import InvalidRequest
from specrej.v1 import common_pb2, orchestrator_pb2
from tests.serving import part
from tests.test_fuzz import messages_of

REQUESTS = [
    method.input_type
    for file in (generator_pb2, orchestrator_pb2, reward_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def violations_of(data: bytes, descriptor: Any) -> list[tuple[str, str]]:
    try:
        limits.check(data, descriptor)
    except InvalidRequest as error:
        return [(violation.field, violation.description) for violation in error.violations]
    return []


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
    *outer, last = (field for field in fields if name_of(field) != limits._WITHOUT_PATH)
    steps = [f"{field.name}[0]" if field.is_repeated else field.name for field in outer]
    return ".".join([*steps, last.name])


FIELDS = [(request, fields) for request in REQUESTS for fields in fields_of(request)]
LISTS = [item for item in FIELDS if item[1][-1].is_repeated]
TEXTS = [item for item in FIELDS if is_text(item[1][-1])]


def id_of(value: Any) -> str:
    return path_of(value) if isinstance(value, tuple) else str(value.name)


def test_every_limit_is_that_of_a_field() -> None:
    """Guards against a limit whose field was renamed."""
    files = (common_pb2, generator_pb2, orchestrator_pb2, reward_pb2)
    messages = [kind for file in files for kind in file.DESCRIPTOR.message_types_by_name.values()]
    names = {name_of(field) for kind in messages for field in kind.fields}
    assert {*limits._ITEMS, *limits._CHARACTERS, limits._WITHOUT_PATH} <= names


@pytest.mark.parametrize(("request_", "fields"), LISTS, ids=id_of)
def test_one_item_more_than_the_limit_is_refused(request_: Any, fields: tuple[Any, ...]) -> None:
    """Guards against a new repeated field without a limit, and a limit that is off by one."""
    field = fields[-1]
    most = limits._ITEMS[name_of(field)]
    item: Any = "" if is_text(field) else 300
    item = GetMessageClass(field.message_type)() if field.message_type else item
    at = filled(request_, fields, [item] * most).SerializeToString()
    assert violations_of(at, request_) == []
    beyond = filled(request_, fields, [item] * (most + 1)).SerializeToString()
    expected = [(path_of(fields), f"must have at most {most} items")]
    assert violations_of(beyond, request_) == expected


@pytest.mark.parametrize(("request_", "fields"), TEXTS, ids=id_of)
def test_one_character_more_than_the_limit_is_refused(
    request_: Any, fields: tuple[Any, ...]
) -> None:
    """Guards against a new text without a limit, and one that counts bytes."""
    field = fields[-1]
    most = limits._CHARACTERS[name_of(field)]
    for character in ("x", "\U0001f468"):
        texts: list[Any] = [character * most, character * (most + 1)]
        index = "[1]" if field.is_repeated else ""
        at, beyond = (
            filled(request_, fields, ["", text] if field.is_repeated else text).SerializeToString()
            for text in texts
        )
        assert violations_of(at, request_) == []
        expected = f"must have at most {most} characters, has {most + 1}"
        assert violations_of(beyond, request_) == [(path_of(fields) + index, expected)]


GENERATE = orchestrator_pb2.GenerateRequest.DESCRIPTOR
SCORE = reward_pb2.ScoreSessionRequest.DESCRIPTOR


@pytest.mark.parametrize(
    ("data", "request_", "fields"),
    [
        (part(2, part(1, b"") * 1_000_000), GENERATE, ["prompt.messages"]),
        (part(3, part(5, b"") * 1_000_000), GENERATE, ["sampling.stop"]),
        (part(2, b"") * 1_000_000, GENERATE, ["prompt"]),
        (part(1, b"") * 1_000_000, GENERATE, ["model"]),
        (part(100, b"") * 1_000_000, GENERATE, ["request"]),
        (b"\x30\x01" * 1_000_000, GENERATE, ["request"]),
        (part(3, part(1, b"") * 1_000_000), SCORE, ["batch.candidates"]),
        # Each replaces the other, and both are objects until the end.
        ((part(2, b"") + part(3, b"")) * 500_000, SCORE, ["open", "batch"]),
    ],
)
def test_a_small_message_of_many_parts_is_refused(
    data: bytes, request_: Any, fields: list[str]
) -> None:
    """Guards against a request that takes a hundred times its size as objects."""
    assert [field for field, _ in violations_of(data, request_)] == fields


def test_parts_of_one_message_are_counted_together() -> None:
    """Guards against a message in two parts, which a parser merges: nine rewards."""
    rewards = part(4, part(5, part(1, b"name")) * 5)
    assert violations_of(rewards, GENERATE) == []
    assert violations_of(rewards * 2, GENERATE) == [("selection", "must be one")]


def test_numbers_count_packed_and_not() -> None:
    """Guards against a list in two encodings, which a parser joins."""
    tokens = part(4, b"\x01" * 600) + b"\x20\x81\x01" * 424
    schedule = orchestrator_pb2.Schedule.DESCRIPTOR
    assert violations_of(tokens, schedule) == []
    assert len(orchestrator_pb2.Schedule.FromString(tokens).tokens) == 1024
    (violation,) = violations_of(tokens + b"\x20\x01", schedule)
    assert violation[0] == "tokens"


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: str(kind.name))
def test_few_fields_are_scanned(kind: Any) -> None:
    """Guards the event loop: 64 MiB of numbers that are fields of their own took half a minute."""
    assert limits._kind(kind).max_fields < 1_000_000


def test_unknown_fields_are_no_violation() -> None:
    """Guards clients of later versions."""
    data = part(100, b"x" * 8_000_000) + b"\xa1\x06" + bytes(8) + b"\xa5\x06" + bytes(4)
    assert violations_of(data, GENERATE) == []


@pytest.mark.parametrize(
    "data",
    [
        part(2, b"x" * 3000)[:-1],  # cut
        b"\x12" + b"\xff" * 3000,  # a length without end
        b"\xff" * 3000,
        part(100, b"x" * 3000) + b"\x12",
        part(100, b"x" * 3000) + b"\xa1\x06\x00",
        part(100, b"x" * 3000) + b"\xa3\x06",  # a group
    ],
)
def test_malformed_bytes_are_an_invalid_request(data: bytes) -> None:
    """Guards against INTERNAL for bytes that are no message, and against long loops over them."""
    assert violations_of(data, GENERATE) == [("request", "must be a valid message")]


# Limits so small that random messages exceed them


def lengths_of(message: Any, path: str = "") -> set[str]:
    """The paths of the violations of a parsed message, for comparison."""
    paths = set()
    for field, value in message.ListFields():
        where = path + field.name
        if where == "request":
            where = ""
        items = value if field.is_repeated else [value]
        if len(items) > limits._ITEMS.get(name_of(field), 1):
            paths.add(where)
        for index, item in enumerate(islice(items, limits._ITEMS.get(name_of(field), 1))):
            here = f"{where}[{index}]" if field.is_repeated else where
            if field.message_type:
                paths |= lengths_of(item, f"{here}." if here else "")
            elif is_text(field):
                paths |= {here} if len(item) > limits._CHARACTERS[name_of(field)] else set()
    return paths


@pytest.fixture(scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_ITEMS", dict.fromkeys(limits._ITEMS, 2))
        patch.setattr(limits, "_CHARACTERS", dict.fromkeys(limits._CHARACTERS, 3))
        patch.setattr(errors, "MAX_VIOLATIONS", 1000)
        limits._kind.cache_clear()
        yield
    limits._kind.cache_clear()


@pytest.mark.usefixtures("small_limits")
@given(st.sampled_from(REQUESTS).flatmap(messages_of))
def test_bytes_are_counted_as_parsed(message: Any) -> None:
    """Guards against a scan that skips or counts other than the parser."""
    found = {field for field, _ in violations_of(message.SerializeToString(), message.DESCRIPTOR)}
    assert found == lengths_of(message)
