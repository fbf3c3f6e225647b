"""Parsers of untrusted input, each as a function of bytes that must not fail.

A target returns whether the input was accepted. The errors that a parser documents are caught here;
any other is a finding. Accepted input must survive a round trip where one exists.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from gateway.completions import ChatRequest, CompletionRequest, call_of, parsed
from orchestrator.cache import Secret, answer_key, tenant_digest
from orchestrator.cache.answers import mac, pack, unpack
from specrej import contracts as c
from specrej.client.client import build_request
from specrej.contracts import wire
from specrej.contracts.errors import InvalidRequest
from specrej.contracts.validation import check_lengths, check_request
from specrej.security import read_tokens
from specrej.v1 import orchestrator_pb2
from tests.simulation.loop import VirtualLoop
from tests.simulation.nodes import GeneratorNode, RewardNode
from tests.simulation.wire import Channel

Target = Callable[[bytes], bool]

_SECRET = Secret()
_MAX_BYTES = 1 << 16
_CONTEXT, _CANDIDATES, _VOCABULARY = 4096, 1024, 50_000


def request(data: bytes) -> bool:
    """A public request: unpack and validate it; a valid one is packed, compared and keyed."""
    message = _parsed(orchestrator_pb2.GenerateRequest, data)
    if message is None:
        return False
    violations = [*check_lengths(message)]
    unpacked = wire.request_from_message(message, c.Schedule(), violations)
    violations += check_request(unpacked, _CONTEXT, _CANDIDATES, _VOCABULARY)
    if not violations:
        again = wire.request_from_message(
            wire.to_message(unpacked, orchestrator_pb2.GenerateRequest),
            c.Schedule(),
            violations,
        )
        assert (again, violations) == (unpacked, [])
        answer_key(
            unpacked,
            tenant="t",
            generator_fingerprint="g",
            reward_fingerprint="r",
            secret=_SECRET,
        )
    return not violations


def gateway_request(data: bytes) -> bool:
    """A body of OpenAI's API, as a conversation and as raw text: to the orchestrator's message."""
    is_accepted = False
    for kind in (ChatRequest, CompletionRequest):
        with suppress(InvalidRequest):
            call = call_of(parsed(kind, data), {})
            build_request(call.prompt, **call.options)
            is_accepted = True
    return is_accepted


def stored_value(data: bytes) -> bool:
    """A stored value of the cache; a stream, and a text, with a valid MAC."""
    is_accepted = False
    for stream in (data, zlib.compress(data, level=0)):
        with suppress(ValueError):
            unpack("k", stream, _SECRET, _MAX_BYTES)
        with suppress(ValueError):
            entry = unpack("k", mac("k", stream, _SECRET) + stream, _SECRET, _MAX_BYTES)
            stored = pack(entry, "k", _SECRET, 2 * _MAX_BYTES)
            assert unpack("k", stored, _SECRET, 2 * _MAX_BYTES) == entry
            is_accepted = True
    return is_accepted


def tokens(data: bytes) -> bool:
    """A tokens file; every tenant in it has a cache digest."""
    with _file(data) as path, suppress(ValueError):
        for entry in read_tokens(path).entries.values():
            tenant_digest(entry.tenant)
        return True
    return False


def generator_port(data: bytes) -> bool:
    """A stream of messages to the generator's port."""
    return _stream(GeneratorNode(random.Random(0), "node", 1000), "GeneratorService/Session", data)


def reward_port(data: bytes) -> bool:
    """A stream of messages to the reward service's port."""
    return _stream(RewardNode(random.Random(0), "node"), "RewardService/ScoreSession", data)


# Statuses of valid calls and of errors of the caller.
_CALLERS = ("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "RESOURCE_EXHAUSTED")
BETWEEN = b"|||"  # two messages of a stream


def _stream(node: GeneratorNode | RewardNode, method: str, data: bytes) -> bool:
    """Send messages, each after the answer to the last; whether the call succeeds. It must end
    with a status, and leave no session."""

    async def send() -> str:
        call = Channel(node.server, node).stream_stream(
            f"/specrej.backend.v1.{method}", bytes, bytes
        )()
        try:
            for message in data.split(BETWEEN):
                with suppress(asyncio.InvalidStateError):
                    await call.write(message)
                if await call.read() is grpc.aio.EOF:
                    return "OK"
            await call.done_writing()
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    loop = VirtualLoop(random.Random(0), shuffles=False)
    with closing(loop):
        code = loop.run_until_complete(send())
        loop.run_until_complete(asyncio.sleep(60))
    assert code in _CALLERS, code
    assert not node.num_open(), "a session is left"
    return code == "OK"


TARGETS: Mapping[str, Target] = {
    target.__name__: target
    for target in (
        request,
        gateway_request,
        stored_value,
        tokens,
        generator_port,
        reward_port,
    )
}


def _parsed(kind: Any, data: bytes) -> Any:
    """Return the message, or None for malformed bytes, which the interceptor rejects."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=memory if memory.is_dir() else None) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)
