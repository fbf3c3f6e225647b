"""Generates the Python stubs of the schema: `make proto`, `python -m deploy.stubs FOLDER`.

The stubs are without the schema's rules, whose options would make them import a package beyond
`specrej`. Other languages generate from the schema itself. The page gets the comments of the fields
in its form.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTO = Path(__file__).parents[1] / "proto"
_PAGE = "gateway/page"
_RULES = "buf/validate/validate.proto"
_PLUGINS = ("mypy", "mypy_grpc")


def main(folder: str) -> None:
    """Generate the stubs of all packages into their folders below `folder`."""
    schema = described()
    for file in schema.file:
        file.DiscardUnknownFields()  # options of the rules
        if _RULES in file.dependency:
            file.dependency.remove(_RULES)
        for message in file.message_type:
            for field in message.field:
                field.ClearField("json_name")  # grpcurl would print it, read by reflection
    names = [file.name for file in schema.file if file.name.startswith("specrej/")]
    programs = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={programs}/protoc-gen-{name}" for name in _PLUGINS]
    outputs = [f"--{name}_out=quiet:{folder}" for name in _PLUGINS]
    outputs += [f"--{name}_out={folder}" for name in ("python", "grpc_python")]
    with TemporaryDirectory() as scratch:
        stripped = Path(scratch, "schema.binpb")
        stripped.write_bytes(schema.SerializeToString())
        _protoc(f"--descriptor_set_in={stripped}", *plugins, *outputs, *names)
    made = Path(folder, _PAGE, "fields.js")
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(_comments_of_form(schema))


def _comments_of_form(schema: FileDescriptorSet) -> str:
    """A module of the comments on the fields that the page's form names in `data-help`."""
    comments: dict[str, str] = {}
    for file in schema.file:
        for location in file.source_code_info.location:
            comment = " ".join(location.leading_comments.split())
            match list(location.path):
                case [4, message, 2, field]:
                    described = file.message_type[message]
                    comments[f"{described.name}.{described.field[field].name}"] = comment
                case [5, enum, 2, number]:
                    unspecified, *values = (value.name for value in file.enum_type[enum].value)
                    if number:
                        name = values[number - 1]
                        word = name.removeprefix(unspecified.removesuffix("UNSPECIFIED"))
                        comments[name] = f"{word.replace('_', ' ').capitalize()}: {comment}"
    form = (PROTO.parent / _PAGE / "index.html").read_text()
    used = {
        names: " ".join(comments[name] for name in names.split())
        for names in re.findall(r'data-help="([^"]+)"', form)
    }
    head = "// Generated from the schema's comments by deploy.stubs. Do not edit.\n"
    return f"{head}export const FIELDS = {json.dumps(used, indent=2)};\n"


def described() -> FileDescriptorSet:
    """All files of the schema and their imports, with rules and comments."""
    names = [str(path) for path in sorted(PROTO.glob("specrej/**/*.proto"))]
    with TemporaryDirectory() as scratch:
        whole = Path(scratch, "schema.binpb")
        more = ("--include_imports", "--include_source_info", f"--descriptor_set_out={whole}")
        _protoc(f"-I{PROTO}", *more, *names)
        return FileDescriptorSet.FromString(whole.read_bytes())


def _protoc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
