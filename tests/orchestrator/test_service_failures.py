"""The public port: overload, deadlines, cancellation, and backends that fail."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from generator_service import toy
from orchestrator.edge import servicer
from orchestrator.edge.servicer import OrchestratorServicer
from specrej.contracts.errors import Cancelled
from specrej.security import new_token
from specrej.v1 import orchestrator_pb2 as pb
from tests.certificates import place
from tests.serving import failure_of, reason_of, retry_info_s, turns, until
from tests.world import BOUND_S, Code, World, rewards, small_request, world


def start_call(service: World, message: pb.GenerateRequest, stream: bool, **options: Any) -> Any:
    """A call that is not awaited yet."""
    if stream:
        return service.stub.GenerateStream(pb.GenerateStreamRequest(request=message), **options)
    return service.stub.Generate(message, **options)


async def error_of_call(call: Any, stream: bool) -> grpc.aio.AioRpcError:
    async def events() -> object:
        return [event async for event in call]

    async with asyncio.timeout(BOUND_S):
        return await failure_of(events() if stream else call)


async def test_backends_get_a_slightly_later_deadline(service: World) -> None:
    """If the orchestrator hangs, backends end the work themselves, but never before it."""
    await service.stub.Generate(small_request(), timeout=7)
    await service.stub.Generate(small_request(sampling={"seed": 8}))
    with_deadline, without = service.generator.times_left_s
    assert with_deadline is not None
    assert 6.0 < with_deadline < 8.1  # grpc rounds up the timeout that it sends
    assert without is None or without > 1e6


async def test_times_count_from_arrival() -> None:
    """Guards against a first-round time without the time in the queue."""
    async with world(max_running=1) as service:
        slow = small_request(sampling={"max_tokens": 100, "ignore_eos": True}, selection={"n": 400})
        first = asyncio.create_task(service.answer(slow))
        await until(lambda: service.admission.running == 1)
        timings = (await service.answer(small_request(seed=1))).timings
        await first
    times = (timings.queue_duration, timings.first_round_duration, timings.total_duration)
    queue_s, first_round_s, total_s = (time.ToTimedelta().total_seconds() for time in times)
    assert 0 < queue_s <= first_round_s <= total_s


async def test_the_weight_of_the_tokens_file_applies(tmp_path: Path) -> None:
    """Guards the way of a tenant's weight from the file to admission."""
    token, entry = new_token("acme")
    place(tmp_path / "tokens", json.dumps({**json.loads(entry), "weight": 4}))
    async with world(server_settings={"tokens_file": str(tmp_path / "tokens")}) as service:
        service.generator.gates["extend"].shut()
        metadata = [("authorization", f"Bearer {token}")]
        call = service.stub.Generate(small_request(seed=0), metadata=metadata)
        await until(lambda: service.admission.running == 1)
        assert service.admission._tenants["acme"].weight == 4
        service.generator.gates["extend"].open()
        assert (await call).text


@pytest.mark.parametrize("is_default", [True, False], ids=["default", "client"])
@pytest.mark.parametrize(("phase", "stream"), [("open", False), ("extend", True), ("score", False)])
async def test_a_deadline_ends_a_request(phase: str, stream: bool, is_default: bool) -> None:
    async with world(default_deadline_s=0.1 if is_default else None) as service:
        service.shut(phase)
        options = {} if is_default else {"timeout": 0.1}
        error = await error_of_call(start_call(service, small_request(), stream, **options), stream)
        assert error.code() is Code.DEADLINE_EXCEEDED
        if is_default:  # else the client itself ends its call
            assert reason_of(error) == "DEADLINE_EXCEEDED"
        await until(lambda: service.is_idle)


@pytest.mark.parametrize(
    ("phase", "stream", "closes_channel"),
    [
        ("open", False, False),
        ("open", True, True),
        ("extend", False, True),
        ("extend", True, False),
        ("score", False, True),
        ("score", True, False),
        ("prune", True, False),
        ("close", False, False),
    ],
)
async def test_a_cancelled_call_frees_everything(
    service: World, phase: str, stream: bool, closes_channel: bool
) -> None:
    """All is freed although the gate stays shut."""
    service.shut(phase)
    call = start_call(service, small_request(), stream)
    await until(lambda: service.num_held(phase) == 1)
    assert service.admission.running == 1
    if closes_channel:
        await service.channel.close()
    else:
        call.cancel()
    await until(lambda: service.is_idle)


async def test_cancel_ends_a_blocked_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards permits, sessions and tasks against a client that does not read, and against what its
    call leaves."""
    # An answer of 16 MiB is more than a stream buffers.
    monkeypatch.setattr(toy, "_WORDS", ["x" * 2**18] * 8)
    selection = rewards(("likelihood", 1)) | {"n": 64, "return_candidates": 64}
    large = small_request(sampling={"max_tokens": 1}, selection=selection)
    num_tasks = len(asyncio.all_tasks())
    async with world(max_running=1) as service:
        call = start_call(service, large, stream=True)
        await until(lambda: service.generator.num_opened == 1)
        await until(lambda: service.is_idle)
        await turns(100)
        assert not call.done(), "the case did not occur"
        call.cancel()
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)


class Reader:
    """The context of a stream. A write waits for the gate, and takes `write_s` of the clock."""

    def __init__(self, write_s: float = 0.0) -> None:
        self.gate, self.events, self.now_s = asyncio.Event(), list[Any](), 0.0
        self._write_s = write_s

    async def send_initial_metadata(self, _: object) -> None:
        """Nothing is sent."""

    async def write(self, event: pb.GenerateStreamResponse) -> None:
        self.events.append(event)
        await self.gate.wait()
        await turns(2)  # an expired timeout ends it
        self.now_s += self._write_s


_ROUNDS = pb.Schedule(kind=pb.SCHEDULE_KIND_TOKENS, tokens=range(1, 40))
_MANY = small_request(sampling={"ignore_eos": True}, selection={"n": 8, "schedule": _ROUNDS})


async def test_rounds_that_wait_are_short(service: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against a client that reads an event now and then; it misses no round."""
    monkeypatch.setattr(servicer, "_MAX_SIZE", 2000)
    reader: Any = Reader()
    request = pb.GenerateStreamRequest(request=_MANY, progress=True, texts=True)
    streaming = asyncio.create_task(
        OrchestratorServicer(service.orchestrator).GenerateStream(request, reader)
    )
    await until(lambda: bool(reader.events))
    await until(lambda: service.is_idle)
    reader.gate.set()
    await streaming
    rounds = [e.round_completed for e in reader.events if e.HasField("round_completed")]
    sizes = [len(e.best_text) + sum(len(text.text) for text in e.texts) for e in rounds]
    assert rounds[-1].best_text and rounds[-1].texts and sum(sizes) <= 2000 + 2 * max(sizes)
    assert sum(e.HasField("progress") for e in reader.events) <= 18
    finished = reader.events[-1].finished
    assert [e.round for e in rounds] == [*finished.rounds] and len(rounds) > 30
    assert finished.text == (await service.answer(_MANY)).text


@pytest.mark.parametrize(("least_bytes_s", "is_slow"), [(1024, True), (1, False), (0, False)])
async def test_a_reader_has_a_least_rate(
    service: World, monkeypatch: pytest.MonkeyPatch, least_bytes_s: int, is_slow: bool
) -> None:
    """Guards against an event each 20 s, which is within the time of one."""
    reader: Any = Reader(20.0)
    reader.gate.set()
    monkeypatch.setattr(servicer, "time", SimpleNamespace(monotonic=lambda: reader.now_s))
    port = OrchestratorServicer(service.orchestrator, least_bytes_s=least_bytes_s)
    streaming = port.GenerateStream(pb.GenerateStreamRequest(request=_MANY), reader)
    if is_slow:
        with pytest.raises(Cancelled, match="the client read less than 1024 bytes a second"):
            await streaming
        assert len(reader.events) == 3, "the third is not taken"
    else:
        await streaming
        assert reader.events[-1].HasField("finished")


@pytest.mark.parametrize("timeout_s", [1e6, 1e8])  # the longest that clients send
async def test_a_long_deadline_is_shortened(timeout_s: float) -> None:
    """Guards against a client that holds a permit for eleven days."""
    async with world(server_settings={"max_deadline_s": 0.5}) as service:
        service.shut("extend")
        call = start_call(service, small_request(), stream=False, timeout=timeout_s)
        assert reason_of(await error_of_call(call, stream=False)) == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("phase", "stream"), [("open", False), ("extend", True), ("prune", False), ("score", True)]
)
async def test_a_backend_that_ends_is_unavailable_until_it_returns(
    service: World, phase: str, stream: bool
) -> None:
    server = service.reward_server if phase == "score" else service.generator_server
    service.shut(phase)
    call = start_call(service, small_request(), stream)
    failing = asyncio.create_task(error_of_call(call, stream))
    await until(lambda: service.num_held(phase) == 1 or failing.done())
    assert not failing.done(), failing.result()
    await server.kill()
    error = await failing
    found = error.code(), reason_of(error), retry_info_s(error)
    assert found == (Code.UNAVAILABLE, "UNAVAILABLE", 1.0)
    # grpc reads this trailer by itself.
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
    await until(lambda: service.is_idle)
    assert (await service.refusal(small_request())).code() is Code.UNAVAILABLE
    service.reward.gate.set()
    for gate in service.generator.gates.values():
        gate.open()
    await server.start()

    async def answers() -> bool:
        try:
            return bool((await service.answer(small_request())).text)
        except grpc.aio.AioRpcError as error:
            assert error.code() is Code.UNAVAILABLE
            return False

    await until(answers)
