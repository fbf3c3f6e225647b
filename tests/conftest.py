"""How the tests are shared out where several processes run them (`make test` has two).

A file stays together, for the sake of its fixtures. What starts services of its own, and watches how
quickly they answer, stays with one process, so that no two of these are in each other's way.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

_SERVICES = ("e2e", "faults", "loadtest", "telemetry", "multihost", "deploy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.partition("::")[0]
        folder = file.split("/")[1]
        item.add_marker(pytest.mark.xdist_group("services" if folder in _SERVICES else file))
