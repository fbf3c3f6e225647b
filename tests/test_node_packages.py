"""The packages for Node, of clients and tests."""

from __future__ import annotations

import json

import pytest

from tests.programs import ROOT


@pytest.mark.parametrize(
    "folder", ["clients/typescript", "tests/deploy/node", "tests/gateway/node"]
)
def test_packages_are_pinned(folder: str) -> None:
    """Guards against other versions in CI than in the lock, and files that are not checked."""
    package = json.loads((ROOT / folder / "package.json").read_text())
    lock = json.loads((ROOT / folder / "package-lock.json").read_text())["packages"]
    for name, version in {**package["dependencies"], **package.get("devDependencies", {})}.items():
        assert lock[f"node_modules/{name}"]["version"] == version
    installed = [locked for name, locked in lock.items() if name]
    assert installed and all(locked["integrity"].startswith("sha512-") for locked in installed)
