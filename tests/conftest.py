"""The distribution of tests over processes (`make test` has two).

The tests of a file run in one process, for its fixtures. All tests that start services run in the
same process, so that they do not slow each other down.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest
from hypothesis import settings

from specrej import threads

# A shell's background jobs ignore SIGINT, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before any test imports torch.
threads.bound_spinning()
# Examples have no deadline: their time depends on the machine's load. Benchmarks measure speed.
settings.register_profile("specrej", deadline=None)
settings.load_profile("specrej")

_SERVICES = ("e2e", "faults", "loadtest", "telemetry", "multihost", "deploy")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.partition("::")[0]
        folder = file.split("/")[1]
        item.add_marker(pytest.mark.xdist_group("services" if folder in _SERVICES else file))
