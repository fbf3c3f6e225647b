"""One generator of each kind for the whole session, and a check that each test leaves it empty.

All tests share one event loop: a connection to vLLM belongs to the loop that made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from specrej.contracts import Sampling
from tests.conformance import subjects
from tests.serving import until_read

_BOUND_S = 60.0
_SERVER_S = 2.0  # until a server has ended requests that were left
# Of the servers' tests, those that CI runs: rounds, cuts, forks and cancels on one that is small.
_CI_TESTS = (
    "test_a_cut_frees_slots_at_once[llama]",
    "test_a_fork_of_a_fork_and_its_text[llama]",
    "test_a_cancelled_command_leaves_nothing[extend-llama]",
)


def all_but(*left_out: str) -> pytest.MarkDecorator:
    """A test's subjects: all but these."""
    names = (name for name in (*subjects.SUBJECTS, *subjects.REMOTE) if name not in left_out)
    all_ = [pytest.param(name, marks=_needs(name.removeprefix("remote-"))) for name in names]
    return pytest.mark.parametrize("subject", all_, indirect=True)


def _needs(name: str) -> list[pytest.MarkDecorator]:
    """Marks of a subject: what has to be installed for it."""
    if name not in subjects.NEEDED:
        return []
    is_there, target = subjects.NEEDED[name]
    return [pytest.mark.skipif(not is_there, reason=f"it is not installed: make {target}")]


# Every test has the own engine, and over the network the toy. These have the own engine over the
# network, too: one per verb, and those of which the toy has nothing to send.
also_remote_own = all_but("llama-text", "gateway", "endpoint", "streams")
# These have a server of text, too, whose candidates are streams without token ids.
also_streams = all_but("gateway", "endpoint")
# And those of whole answers, without rounds.
also_endpoint = all_but("remote-own")
# vLLM's draws in this process and in its server.
stock_vllm = all_but(
    *(
        name
        for name in (*subjects.SUBJECTS, *subjects.REMOTE)
        if name not in ("vllm", "vllm-server")
    )
)
_OTHERS = all_but("remote-own", "llama-text", "gateway", "endpoint", "streams")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of servers, but for those of CI: each is started for them."""
    for item in items:
        assert isinstance(item, pytest.Function)
        name = getattr(item, "callspec", None) and item.callspec.params.get("subject")
        if name in (*subjects.SERVERS, "gateway") and item.name not in _CI_TESTS:
            item.add_marker("long")


def skip_if_refused(subject: subjects.Subject, sampling: Sampling) -> None:
    """Skip the test if the subject refuses the sampling, which another test checks."""
    kind = sampling.structured_output and sampling.structured_output.kind
    for name in subject.lacks:
        if getattr(sampling, name, name == kind):
            pytest.skip(f"it refuses {name}")


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return subjects.save_model(tmp_path_factory.mktemp("conformance"))


async def until_idle(subject: subjects.Subject) -> None:
    """Return once no session is open or waits and no slot is owned, and soon no request runs at the
    server; else TimeoutError.

    A generator behind a port handles the end of a stream a moment later.
    """

    await until_read(
        subject.generator.describe,
        lambda now: not (now.slots.owned or now.sessions or now.waiting),
        bound_s=_BOUND_S,
    )
    await runs_at_most(subject, 0)


async def runs_at_most(subject: subjects.Subject, requests: int) -> None:
    """Return once the server behind the subject, if there is one, runs at most so many."""
    if running := subject.running:
        bounds = {"bound_s": _SERVER_S, "every_s": 0.02}
        await until_read(running, lambda number: number <= requests, **bounds)


class Started:
    """Generators that run, each started at its first use."""

    def __init__(self, directory: Path, resources: AsyncExitStack) -> None:
        self._directory = directory
        self._resources = resources
        self._started: dict[str, asyncio.Future[subjects.Subject]] = {}

    async def get(self, name: str) -> subjects.Subject:
        """The generator; one that cannot start is not started again."""
        if name not in self._started:
            opening: AbstractAsyncContextManager[subjects.Subject]
            if name in subjects.REMOTE:
                opening = subjects.remote(await self.get(subjects.REMOTE[name]))
            else:
                opening = subjects.SUBJECTS[name](self._directory)
            started = self._started[name] = asyncio.get_running_loop().create_future()
            try:
                started.set_result(await self._resources.enter_async_context(opening))
            except BaseException as error:
                started.set_exception(error)
        return await self._started[name]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started(model_directory: Path) -> AsyncIterator[Started]:
    async with AsyncExitStack() as resources:
        yield Started(model_directory, resources)


@pytest_asyncio.fixture(loop_scope="session", params=_OTHERS.args[1])
async def subject(
    request: pytest.FixtureRequest, started: Started
) -> AsyncIterator[subjects.Subject]:
    """Afterwards no session is open, no slot is owned, and no request runs at a server."""
    subject = await started.get(request.param)
    yield subject
    await until_idle(subject)
