"""Whatever is said on the internal ports, in whatever order: a status, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from reward_service.servicer import RewardServicer
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.v1 import common_pb2, generator_pb2, reward_pb2
from tests.serving import serving, until

# What a caller's fault, or haste, may be answered with.
_FAULTS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_GENERATOR = "/specrej.v1.GeneratorService/Session"
_REWARD = "/specrej.v1.RewardService/ScoreSession"

_INT32 = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**31), 2**31 - 1, 1025]))
_INT64 = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**63 - 1]))
_DOUBLE = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0]))
_TEXT = st.one_of(st.text(max_size=8), st.sampled_from(["hello", "\0", "e\u0301\u202e", " "]))
_MESSAGE = st.builds(
    common_pb2.Message, role=st.sampled_from(["user", "assistant", "robot"]), content=_TEXT
)
_PROMPT = st.one_of(
    st.just(common_pb2.Prompt(text="hello")),
    st.builds(common_pb2.Prompt, messages=st.lists(_MESSAGE, max_size=3), text=_TEXT),
)
_SAMPLING = st.one_of(
    st.just(common_pb2.Sampling(max_tokens=8)),
    st.builds(
        common_pb2.Sampling,
        max_tokens=_INT32,
        temperature=_DOUBLE,
        top_k=_INT32,
        top_p=_DOUBLE,
        stop=st.lists(_TEXT, max_size=3),
        seed=_INT64,
        min_tokens=_INT32,
        logprobs=st.booleans(),
    ),
)
_IDS = st.lists(_INT32, max_size=6)
_COMMANDS = st.one_of(
    st.builds(
        lambda **fields: generator_pb2.SessionRequest(open=generator_pb2.OpenSession(**fields)),
        prompt=_PROMPT,
        n=_INT32,
        sampling=_SAMPLING,
        first_round_tokens=_INT32,
        cache_salt=_TEXT,
    ),
    st.builds(
        lambda until: generator_pb2.SessionRequest(
            extend=generator_pb2.ExtendSession(until_tokens=until)
        ),
        _INT32,
    ),
    st.builds(
        lambda keep: generator_pb2.SessionRequest(prune=generator_pb2.PruneSession(keep=keep)), _IDS
    ),
    st.just(generator_pb2.SessionRequest(close=generator_pb2.CloseSession())),
    st.just(generator_pb2.SessionRequest()),
)
_CANDIDATE = st.builds(
    reward_pb2.ScoreCandidate, candidate_id=_INT32, text=_TEXT, finished=st.booleans()
)
_SCORING = st.one_of(
    st.builds(
        lambda **fields: reward_pb2.ScoreSessionRequest(open=reward_pb2.OpenScoring(**fields)),
        reward=st.sampled_from(["", "toy", "../../x"]),
        prompt=_PROMPT,
    ),
    st.builds(
        lambda candidates: reward_pb2.ScoreSessionRequest(
            batch=reward_pb2.ScoreBatch(candidates=candidates)
        ),
        st.lists(_CANDIDATE, max_size=4),
    ),
    st.just(reward_pb2.ScoreSessionRequest()),
)
# Mostly as a peer would number them.
_NUMBERS = st.one_of(st.none(), st.none(), _INT64)


def _mangled(message: Any, seed: int) -> bytes:
    """Its bytes, one time in eight with some of them changed, lost or doubled."""
    data, rng = bytearray(message.SerializeToString()), random.Random(seed)
    if seed % 8 == 0 and data:
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(data)


def _script(commands: st.SearchStrategy[Any]) -> st.SearchStrategy[list[bytes]]:
    def numbered(parts: list[tuple[Any, int | None, int]]) -> list[bytes]:
        for place, (message, number, _) in enumerate(parts, 1):
            message.sequence = place if number is None else number
        return [_mangled(message, seed) for message, _, seed in parts]

    part = st.tuples(commands, _NUMBERS, st.integers(0, 2**16))
    return st.lists(part, min_size=1, max_size=7).map(numbered)


async def _say(channel: grpc.aio.Channel, method: str, script: list[bytes]) -> grpc.StatusCode:
    """What a stream ends with on which these messages are sent, each after the last's answer."""
    call: Any = channel.stream_stream(method)(timeout=20)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for data in script:
            await call.write(data)
            if await call.read() is grpc.aio.EOF:
                break
        await call.done_writing()
    code: grpc.StatusCode = await call.code()
    return code


@settings(max_examples=150, deadline=None)
@given(script=_script(_COMMANDS))
def test_the_generators_port(script: list[bytes]) -> None:
    """Guards the status contract, and slots against whoever talks nonsense."""
    asyncio.run(_generator(script))


async def _generator(script: list[bytes]) -> None:
    generator = ToyGenerator()
    servicer = GeneratorServicer(lease_s=30)
    servicer.load(generator)
    async with serving(servicer.service()) as channel:
        assert await _say(channel, _GENERATOR, script) in _FAULTS
        await until(lambda: generator.ledger.owned == 0)


@settings(max_examples=150, deadline=None)
@given(script=_script(_SCORING))
def test_the_rewards_port(script: list[bytes]) -> None:
    """Guards the status contract, and the reward's queue."""
    asyncio.run(_reward(script))


async def _reward(script: list[bytes]) -> None:
    worker = await Worker.start(ToyReward)
    try:
        servicer = RewardServicer(max_batch=3, lease_s=30)
        servicer.serve([worker])
        async with serving(servicer.service()) as channel:
            assert await _say(channel, _REWARD, script) in _FAULTS
            await until(lambda: worker._num_sessions == 0)
    finally:
        worker.close()
