"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("imported", "without"),
    [
        # A client that loads a model stack takes seconds to start.
        ("specrej", {"torch", "transformers", "redis", "grpc", "rich"}),
        # The lazy names and the command line; `deploy.local` is for development only.
        ("specrej.client.cli; specrej.Client", {"torch", "transformers", "redis", "deploy"}),
        # A GPU machine without grpc imports contracts and errors for the engine.
        ("specrej.contracts, specrej.contracts.errors", {"grpc"}),
    ],
)
def test_imports_are_light(imported: str, without: set[str]) -> None:
    code = f"import sys, {imported}; assert {without}.isdisjoint(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
