"""The schema as a whole: what its packages may use, and its rules against the services' checks.

Lengths are checked before conversion: at the limits a message passes, one beyond is refused. The
stubs have no rules, which need a package beyond `specrej`: they are compiled here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from deploy.stubs import described
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.contracts import MAX_INT32, validation, wire
from specrej.contracts.errors import InvalidRequest
from specrej.v1 import common_pb2, orchestrator_pb2
from tests.serving import part

INPUTS = [
    method.input_type
    for file in (generator_pb2, orchestrator_pb2, reward_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_WITHOUT_PATH = "GenerateStreamRequest.request"


def violations_of(message: Any) -> list[tuple[str, str]]:
    return [
        (violation.field, violation.description) for violation in validation.check_lengths(message)
    ]


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


ALL_FIELDS = [(request, fields) for request in INPUTS for fields in fields_of(request)]
# One of each field: its limit is that of its message, wherever that is.
EACH = {name_of(item[1][-1]): item for item in ALL_FIELDS}.values()
LISTS = [item for item in EACH if item[1][-1].is_repeated]
TEXTS = [item for item in EACH if is_text(item[1][-1])]


def test_one_item_more_than_the_limit_is_refused() -> None:
    """Guards against a new repeated field without a limit, and a limit that is off by one."""
    for request, fields in LISTS:
        field = fields[-1]
        most = validation.MAX_ITEMS[name_of(field)]
        item: Any = "" if is_text(field) else 300
        item = GetMessageClass(field.message_type)() if field.message_type else item
        assert violations_of(filled(request, fields, [item] * most)) == []
        beyond = filled(request, fields, [item] * (most + 1))
        assert violations_of(beyond) == [(path_of(fields), f"must have at most {most} items")]


def test_one_character_more_than_the_limit_is_refused() -> None:
    """Guards against a new text without a limit, and one that counts bytes."""
    for request, fields in TEXTS:
        field = fields[-1]
        most = validation.MAX_CHARACTERS.get(name_of(field), validation.NAME_CHARACTERS)
        index = "[1]" if field.is_repeated else ""
        for size, expected in (
            (most, []),
            (most + 1, [f"must have at most {most} characters, has {most + 1}"]),
        ):
            text: Any = "é" * size
            message = filled(request, fields, ["", text] if field.is_repeated else text)
            violations = [(path_of(fields) + index, what) for what in expected]
            assert violations_of(message) == violations


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


# The rules of the schema


REQUESTS = ("GenerateRequest",)
Fields = tuple[Any, ...]


def compiled() -> Any:
    """A pool with the public schema and its options."""
    pool: Any = descriptor_pool.DescriptorPool()
    for file in described().file:
        pool.Add(file)
    return pool


POOL = compiled()


def rules_of(described: Any) -> Any:
    """The rules of a field, a oneof or a message; empty if it has none."""
    options = described.GetOptions()
    known = GetMessageClass(POOL.FindMessageTypeByName(options.DESCRIPTOR.full_name))
    kind = options.DESCRIPTOR.name.removesuffix("Options").lower()
    extension = POOL.FindExtensionByName(f"buf.validate.{kind}")
    return known.FromString(options.SerializeToString()).Extensions[extension]


def public(request: str) -> Any:
    return POOL.FindMessageTypeByName(f"specrej.v1.{request}")


FIELDS = [fields for request in REQUESTS for fields in fields_of(public(request))]


def bounds(field: Any, rules: Any) -> Iterator[tuple[Any, bool]]:
    """Values at the limits of one item, and one beyond each; whether the schema allows them."""
    kind = rules.WhichOneof("type")
    for limit, value in getattr(rules, kind).ListFields():
        yield from around(field, kind, limit.name, value)
    if kind == "double":
        yield math.nan, False
    for rule in rules.cel:
        assert rule.id == "temperature.greedy", "a rule without values in this test"
        yield from ((0.0, True), (0.01, True), (math.nextafter(0.01, 0), False))


def around(field: Any, kind: str, limit: str, value: Any) -> list[tuple[Any, bool]]:
    match limit:
        case "gte" | "lte":
            return [(value, True), (beyond(kind, value, limit == "lte"), False)]
        case "gt" | "lt":
            return [(value, False), (beyond(kind, value, limit == "gt"), True)]
        case "min_len":
            return [
                ("{}" if field.name == "schema" else "x" * value, True),
                ("x" * (value - 1), False),
            ]
        case "max_len":
            return []  # compared as numbers
        case "in":
            return [*((item, True) for item in value), ("other", False)]
        case "not_in":
            return [(item, False) for item in value]
        case "defined_only":
            return [*((item.number, True) for item in field.enum_type.values), (99, False)]
    raise AssertionError(f"{limit}: a rule without values in this test")


def beyond(kind: str, value: float, is_upper: bool) -> float:
    if kind == "double":
        return math.nextafter(value, math.inf if is_upper else -math.inf)
    return value + 1 if is_upper else value - 1


def cases() -> Iterator[Any]:
    for fields in FIELDS:
        field, path, rules = fields[-1], path_of(fields), rules_of(fields[-1])
        kind = rules.WhichOneof("type")
        if kind == "repeated":
            rules, path = rules.repeated.items, f"{path}[0]"
        if rules.WhichOneof("type"):
            for value, allowed in bounds(field, rules):
                values = [value] if kind == "repeated" else value
                name = f"{path}-{str(value)[:9]}-{allowed}"
                yield pytest.param(fields, values, path, allowed, id=name)


def complete(message: Any, path: str) -> None:
    """Set what some values of a field need besides."""
    match path:
        case "prompt.messages[0].role":  # the last turn must be the user's
            message.prompt.messages.add(role="user", content="x")
        case "prompt.tool_choice":
            message.prompt.messages.add(role="user", content="x")
            message.prompt.tools.add(name="x")
        case "sampling.temperature":  # 0 is greedy
            message.selection.n = 1
        case "sampling.top_logprobs":
            message.sampling.logprobs = True
        case "selection.schedule.tokens[0]":
            message.selection.schedule.kind = orchestrator_pb2.SCHEDULE_KIND_TOKENS


def violated(message: Any) -> list[str]:
    """The fields with violations, as the orchestrator reports them."""
    stub = getattr(orchestrator_pb2, message.DESCRIPTOR.name)
    parsed = stub.FromString(message.SerializeToString())
    violations = [*validation.check_lengths(parsed)]
    if not violations and stub is orchestrator_pb2.GenerateRequest:
        made = wire.request_from_message(parsed, violations)
        violations += validation.check_request(made, MAX_INT32, MAX_INT32, MAX_INT32)
    return [violation.field for violation in violations]


# A field that no schema has, which makes a message large: its number, its length, its bytes.
_PADDING = b"\xc2\xa9\x07" + b"\xf0\xa2\x04" + bytes(70_000)
# A group that no schema has, in which all messages are ones that cannot be read.
_GROUP = b"\xa3\x06" + b"".join(bytes([n << 3 | 2, 1, 0x0E]) for n in range(1, 16)) + b"\xa4\x06"
PUBLIC_LISTS = [
    fields
    for message in INPUTS
    if message.full_name.startswith("specrej.v1.")
    for fields in fields_of(message)
    if fields[-1].is_repeated
]


def counted(data: bytes, message: Any) -> list[tuple[str, str]]:
    """What is found before a message is parsed."""
    try:
        validation.check_counts(data, message)
    except InvalidRequest as error:
        return [(one.field, one.description) for one in error.violations]
    return []


@pytest.mark.parametrize(
    "fields", PUBLIC_LISTS, ids=lambda fields: ".".join(f.name for f in fields)
)
def test_long_lists_are_found_before_a_large_message_is_parsed(fields: tuple[Any, ...]) -> None:
    """Guards the memory that a parsed message would have, and messages that are not too long."""
    *outer, field = fields
    message = GetMessageClass(fields[0].containing_type)()
    inner = message
    for one in outer:
        inner = getattr(inner, one.name).add() if one.is_repeated else getattr(inner, one.name)
    is_number = not field.message_type and not is_text(field)
    items, most = getattr(inner, field.name), validation.MAX_ITEMS[name_of(field)]

    def grow(count: int) -> None:
        for _ in range(count):
            items.add() if field.message_type else items.append(1 if is_number else "x")

    grow(most)
    assert not counted(message.SerializeToString() + _PADDING, message.DESCRIPTOR)
    grow(9 * most + 10 if is_number else 1)  # a number may have ten bytes, which are not read
    data = message.SerializeToString()
    message.ParseFromString(_GROUP + data)
    assert counted(_GROUP + data + _PADDING, message.DESCRIPTOR) == violations_of(message)
    assert not counted(data[: 1 << 16][:-1], message.DESCRIPTOR)  # a small one


# A field that the schema does not have, a group's begin and end, a prompt, one with a message.
_PARTS = [b"\xa0\x06\x01", b"\xa3\x06", b"\xa4\x06", b"\x12\x00", b"\x12\x02\x0a\x00"]


@given(parts=st.lists(st.sampled_from(_PARTS) | st.binary(max_size=12)), times=st.integers(1, 300))
def test_any_large_message_is_counted(parts: list[bytes], times: int) -> None:
    """Guards a server against bytes that raise another error, or have no end."""
    data = b"".join(parts) * times + _PADDING
    message = orchestrator_pb2.GenerateRequest
    found = counted(data, message.DESCRIPTOR)
    with suppress(DecodeError):
        items = [one for one in violations_of(message.FromString(data)) if "items" in one[1]]
        assert found or not items


def test_a_large_message_of_too_many_fields_is_refused() -> None:
    """Guards the event loop against fields that no schema has."""
    message = orchestrator_pb2.GenerateRequest.DESCRIPTOR
    assert counted(b"\xa0\x06\x01" * 16_385 + _PADDING, message) == [
        ("request", "has too many fields")
    ]
    assert not counted(b"\xa0\x06\x01" * 16_383 + _PADDING, message)


@pytest.mark.parametrize(("fields", "value", "path", "allowed"), list(cases()))
def test_rules_of_the_schema_are_those_of_the_services(
    fields: Fields, value: Any, path: str, allowed: bool
) -> None:
    """Guards other languages, which validate by the schema, against limits that the services do
    not have, and against limits of the services that the schema does not have."""
    message = filled(fields[0].containing_type, fields, value)
    complete(message, path)
    # A list of numbers is reported as a whole.
    assert ({path, path.removesuffix("[0]")} & {*violated(message)} == set()) == allowed


def test_what_must_be_set_is_required() -> None:
    """Guards against a request without a prompt, or with two, that the schema allows."""
    request = GetMessageClass(public("GenerateRequest"))
    (one_of,) = rules_of(public("Prompt")).oneof
    assert (list(one_of.fields), one_of.required) == (["messages", "text"], True)
    assert rules_of(request.DESCRIPTOR.fields_by_name["prompt"]).required
    assert "prompt" in violated(request())
    both = {"text": "x", "messages": [{"role": "user", "content": "x"}]}
    assert violated(request(prompt=both)) == ["prompt"]
    (kind,) = public("StructuredOutput").oneofs
    assert rules_of(kind).required
    (path,) = violated(request(prompt={"text": "x"}, sampling={"structured_output": {}}))
    assert path.startswith("sampling.structured_output.")


def test_every_field_with_a_limit_has_the_services_rule() -> None:
    """Guards against a new number, list, text or enum of a request without a rule, and against a
    limit of a list or a text that differs from the one that is documented."""
    for fields in FIELDS:
        field, name, rules = fields[-1], name_of(fields[-1]), rules_of(fields[-1])
        kind, texts = rules.WhichOneof("type"), rules.string
        is_single_message = field.message_type and not field.is_repeated
        # Images are bounded as a whole.
        if not is_single_message and field.type not in (field.TYPE_BOOL, field.TYPE_BYTES):
            assert kind, path_of(fields)
        if kind == "repeated":
            assert rules.repeated.max_items == validation.MAX_ITEMS[name], name
            texts = rules.repeated.items.string
        if is_text(field) and kind in ("string", "repeated"):
            assert texts.ListFields(), path_of(fields)
        if texts.max_len:
            assert texts.max_len == validation.MAX_CHARACTERS.get(
                name, validation.NAME_CHARACTERS
            ), name


def test_the_public_schema_imports_nothing_internal() -> None:
    """Guards against a message of the backends' protocols in the public API, and against stubs
    that import a package beyond `specrej` and `google`."""
    used = {
        imported.package
        for file in (common_pb2, orchestrator_pb2)
        for imported in file.DESCRIPTOR.dependencies
    }
    assert used <= {"specrej.v1", "google.protobuf"}


def test_stubs_have_no_names_of_json() -> None:
    """Guards against camelCase names in the output of grpcurl, which reads them by reflection."""
    for stub in (common_pb2, orchestrator_pb2):
        file = FileDescriptorProto.FromString(stub.DESCRIPTOR.serialized_pb)
        fields = [field for message in file.message_type for field in message.field]
        assert fields and not any(field.HasField("json_name") for field in fields)
