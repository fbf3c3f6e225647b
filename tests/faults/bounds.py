"""Messages of many parts and of the largest size, at all ports: the cost of one is small."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.client.channel import open_channel
from specrej.contracts.limits import MAX_MESSAGE_BYTES, MAX_PUBLIC_MESSAGE_BYTES
from specrej.v1 import common_pb2
from tests import http2
from tests.faults.case import Case, here
from tests.faults.world import CALL_S, SERVICES, World, request
from tests.serving import health_of, part, violations_of

MAX_GROWTH_MIB = 100

_GENERATE = "specrej.v1.OrchestratorService/Generate"
_SESSION = "specrej.backend.v1.GeneratorService/Session"
_SCORE = "specrej.backend.v1.RewardService/Score"
_SCORE_SESSION = "specrej.backend.v1.RewardService/ScoreSession"
_PORTS = {_GENERATE: "orchestrator", _SESSION: "generator"}


def peak_mib(process_id: int) -> float:
    """The largest resident memory since the last reset."""
    status = Path(f"/proc/{process_id}/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024


@contextmanager
def little_memory(process_id: int) -> Iterator[None]:
    """Raises AssertionError at the end: the process has needed much more memory meanwhile."""
    Path(f"/proc/{process_id}/clear_refs").write_text("5")
    before_mib = peak_mib(process_id)
    yield
    growth_mib = peak_mib(process_id) - before_mib
    assert growth_mib < MAX_GROWTH_MIB, f"{growth_mib:.0f} MiB more"


_NUMBERS = b"\x08\x01"  # field 1, not packed


@dataclass(frozen=True, slots=True)
class _Parts:
    """A request of two million bytes: a message inside others, with one part again and again."""

    method: str
    path: str  # of the part in errors
    outer: tuple[int, ...]  # numbers of the fields that lead to the part
    repeated: bytes

    @property
    def data(self) -> bytes:
        data = self.repeated * 1_000_000
        for number in reversed(self.outer):
            data = part(number, data)
        return data


_PARTS = (
    _Parts(_GENERATE, "prompt.messages", (2,), part(1, b"")),
    _Parts(_GENERATE, "sampling.stop", (3,), part(5, b"")),
    _Parts(_GENERATE, "selection.rewards", (4,), part(5, b"")),
    _Parts(_GENERATE, "selection.schedule.tokens", (4, 3), b"\x20\x01"),
    _Parts(_SESSION, "open.prompt.messages", (2, 1), part(1, b"")),
    _Parts(_SESSION, "prune.keep", (4,), _NUMBERS),
    _Parts(_SCORE, "responses", (), part(3, b"")),
    _Parts(_SCORE_SESSION, "batch.candidates", (3,), part(1, b"")),
)


async def many_parts(parts: _Parts, world: World) -> list[str]:
    """The request is refused before its parts are objects."""
    with little_memory(world.process(_port(parts.method)).pid):
        error = await _send(world, parts.method, parts.data)
    assert isinstance(error, grpc.aio.AioRpcError)
    assert set(violations_of(error)) == {parts.path}
    return [error.code().name]


_CHECK = "/grpc.health.v1.Health/Check"
_NUM_UNREAD = 1000
_HELLO = common_pb2.Prompt(text="hello")
_VALID: Mapping[str, Any] = {
    _GENERATE: request(),
    _SESSION: generator_pb2.SessionRequest(
        sequence=1,
        open=generator_pb2.OpenSession(
            prompt=_HELLO,
            n=2,
            sampling=common_pb2.Sampling(max_tokens=2),
            first_round_tokens=1,
        ),
    ),
    _SCORE: reward_pb2.ScoreRequest(prompt=_HELLO, responses=["a"]),
}


async def sized(method: str, num_bytes: int, world: World) -> list[str]:
    """A valid request, made large by a field of a later version."""
    data = _VALID[method].SerializeToString()
    num_padding = num_bytes - len(data)
    data += part(1000, bytes(num_padding - len(part(1000, bytes(num_padding))) + num_padding))
    assert len(data) == num_bytes
    error = await _send(world, method, data)
    return [error.code().name if error else "OK"]


async def unread_replies(port: str, world: World) -> list[str]:
    """Thousands of health checks whose replies cannot be sent: others are answered, memory stays
    flat, and the connections are shut."""
    host, number = world.addresses[port].rsplit(":", 1)
    calls = b"".join(http2.unary(2 * stream + 1, _CHECK) for stream in range(_NUM_UNREAD))
    with little_memory(world.process(port).pid):
        opened = [await asyncio.open_connection(host, int(number)) for _ in range(4)]
        for _, writer in opened:
            writer.write(http2.PREFACE + http2.window(0) + calls)
        # Each check waits for a flood of valid calls, for seconds on a busy machine.
        answered = [await health_of(world.addresses[port], timeout_s=20) for _ in range(20)]
        for reader, writer in opened:
            with suppress(ConnectionError):
                await reader.read()  # until the service shuts the connection
            writer.close()
    return answered


async def _send(world: World, method: str, data: bytes) -> grpc.aio.AioRpcError | None:
    """Send one message of bytes and half-close; return the error."""
    address = world.addresses[_port(method)]
    async with open_channel(address, retries=False, max_message_bytes=2**31 - 1) as channel:
        call: Any = channel.stream_stream(f"/{method}")(timeout=CALL_S)
        with suppress(asyncio.InvalidStateError):  # refused while it is sent
            await call.write(data)
            await call.done_writing()
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error
    return None


def _port(method: str) -> str:
    return _PORTS.get(method, "reward")


_LIMITS = {
    _GENERATE: MAX_PUBLIC_MESSAGE_BYTES,
    _SESSION: MAX_MESSAGE_BYTES,
    _SCORE: MAX_MESSAGE_BYTES,
}

CASES: tuple[Case, ...] = (
    *(
        here(
            f"bounds/unread-replies/{port}",
            partial(unread_replies, port),
            "SERVING x 20",
            fast=port == "orchestrator",
        )
        for port in SERVICES
    ),
    *(
        here(
            f"bounds/parts/{parts.path}", partial(many_parts, parts), "INVALID_ARGUMENT", fast=True
        )
        for parts in _PARTS
    ),
    *(
        here(f"bounds/size/{_port(method)}/{name}", partial(sized, method, size), code, fast=True)
        for method, limit in _LIMITS.items()
        for name, size, code in (
            ("limit", limit, "OK"),
            ("over", limit + 1, "RESOURCE_EXHAUSTED"),
        )
    ),
)
