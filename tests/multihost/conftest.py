"""One network of nodes with everything on it, for all tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.multihost.cluster import Cluster, cluster
from tests.multihost.nodes import missing, network
from tests.multihost.programs import NODES


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running() -> AsyncIterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with network(*NODES) as nodes:
        async with cluster(nodes) as one:
            yield one
