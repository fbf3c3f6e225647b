"""Bad input, at the public port and straight at the backends: the exact code, and the field."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from specrej.channel import open_channel
from specrej.security import MAX_MESSAGE_BYTES
from specrej.v1 import (
    common_pb2,
    generator_pb2,
    generator_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
)
from tests.faults.case import Case, here
from tests.faults.world import SERVICES, World, request
from tests.serving import violations_of

_INT32_MAX = 2**31 - 1
_NAN, _INF = math.nan, math.inf
_GENERATE = "/specrej.v1.OrchestratorService/Generate"
_INVALID = "INVALID_ARGUMENT"
_DECISIONS = "selection.schedule.tokens.decision_tokens"
# What travels in one header field; the default hard limit is twice the soft one of 8 KiB.
_METADATA_AT, _METADATA_OVER = 7_000, 20_000


@dataclass(frozen=True, slots=True)
class Bad:
    """A value of a field, and what is said to it; `also` are other fields set to make the point."""

    name: str
    field: str
    value: Any
    code: str = _INVALID
    told: str = ""  # the field that the answer names, if it is not that very one
    also: tuple[tuple[str, Any], ...] = ()

    def put(self, message: Message) -> None:
        """Set the fields."""
        for path, value in ((self.field, self.value), *self.also):
            _put(message, path, value)


def _put(message: Any, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        del getattr(message, leaf)[:]
        getattr(message, leaf).extend(value)
    elif isinstance(value, Message):
        getattr(message, leaf).CopyFrom(value)
    else:
        setattr(message, leaf, value)


def _many(name: str, field: str, values: dict[str, Any], **rest: Any) -> Iterator[Bad]:
    """The same field with several values: all are refused, but those whose name ends with "ok"."""
    for label, value in values.items():
        code = "OK" if label.endswith("ok") else _INVALID
        yield Bad(f"{name}/{label}", field, value, code, **rest)


_ONE = ("selection.n", 1)
_SHORT = ("sampling.max_tokens", 2)
_MAY_END = ("sampling.ignore_eos", False)
_NO_REWARD = [orchestrator_pb2.WeightedReward(name="../../x")]


def _text(text: str) -> common_pb2.Prompt:
    return common_pb2.Prompt(text=text)


_PROMPTS = {
    "null-bytes-ok": _text("a\0b\0"),
    "right-to-left-ok": _text("\u202eabc \u0634\u0645\u0633 \u05d0"),
    "joined-emoji-ok": _text("\U0001f468\u200d\U0001f469\u200d\U0001f467 family"),
    "nfc-ok": _text("caf\u00e9"),
    "nfd-ok": _text("cafe\u0301"),
}
_FIELDS: tuple[Bad, ...] = (
    Bad("prompt-empty/none", "prompt", common_pb2.Prompt()),
    Bad("prompt-empty/blank", "prompt", _text(" \n\t"), told="prompt.text"),
    Bad("megabyte/at-limit", "prompt", _text("x" * 1_000_000), "OK", also=(_SHORT,)),
    Bad("megabyte/over", "prompt", _text("x" * 1_000_001)),
    Bad("context/limit", "sampling.max_tokens", 4096, "OK", also=(_ONE, _MAY_END)),
    Bad("context/over", "sampling.max_tokens", 4097),
    *_many(
        "n", "selection.n",
        {"0-ok": 0, "-1": -1, "1-ok": 1, "cap-ok": 1024, "cap+1": 1025, "int32-max": _INT32_MAX},
        also=(_SHORT,),
    ),
    *_many("alpha", "selection.alpha",
        {"negative": -0.1, "0-ok": 0.0, "1": 1.0, "above-1": 1.5, "nan": _NAN, "inf": _INF}),
    *_many("temperature", "sampling.temperature",
        {"nan": _NAN, "inf": _INF, "-1": -1.0, "1e-9": 1e-9}),
    Bad("temperature/0-ok", "sampling.temperature", 0.0, "OK", also=(_ONE,)),
    Bad("greedy-many/n-2", "sampling.temperature", 0.0, also=(("selection.n", 2),)),
    *_many("top-p", "sampling.top_p", {"0": 0.0, "1-ok": 1.0, "2": 2.0, "nan": _NAN}),
    Bad("top-k/-2", "sampling.top_k", -2),
    *_many("max-tokens", "sampling.max_tokens", {"0": 0, "-1": -1, "int32-max": _INT32_MAX}),
    *_many("decision-tokens", _DECISIONS,
        {"unsorted": [8, 4], "duplicate": [4, 4], "negative": [-1, 4], "zero": [0]}),
    *_many("unicode", "prompt", _PROMPTS),
    Bad("model/unknown", "model", "gpt-9", "NOT_FOUND"),
    Bad("model/path", "model", "../../x", "NOT_FOUND"),
    Bad("model/reward", "selection.rewards", _NO_REWARD, "NOT_FOUND"),
    Bad("enum/algorithm", "selection.algorithm", 7),
    Bad("enum/cache", "cache_control", 9),
    *_many("stop-strings", "sampling.stop", {"1000": ["x"] * 1000, "16-ok": ["x"] * 16}),
    Bad("stop-strings/empty", "sampling.stop", [""], told="sampling.stop[0]"),
    Bad("special-tokens/in-text", "prompt", _text("<|im_start|>system\n<|im_end|></s>"), "OK"),
)  # fmt: skip
_OPEN_FIELDS: tuple[Bad, ...] = (
    Bad("no-prompt", "prompt", common_pb2.Prompt()),
    Bad("n-over-cap", "n", 1025),
    Bad("n-int32-max", "n", _INT32_MAX),
    Bad("n-negative", "n", -1),
    Bad("temperature-nan", "sampling.temperature", _NAN),
    Bad("top-p-0", "sampling.top_p", 0.0),
    Bad("top-k", "sampling.top_k", -2),
    Bad("max-tokens", "sampling.max_tokens", _INT32_MAX),
    Bad("first-round", "first_round_tokens", 0),
    Bad("salt", "cache_salt", "x" * 129),
    Bad("stop", "sampling.stop", ["x"] * 1000),
)
_SCORE_FIELDS: tuple[Bad, ...] = (
    Bad("no-prompt", "prompt", common_pb2.Prompt()),
    Bad("blank-prompt", "prompt", _text(" "), told="prompt.text"),
    Bad("no-responses", "responses", []),
    Bad("many-responses", "responses", ["x"] * 1025, told="responses"),
    Bad("long-response", "responses", ["x" * 262_145], told="responses[0]"),
    Bad("unknown-reward", "reward", "../../x", "NOT_FOUND"),
)


def _check_told(error: grpc.aio.AioRpcError, field: str) -> None:
    told = set(violations_of(error))
    assert told == {field}, f"the answer names {sorted(told)}"


async def field_of_request(bad: Bad, world: World) -> list[str]:
    """One bad field of a public request."""
    message = request(max_tokens=8)
    bad.put(message)
    outcome = await world.ask(message=message)
    if outcome.code == _INVALID:
        assert outcome.error
        _check_told(outcome.error, bad.told or bad.field)
    return [outcome.code]


async def field_of_open(bad: Bad, world: World) -> list[str]:
    """The same straight at the generator."""
    command = generator_pb2.OpenSession(
        prompt=_text("a prompt"),
        n=4,
        sampling=common_pb2.Sampling(max_tokens=8),
        first_round_tokens=4,
    )
    bad.put(command)
    async with open_channel(world.stack.generator_address, retries=False) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        call = stub.Session(timeout=10)
        try:
            await call.write(generator_pb2.SessionRequest(sequence=1, open=command))
            await call.read()
        except grpc.aio.AioRpcError as error:
            _check_told(error, f"open.{bad.told or bad.field}")
            return [error.code().name]
    return ["OK"]


async def field_of_score(bad: Bad, world: World) -> list[str]:
    """The same straight at the reward service."""
    message = reward_pb2.ScoreRequest(prompt=_text("a prompt"), responses=["an answer"])
    bad.put(message)
    async with open_channel(world.stack.reward_address, retries=False) as channel:
        stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        try:
            await stub.Score(message, timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                _check_told(error, bad.told or bad.field)
            return [error.code().name]
    return ["OK"]


async def raw(data: bytes, method: str, world: World, *, metadata_bytes: int = 0) -> list[str]:
    """Bytes that no client would make."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
    async with grpc.aio.insecure_channel(world.stack.orchestrator_address, options) as channel:
        call = channel.unary_unary(
            method, request_serializer=bytes, response_deserializer=lambda answer: answer
        )
        metadata = (("x-filler", "x" * metadata_bytes),) if metadata_bytes else ()
        try:
            await call(data, timeout=20, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return [error.code().name]
    return ["OK"]


async def raw_stream(name: str, method: str, data: bytes, world: World) -> list[str]:
    """Bytes that no client would make, on a stream, or what a server takes for its request."""
    async with open_channel(world.addresses[name], retries=False) as channel:
        call = channel.stream_stream(
            method, request_serializer=bytes, response_deserializer=lambda answer: answer
        )(timeout=10)
        try:
            await call.write(data)
            await call.done_writing()
            await call.read()
        except grpc.aio.AioRpcError as error:
            return [error.code().name]
    return ["OK"]


async def over_the_limit(world: World) -> list[str]:
    """One byte more than a message may have."""
    return await raw(bytes(MAX_MESSAGE_BYTES + 1), _GENERATE, world)


async def with_deadline(timeout_s: float | None, world: World) -> list[str]:
    """A deadline of nothing, of next to nothing, and none."""
    return [(await world.ask(timeout_s=timeout_s)).code]


# Fuzz


_NUMBERS = st.floats() | st.sampled_from([0.0, -1.0, 0.5, 1.0, 1e308])
_INTEGERS = st.integers(-(2**31), _INT32_MAX) | st.integers(-2, 40)
_TURNS = st.builds(
    common_pb2.Message,
    role=st.sampled_from(["user", "system", "assistant", "robot"]),
    content=st.text(max_size=20),
)
_REWARDS = st.builds(
    orchestrator_pb2.WeightedReward,
    name=st.sampled_from(["toy", "likelihood", "", "nope"]),
    weight=st.none() | _NUMBERS,
    veto_below=st.none() | _NUMBERS,
)
_FUZZED: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "toy", "../../x"]),
    "prompt": st.builds(
        common_pb2.Prompt, text=st.text(max_size=20), messages=st.lists(_TURNS, max_size=2)
    ),
    # Nothing long: a toy takes 5 ms for a token.
    "sampling.max_tokens": st.integers(-2, 16) | st.integers(4097, _INT32_MAX),
    "sampling.temperature": _NUMBERS,
    "sampling.top_k": _INTEGERS,
    "sampling.top_p": _NUMBERS,
    "sampling.stop": st.lists(st.text(max_size=4), max_size=3),
    "sampling.seed": st.integers(-(2**63), 2**63 - 1),
    "sampling.ignore_eos": st.booleans(),
    "sampling.min_tokens": _INTEGERS,
    "sampling.logprobs": st.booleans(),
    "selection.n": _INTEGERS,
    "selection.alpha": _NUMBERS,
    "selection.algorithm": st.integers(0, 3),
    "selection.return_candidates": _INTEGERS,
    "selection.rewards": st.lists(_REWARDS, max_size=2),
    _DECISIONS: st.lists(_INTEGERS, max_size=4),
    "selection.schedule.geometric.first": _INTEGERS,
    "selection.schedule.geometric.factor": _NUMBERS,
    "cache_control": st.integers(0, 5),
    "allow_degraded": st.booleans(),
}
# A few fields at a time, so that many requests get past the checks.
_CHANGES = st.lists(st.sampled_from(sorted(_FUZZED)), max_size=3, unique=True).flatmap(
    lambda paths: st.fixed_dictionaries({path: _FUZZED[path] for path in paths})
)


async def fuzz(world: World) -> list[str]:
    """Whatever the fields say: an answer, or its caller's fault."""
    return await asyncio.to_thread(_fuzz, world.stack.orchestrator_address)


def _fuzz(address: str) -> list[str]:
    codes: list[str] = []
    with grpc.insecure_channel(address) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        @settings(max_examples=200, deadline=None, database=None)
        @given(changes=_CHANGES)
        def ask(changes: dict[str, Any]) -> None:
            message = request(max_tokens=4)
            for path, value in changes.items():
                _put(message, path, value)
            try:
                stub.Generate(message, timeout=10)
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
                assert codes[-1] in (_INVALID, "NOT_FOUND"), f"{codes[-1]}: {error.details()}"

        ask()
    return codes


def _valid() -> bytes:
    return request(max_tokens=4).SerializeToString()


_RAW: dict[str, tuple[Callable[[World], Any], str]] = {
    # Field 999, a varint: what a newer client may send.
    "unknown-field/ignored": (partial(raw, _valid() + b"\xb8\x3e\x01", _GENERATE), "OK"),
    "malformed/garbage": (partial(raw, b"\xff" * 64, _GENERATE), _INVALID),
    "malformed/truncated": (partial(raw, _valid()[:-3], _GENERATE), _INVALID),
    "malformed/generator-stream": (
        partial(raw_stream, "generator", "/specrej.v1.GeneratorService/Session", b"\xff" * 9),
        _INVALID,
    ),
    "malformed/reward-stream": (
        partial(raw_stream, "reward", "/specrej.v1.RewardService/ScoreSession", b"\xff" * 9),
        _INVALID,
    ),
    **{
        f"malformed/health-of-{name}": (
            partial(raw_stream, name, "/grpc.health.v1.Health/Check", b"\xff" * 16),
            _INVALID,
        )
        for name in SERVICES
    },
    "message-size/over": (over_the_limit, "RESOURCE_EXHAUSTED"),
    "metadata-size/at-limit": (
        partial(raw, _valid(), _GENERATE, metadata_bytes=_METADATA_AT),
        "OK",
    ),
    "metadata-size/over": (
        partial(raw, _valid(), _GENERATE, metadata_bytes=_METADATA_OVER),
        "RESOURCE_EXHAUSTED",
    ),
    "unknown-method/same-service": (
        partial(raw, _valid(), "/specrej.v1.OrchestratorService/Nope"),
        "UNIMPLEMENTED",
    ),
    "deadline/0": (partial(with_deadline, 0), "DEADLINE_EXCEEDED"),
    "deadline/1ms": (partial(with_deadline, 0.001), "DEADLINE_EXCEEDED"),
    "deadline/none": (partial(with_deadline, None), "OK"),
}

CASES: tuple[Case, ...] = (
    *(
        here(f"bad/{bad.name}", partial(field_of_request, bad), bad.code, fast=True)
        for bad in _FIELDS
    ),
    *(here(f"bad/{name}", play, code, fast=True) for name, (play, code) in _RAW.items()),
    *(
        here(f"bad/generator-port/{bad.name}", partial(field_of_open, bad), bad.code)
        for bad in _OPEN_FIELDS
    ),
    *(
        here(f"bad/reward-port/{bad.name}", partial(field_of_score, bad), bad.code)
        for bad in _SCORE_FIELDS
    ),
    here("bad/fuzz", fuzz, "OK", _INVALID, "NOT_FOUND", limit_s=120),
)
