"""The gRPC schema as Markdown: a page per package, from the comments in proto/.

Comments have each field's unit and range. Types are linked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from deploy.site.values import escaped
from deploy.stubs import described

# Field numbers of the parts in descriptor.proto, of which paths to comments consist.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS, _VALUES, _METHODS = 2, 3, 4, 8, 2, 2
_Path = tuple[int, ...]
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in
            FieldDescriptorProto.Type.items()}  # fmt: skip


def pages() -> Mapping[str, str]:
    """The Markdown of each package of the project.

    Raises:
        subprocess.CalledProcessError: the schema cannot be built.
    """
    packages = defaultdict[str, list[FileDescriptorProto]](list)
    for file in described().file:
        if file.package.startswith("specrej."):
            packages[file.package].append(file)
    return {name: "\n".join(_package(name, files)) for name, files in sorted(packages.items())}


def _package(name: str, files: Sequence[FileDescriptorProto]) -> Iterator[str]:
    yield f"# {name}\n"
    yield "Generated from the comments of the schema.\n"
    # Files with a service come first: a caller begins there.
    for file in sorted(files, key=lambda file: (not file.service, file.name)):
        yield from _File(file).lines()


class _File:
    """The lines of one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        file = self._file
        for index, service in enumerate(file.service):
            yield from self._service(service, (_SERVICES, index))
        for index, message in enumerate(file.message_type):
            yield from self._message(message, (_MESSAGES, index), file.package)
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (_ENUMS, index), file.package)

    def _comment(self, path: _Path) -> str:
        """The comment at a path, on one line."""
        return escaped(self._comments.get(path, ""))

    def _service(self, service: ServiceDescriptorProto, path: _Path) -> Iterator[str]:
        yield f"## {service.name}\n\n{self._comment(path)}\n"
        yield "| method | |\n|---|---|"
        for index, method in enumerate(service.method):
            request = _stream(method.client_streaming) + _link(method.input_type)
            response = _stream(method.server_streaming) + _link(method.output_type)
            comment = self._comment((*path, _METHODS, index))
            yield f"| `{method.name}` | {comment}<br>Takes {request}, returns {response}. |"
        yield ""

    def _message(self, message: DescriptorProto, path: _Path, scope: str) -> Iterator[str]:
        name = f"{scope}.{message.name}"
        yield _heading(name, self._file.package)
        yield f"{self._comment(path)}\n"
        entries = {
            f".{name}.{nested.name}": nested
            for nested in message.nested_type
            if nested.options.map_entry
        }
        if message.field:
            yield "| field | type | |\n|---|---|---|"
            for index, field in enumerate(message.field):
                comment = self._comment((*path, _FIELDS, index))
                if field.HasField("oneof_index") and not field.proto3_optional:
                    oneof = self._comment((*path, _ONEOFS, field.oneof_index))
                    group = message.oneof_decl[field.oneof_index].name
                    comment = f"{comment} *One of `{group}`: {oneof}*"
                yield f"| `{field.name}` | {_type(field, entries)} | {comment} |"
            yield ""
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _NESTED, index), name)
        for index, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUMS, index), name)

    def _enum(self, enum: EnumDescriptorProto, path: _Path, scope: str) -> Iterator[str]:
        yield _heading(f"{scope}.{enum.name}", self._file.package)
        yield f"{self._comment(path)}\n"
        yield "| value | number | |\n|---|---|---|"
        for index, value in enumerate(enum.value):
            comment = self._comment((*path, _VALUES, index))
            yield f"| `{value.name}` | {value.number} | {comment} |"
        yield ""


def _heading(name: str, package: str) -> str:
    return f"### {name.removeprefix(f'{package}.')} {{ #{name} }}\n"


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""


def _type(field: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    """The type of a field, linked, with its label."""
    if entry := entries.get(field.type_name):
        key, value = (_type(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    name = _link(field.type_name) if field.type_name else _SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """A type by its full name, linked to its heading where that is one of ours."""
    name = type_name.removeprefix(".")
    if not name.startswith("specrej."):
        return f"`{name}`"
    package = re.match(r"[a-z0-9_.]+(?=\.[A-Z])", name)
    assert package, f"{name} is in no package"
    return f"[{name.removeprefix(f'{package[0]}.')}]({package[0]}.md#{name})"
