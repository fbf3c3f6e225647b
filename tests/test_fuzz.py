"""Any sequence of messages on the internal ports ends with a status and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from reward_service.kinds.toy import ToyReward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.v1 import common_pb2, orchestrator_pb2
from tests.serving import listening

# Statuses of valid calls and of errors of the caller.
_ACCEPTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_GENERATOR = "/specrej.backend.v1.GeneratorService/Session"
_REWARD = "/specrej.backend.v1.RewardService/ScoreSession"

_INT32 = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**31), 2**31 - 1, 1025]))
_INT64 = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**63 - 1]))
_VALUES: Mapping[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: _INT64,
    FieldDescriptor.CPPTYPE_DOUBLE: st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0])),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 99, -1]),
    FieldDescriptor.CPPTYPE_STRING: st.one_of(
        st.text(max_size=8), st.sampled_from(["hello", "\0", "e\u0301\u202e", " ", "user", "toy"])
    ),
}
# Changed in few fields, and as often as random ones, so that many messages are valid.
_VALID = (
    common_pb2.Prompt(text="hello"),
    common_pb2.Sampling(max_tokens=8),
    orchestrator_pb2.Selection(n=4, alpha=0.25),
    orchestrator_pb2.WeightedReward(name="toy", weight=-2.0, veto_below=0.5),
    orchestrator_pb2.WeightedReward(name="likelihood", weight=1.0),
    *(orchestrator_pb2.GenerateRequest(prompt=common_pb2.Prompt(text=text)) for text in "abc"),
)


def messages_of(descriptor: Any) -> st.SearchStrategy[Any]:
    """Messages of a type, with random values in some of their fields."""

    def values(field: Any) -> st.SearchStrategy[Any]:
        part = field.message_type
        value = messages_of(part) if part else _VALUES[field.cpp_type]
        return st.lists(value, max_size=4) if field.is_repeated else value

    fields = {field.name: values(field) for field in descriptor.fields}
    kind = GetMessageClass(descriptor)

    def changed(valid: Any, changes: dict[str, Any]) -> Any:
        message = kind()
        message.CopyFrom(valid)
        message.MergeFrom(kind(**changes))
        return message

    few = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    valid = [message for message in _VALID if message.DESCRIPTOR is descriptor]
    return st.one_of(
        st.fixed_dictionaries({}, optional=fields).map(lambda changes: kind(**changes)),
        *(few.map(partial(changed, message)) for message in valid),
    )


# Mostly in order, as a peer numbers them.
_NUMBERS = st.one_of(st.none(), st.none(), _INT64)


def mangled(message: Any, seed: int) -> bytes:
    """The message's bytes, one time in eight with some of them changed, lost or doubled."""
    data, rng = bytearray(message.SerializeToString()), random.Random(seed)
    if seed % 8 == 0 and data:
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(data)


def _scripts(opening: Any) -> st.SearchStrategy[list[bytes]]:
    """Messages of the same type, in half of the cases after this one, which opens a session."""

    def numbered(is_opened: bool, parts: list[tuple[Any, int | None, int]]) -> list[bytes]:
        script = [opening.SerializeToString()] if is_opened else []
        for place, (message, number, seed) in enumerate(parts, 1 + is_opened):
            message.sequence = place if number is None else number
            script.append(mangled(message, seed))
        return script

    part = st.tuples(messages_of(opening.DESCRIPTOR), _NUMBERS, st.integers(0, 2**16))
    return st.builds(numbered, st.booleans(), st.lists(part, max_size=7))


def _send(address: str, method: str, script: list[bytes]) -> grpc.StatusCode:
    """The status of a stream with these messages, each sent after the answer to the last."""
    with grpc.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream(method)
        answered = threading.Semaphore(1)

        def messages() -> Iterator[bytes]:
            for data in script:
                assert answered.acquire(timeout=20)
                yield data

        call = stream(messages(), timeout=20)
        with suppress(grpc.RpcError):
            for _ in call:
                answered.release()
        answered.release(len(script) + 1)  # lets a pending send end
        code: grpc.StatusCode = call.code()
    return code


def _fuzz(address: str, method: str, opening: Any, is_idle: Callable[[], bool]) -> None:
    codes: set[str] = set()

    @settings(max_examples=150)  # some of them with each status
    @given(script=_scripts(opening))
    def send(script: list[bytes]) -> None:
        code = _send(address, method, script)
        codes.add(code.name)
        assert code in _ACCEPTED
        late_s = time.monotonic() + 10
        while not is_idle():
            assert time.monotonic() < late_s, "a session is left"

    send()
    assert codes >= {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}


async def test_the_generators_port() -> None:
    """Guards the status contract and the slots against arbitrary messages."""
    generator = ToyGenerator()
    servicer = GeneratorServicer(lease_s=30)
    servicer.load(generator)
    opening = generator_pb2.SessionRequest(sequence=1)
    opening.open.MergeFrom(generator_pb2.OpenSession(n=4, first_round_tokens=2))
    opening.open.prompt.text, opening.open.sampling.max_tokens = "hello", 8
    async with listening(servicer.service()) as address:
        await asyncio.to_thread(
            _fuzz, address, _GENERATOR, opening, lambda: generator.ledger.owned == 0
        )


async def test_the_rewards_port() -> None:
    """Guards the status contract and the sessions against arbitrary messages."""
    worker = await Worker.start(ToyReward)
    try:
        servicer = RewardServicer(max_batch=3, lease_s=30)
        servicer.serve([worker])
        opening = reward_pb2.ScoreSessionRequest(sequence=1)
        opening.open.prompt.text = "hello"
        async with listening(servicer.service()) as address:
            await asyncio.to_thread(
                _fuzz, address, _REWARD, opening, lambda: worker._num_sessions == 0
            )
    finally:
        worker.close()
