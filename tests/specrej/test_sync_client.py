"""The blocking client against a real server, from threads."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from specrej import Client, Retries, SyncClient
from specrej.contracts import errors
from tests.serving import until
from tests.specrej.fakes import EVENTS, GENERATION, OPTIONS, SERVICE, FakeOrchestrator

# What programs begin with.
_BEGIN = "import os, sys, threading; from specrej import SyncClient"
_FORK = """
client = SyncClient(sys.argv[1], timeout_s=10)
if not os.fork():
    try:
        client.is_serving()
    except RuntimeError as error:
        print(str(error).partition(": ")[2], flush=True)
    client.close()
    os._exit(0)
os.wait()
print(client.is_serving())
client.close()
"""

_STREAM = """
client = SyncClient(sys.argv[1], timeout_s=10)
events = client.stream("why?")
print(type(next(events)).__name__, flush=True)
"""
_WORKER = """
def work():
    threading.main_thread().join()
    with SyncClient(sys.argv[1], timeout_s=10) as client:
        print(client.generate("why?").best.text)
        print(*[type(event).__name__ for event in client.stream("why?")])

threading.Thread(target=work).start()
"""
_INTERRUPTED = """
with SyncClient(sys.argv[1], timeout_s=30) as client:
    try:
        next(client.stream("why?"))
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_it_has_the_methods_of_the_client() -> None:
    """Guards against a method or an argument that one of the two lacks."""
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert {name for name in vars(SyncClient) if not name.startswith("_")} == names | {"close"}
    for name in (*names, "__init__"):
        parameters = [
            list(inspect.signature(getattr(kind, name)).parameters.values())
            for kind in (Client, SyncClient)
        ]
        assert parameters[0] == parameters[1]


async def test_values_are_those_of_the_client(address: str, orchestrator: FakeOrchestrator) -> None:
    orchestrator.failures = [errors.Overloaded("full", retry_after_s=0.01)]

    def calls() -> None:
        with SyncClient(address, retries=Retries()) as client:
            assert client.generate("why?", **OPTIONS) == GENERATION
            assert tuple(client.stream("why?", **OPTIONS)) == EVENTS
            assert client.describe() == SERVICE
            assert client.is_serving()

    await asyncio.to_thread(calls)
    assert len(orchestrator.requests) == 3
    assert not [t for t in threading.enumerate() if t.name == "specrej-client"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_closing_ends_calls_of_other_threads(
    address: str, orchestrator: FakeOrchestrator, streamed: bool
) -> None:
    """Guards against threads that wait for ever."""
    orchestrator.hangs = True
    client = await asyncio.to_thread(SyncClient, address)

    def call() -> object:
        return list(client.stream("why?")) if streamed else client.generate("why?")

    calling = asyncio.ensure_future(asyncio.to_thread(call))
    await until(lambda: bool(orchestrator.requests))
    await asyncio.to_thread(client.close)
    with pytest.raises((errors.Cancelled, CancelledError, RuntimeError, asyncio.CancelledError)):
        await asyncio.wait_for(calling, 10)
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.describe()
    client.close()


async def test_a_forked_process_gets_an_error(address: str) -> None:
    """Guards against calls that wait for ever for a thread that the fork has not."""
    assert await lines_of(_FORK, address) == ["create it after the fork", "True"]


async def lines_of(
    program: str, address: str, interrupt_at: asyncio.Event | None = None
) -> list[str]:
    """The stdout of a program that must end by itself, or once it is interrupted."""
    command = (sys.executable, "-W", "ignore", "-c", _BEGIN + program, address)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            if interrupt_at:
                await interrupt_at.wait()
                process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return out.decode().splitlines()


async def test_a_stream_that_is_left_open_ends_with_its_script(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against a process that waits for ever for the client's thread."""
    orchestrator.hangs = True
    assert await lines_of(_STREAM, address) == ["Admitted"]


async def test_a_thread_gets_its_answers_after_the_main_thread_has_ended(address: str) -> None:
    """Guards against answers that are lost: executors accept no work by then."""
    kinds = " ".join(type(event).__name__ for event in EVENTS)
    assert await lines_of(_WORKER, address) == [GENERATION.best.text, kinds]


async def test_an_interrupted_stream_raises_the_interrupt(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against a RuntimeError in its place, which no caller expects."""
    orchestrator.holds = True
    assert await lines_of(_INTERRUPTED, address, orchestrator.received) == ["interrupted"]


def test_bad_credentials_leave_no_thread() -> None:
    with pytest.raises(errors.InvalidRequest, match="credentials"):
        SyncClient("example.com:1", token="t")
    assert not [t for t in threading.enumerate() if t.name == "specrej-client"]
