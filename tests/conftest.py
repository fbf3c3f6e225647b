"""How the tests are shared out where several processes run them (`make test` has two).

A file stays together, for the sake of its fixtures. What starts services of its own, and watches
how quickly they answer, stays with one process: no two of these are in each other's way.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings

# How long an example takes depends on who else is at work; speed is a matter of benchmarks.
settings.register_profile("specrej", deadline=None)
settings.load_profile("specrej")

_SERVICES = ("e2e", "faults", "loadtest", "telemetry", "multihost", "deploy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.partition("::")[0]
        folder = file.split("/")[1]
        item.add_marker(pytest.mark.xdist_group("services" if folder in _SERVICES else file))
