"""What importing the package costs."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_is_light() -> None:
    """Guards against a client that loads a model stack, and a start that takes seconds."""
    heavy = {"torch", "transformers", "redis", "grpc", "rich"}
    run(f"import sys, specrej; assert {heavy}.isdisjoint(sys.modules), sys.modules.keys()")


def test_the_client_loads_no_model_and_no_redis() -> None:
    """Guards the lazy names and the command line; `deploy.local` is for development only."""
    heavy = {"torch", "transformers", "redis", "deploy"}
    run(f"import sys, specrej.client.cli; specrej.Client; assert {heavy}.isdisjoint(sys.modules)")


def test_contracts_need_no_grpc() -> None:
    """Guards the engine's home: a GPU machine without grpc imports contracts and errors."""
    run(
        "import sys; sys.modules['grpc'] = None; import specrej.contracts, specrej.contracts.errors"
    )
