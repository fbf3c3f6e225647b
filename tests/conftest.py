"""The distribution of tests over processes.

The tests of a file run in one process, for its fixtures, and so do those of folders that share
services. On two cores, four processes of `make test` (403 s) are faster than three (432 s): while
a test waits for its services, another one computes. Where the processor is much slower, two: four
would let services wait for it until their tests' bounds end.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

from specrej import threads
from specrej.client import channel
from tests.toys import toys as toys

# A shell's background jobs ignore SIGINT, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before any test imports torch.
threads.bound_spinning()
# gRPC lets channels to one address share a connection and its failures: where a port of an earlier
# test is used again, the first call would fail by a connection that was refused before.
_shared_options = channel.options
channel.options = lambda address, max_message_bytes=channel.MAX_MESSAGE_BYTES: [
    *_shared_options(address, max_message_bytes),
    ("grpc.use_local_subchannel_pool", 1),
]
# gRPC's poller can still wake an earlier test's event loop, which is closed, and asyncio logs that.
logging.getLogger("asyncio").addFilter(
    lambda record: "PollerCompletionQueue" not in record.getMessage()
)
# Examples have no deadline: their time depends on the machine's load. Benchmarks measure speed.
# `make test-long` runs property tests with the profile `long`, and `make mutants` with its own.
settings.register_profile("specrej", deadline=None, max_examples=10)
settings.register_profile("long", deadline=None, max_examples=200)
# `make mutants` needs a failure, not its smallest example.
_NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("mutants", deadline=None, max_examples=25, phases=_NO_SHRINKING)
settings.load_profile("specrej")

# Folders whose tests run in one process, and those that share the stack of toys.
_TOYS = ("clients", "documents", "examples", "loadtest")
_SERVICES = ("conformance", "e2e", "faults", "telemetry", "deploy", "gateway")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Four, or two where this loop takes over twice the 0.12 s of the machine that was measured."""
    began_s = time.process_time()
    for _ in range(10_000_000):
        pass
    return 4 if time.process_time() - began_s < 0.25 else 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage collection while modules are imported, and none of them visits those later.

    There are a million of their objects: a full collection takes 0.6 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the telemetry folder first: near the end, one process would wait for the other."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/telemetry/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Not by marks of `xdist_group`: pytest 9.2 ignores what xdist 3.8 makes of them."""
    from xdist.scheduler import LoadScopeScheduling

    def scope(node_id: str) -> str:
        file = node_id.partition("::")[0]
        folder = file.split("/")[1]
        if folder in _TOYS:
            return "toys"
        return folder if folder in _SERVICES else file

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope
    return scheduler
