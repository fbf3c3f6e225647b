"""The schema as a whole: what its two packages may use."""

from __future__ import annotations

from specrej.v1 import common_pb2, orchestrator_pb2


def test_the_public_schema_imports_nothing_internal() -> None:
    """Guards against a message of the backends' protocols in the public API."""
    used = {
        imported.package
        for file in (common_pb2, orchestrator_pb2)
        for imported in file.DESCRIPTOR.dependencies
    }
    assert used <= {"specrej.v1"}
