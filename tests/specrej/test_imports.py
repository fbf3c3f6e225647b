"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("heavy", ["torch", "transformers", "redis", "grpc", "rich"])
def test_importing_the_package_is_light(heavy: str) -> None:
    """Guards against a client that loads a model stack, and a start that takes seconds."""
    run(f"import sys, specrej; sys.exit({heavy!r} in sys.modules)")


def test_the_client_loads_no_model_and_no_redis() -> None:
    """Guards against the same by way of the lazy names and the command line."""
    heavy = {"torch", "transformers", "redis"}
    run(f"import sys, specrej.cli; specrej.Client; sys.exit(bool({heavy} & set(sys.modules)))")


def test_contracts_need_no_grpc() -> None:
    """Guards the engine's home: a GPU machine without grpc imports contracts and errors."""
    run("import sys; sys.modules['grpc'] = None; import specrej.contracts, specrej.errors")
