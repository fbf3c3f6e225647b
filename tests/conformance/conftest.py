"""One generator of each kind for the whole session, and a check that each test leaves it empty.

All tests share one event loop: a connection to vLLM belongs to the loop that made it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.subjects import HAS_VLLM, REMOTE, SUBJECTS, Subject, remote, save_model
from tests.serving import until

_BOUND_S = 60.0

_NO_VLLM = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not in this environment: make vllm")
_ALL = [
    pytest.param(name, marks=_NO_VLLM if name.endswith("vllm") else ())
    for name in (*SUBJECTS, *REMOTE)
]
_REMOTE_OWN, _ENDPOINT = "remote-own", "endpoint"
# Every test has the own engine, and over the network the toy. These have the own engine over the
# network, too: one per verb, and those of which the toy has nothing to send.
also_remote_own = pytest.mark.parametrize(
    "subject", [one for one in _ALL if one.values != (_ENDPOINT,)], indirect=True
)
# Of these the endpoint is a subject, too: it has neither rounds nor token ids.
also_endpoint = pytest.mark.parametrize(
    "subject", [one for one in _ALL if one.values != (_REMOTE_OWN,)], indirect=True
)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("conformance"))


async def until_idle(subject: Subject) -> None:
    """Return once no session is open or waits and no slot is owned; else TimeoutError.

    A generator behind a port handles the end of a stream a moment later.
    """

    async def idle() -> bool:
        now = await subject.generator.describe()
        return not (now.slots.owned or now.sessions or now.waiting)

    await until(idle, bound_s=_BOUND_S)


class Started:
    """Generators that run, each started at its first use."""

    def __init__(self, directory: Path, resources: AsyncExitStack) -> None:
        self._directory = directory
        self._resources = resources
        self._subjects: dict[str, Subject] = {}

    async def get(self, name: str) -> Subject:
        if name not in self._subjects:
            opening: AbstractAsyncContextManager[Subject]
            if name in REMOTE:
                opening = remote(await self.get(REMOTE[name]))
            else:
                opening = SUBJECTS[name](self._directory)
            self._subjects[name] = await self._resources.enter_async_context(opening)
        return self._subjects[name]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(model_directory: Path) -> AsyncIterator[Started]:
    async with AsyncExitStack() as resources:
        yield Started(model_directory, resources)


@pytest_asyncio.fixture(
    loop_scope="session",
    params=[one for one in _ALL if one.values[0] not in (_REMOTE_OWN, _ENDPOINT)],
)
async def subject(request: pytest.FixtureRequest, started: Started) -> AsyncIterator[Subject]:
    """Afterwards no session is open and no slot is owned."""
    subject = await started.get(request.param)
    yield subject
    await until_idle(subject)
