"""Parsers of untrusted input: mutations of valid examples raise only documented errors.

A target returns whether the input was accepted. The errors that a parser documents are caught here;
any other is a finding. Accepted input must survive a round trip where one exists.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.fields import parsed
from gateway.requests import ChatRequest, CompletionRequest, call_of
from orchestrator.cache import Secret, answer_key, tenant_digest
from orchestrator.cache.answers import mac, pack, unpack
from specrej import contracts as c
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.client.client import build_request
from specrej.contracts import wire
from specrej.contracts.errors import InvalidRequest
from specrej.contracts.validation import check_lengths, check_request
from specrej.security import Role, new_token, read_tokens
from specrej.v1 import common_pb2, orchestrator_pb2
from tests.simulation.loop import VirtualLoop
from tests.simulation.nodes import GeneratorNode, RewardNode
from tests.simulation.wire import Channel

_SECRET = Secret()
_CONTEXT, _CANDIDATES, _VOCABULARY = 4096, 1024, 50_000
# Statuses of valid calls and of errors of the caller.
_CALLERS = ("OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "RESOURCE_EXHAUSTED")
_BETWEEN = b"|||"  # two messages of a stream


def request(data: bytes) -> bool:
    """A public request: unpack and validate it; a valid one is packed, compared and keyed."""
    try:
        message = orchestrator_pb2.GenerateRequest.FromString(data)
    except DecodeError:  # gRPC rejects it
        return False
    violations = [*check_lengths(message)]
    unpacked = wire.request_from_message(message, violations)
    violations += check_request(unpacked, _CONTEXT, _CANDIDATES, _VOCABULARY)
    if not violations:
        packed = wire.to_message(unpacked, orchestrator_pb2.GenerateRequest)
        again = wire.request_from_message(packed, violations)
        assert (again, violations) == (unpacked, [])
        prints = {"generator_fingerprint": "g", "reward_fingerprint": "r"}
        answer_key(unpacked, tenant="t", secret=_SECRET, **prints)
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
            unpack("k", stream, _SECRET)
        with suppress(ValueError):
            entry = unpack("k", mac("k", stream, _SECRET) + stream, _SECRET)
            stored = pack(entry, "k", _SECRET)
            assert unpack("k", stored, _SECRET) == entry
            is_accepted = True
    return is_accepted


def tokens(data: bytes) -> bool:
    """A tokens file; every tenant in it has a cache digest."""
    with NamedTemporaryFile() as file, suppress(ValueError):
        file.write(data)
        file.flush()
        for entry in read_tokens(Path(file.name)).entries.values():
            tenant_digest(entry.tenant)
        return True
    return False


def generator_port(data: bytes) -> bool:
    """A stream of messages to the generator's port."""
    return _stream(GeneratorNode(random.Random(0), "node", 1000), "GeneratorService/Session", data)


def reward_port(data: bytes) -> bool:
    """A stream of messages to the reward service's port."""
    return _stream(RewardNode(random.Random(0), "node"), "RewardService/ScoreSession", data)


def _stream(node: GeneratorNode | RewardNode, method: str, data: bytes) -> bool:
    """Send messages, each after the answer to the last; whether the call succeeds. It must end
    with a status, and leave no session."""

    async def send() -> str:
        call = Channel(node.server, node).stream_stream(
            f"/specrej.backend.v1.{method}", bytes, bytes
        )()
        try:
            for message in data.split(_BETWEEN):
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


_GENERATION = c.Generation(
    candidates=(c.RankedCandidate(1, "text", 0.5, c.FinishReason.STOP, 1, -1.0),),
    rounds=(),
    usage=c.Usage(1, 2, 1, 0, 0, 4),
    timings=c.Timings(),
    n=2,
)
_PROMPT = common_pb2.Prompt(text="hello")
_OPEN = generator_pb2.OpenSession(
    prompt=_PROMPT, n=4, sampling=common_pb2.Sampling(max_tokens=8), first_round_tokens=2
)
_SPECREJ = {
    "n": 16,
    "alpha": 0.5,
    "schedule": {"kind": "tokens", "tokens": [16, 32]},
    "branching": {"width": 8, "keep": 2, "taper": 0.5},
    "rewards": {"a": 1.0},
    "cache": "use",
    "timeout_s": 3.5,
}
_BODIES = [
    {
        "model": "specrej",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
        "logit_bias": {"7": -1},
        "specrej": _SPECREJ,
    },
    {"model": "a", "prompt": ["Why?"], "logprobs": 2, "stop": "\n", "seed": 7, "temperature": 0.7},
]
_SCHEDULES = (c.Schedule("tokens", tokens=(16, 32)), c.Schedule(first=8, factor=2.0), c.Schedule())
_PACKED = TypeAdapter(tuple[c.Generation]).dump_json((_GENERATION,))
_LINE = new_token("team", [Role.GENERATE, Role.GATEWAY])[1]


def _messages(kind: Any, *messages: Any) -> bytes:
    return _BETWEEN.join(
        kind(sequence=number, **message).SerializeToString()
        for number, message in enumerate(messages, 1)
    )


_SESSION = _messages(
    generator_pb2.SessionRequest,
    {"open": _OPEN},
    {"extend": generator_pb2.ExtendSession(until_tokens=4)},
    {"prune": generator_pb2.PruneSession(keep=[0, 2])},
    {"close": generator_pb2.CloseSession()},
)
_SCORED = reward_pb2.ScoreCandidate(candidate_id=1, text="a")
_SCORING = _messages(
    reward_pb2.ScoreSessionRequest,
    {"open": reward_pb2.OpenScoring(prompt=_PROMPT)},
    {"batch": reward_pb2.ScoreBatch(candidates=[_SCORED])},
)

# Complete, valid examples, and the inputs of past findings.
EXAMPLES: dict[Callable[[bytes], bool], Sequence[bytes]] = {
    request: [
        build_request(
            "Hello?", seed=3, n=8, schedule=schedule, rewards={"a": 1.0, "b": 2.0}
        ).SerializeToString()
        for schedule in _SCHEDULES
    ],
    gateway_request: [json.dumps(body).encode() for body in _BODIES],
    stored_value: [_PACKED, zlib.compress(_PACKED)],
    # Python's JSON parser recurses, and RecursionError is not a ValueError.
    tokens: [f"# a comment\n{_LINE}\n".encode(), b"[" * 3_000],
    generator_port: [_SESSION],
    reward_port: [_SCORING],
}


@pytest.mark.parametrize("target", EXAMPLES)
def test_an_example_is_accepted(target: Callable[[bytes], bool]) -> None:
    """Guards against examples that are rejected at once, whose mutations reach no parser."""
    accepted = [target(data) for data in EXAMPLES[target]]
    assert any(accepted)


@pytest.mark.parametrize("target", EXAMPLES)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=64), seed=st.integers(0, 2**32))
def test_only_documented_errors_are_raised(
    target: Callable[[bytes], bool], data: bytes, seed: int
) -> None:
    """Guards against crashes and leaked error texts by untrusted input."""
    target(data)
    target(_mutated(random.Random(seed), EXAMPLES[target], data))


def _mutated(chance: random.Random, examples: Sequence[bytes], data: bytes) -> bytes:
    whole = bytearray(chance.choice(examples))
    for _ in range(chance.randrange(1, 4)):
        at, end = (chance.randrange(len(whole) + 1) for _ in range(2))
        whole[at : min(end, at + 8)] = chance.choice((b"", data[:8], chance.randbytes(1)))
    return bytes(whole)
