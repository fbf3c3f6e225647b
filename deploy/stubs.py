"""Generates the Python stubs of the schema: `make proto`, `python -m deploy.stubs FOLDER`.

The stubs are without the schema's rules, whose options would make them import a package beyond
`specrej`. Other languages generate from the schema itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTO = Path(__file__).parents[1] / "proto"
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
