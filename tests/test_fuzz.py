"""Whatever is said on the internal ports, in whatever order: a status, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator
from reward_service.servicer import RewardServicer
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.v1 import common_pb2, generator_pb2, reward_pb2
from tests.serving import listening

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
        first_candidate_id=_INT32,
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


def _script(opening: Any, commands: st.SearchStrategy[Any]) -> st.SearchStrategy[list[bytes]]:
    """Messages, in half of the cases after one that opens a session as it should be."""

    def numbered(is_opened: bool, parts: list[tuple[Any, int | None, int]]) -> list[bytes]:
        said = []
        if is_opened:
            opening.sequence = 1
            said.append(opening.SerializeToString())
        for place, (message, number, seed) in enumerate(parts, 1 + is_opened):
            message.sequence = place if number is None else number
            said.append(_mangled(message, seed))
        return said

    part = st.tuples(commands, _NUMBERS, st.integers(0, 2**16))
    return st.builds(numbered, st.booleans(), st.lists(part, max_size=7))


def _say(address: str, method: str, script: list[bytes]) -> grpc.StatusCode:
    """What a stream ends with on which these messages are sent, each after the last's answer."""
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
        answered.release(len(script) + 1)  # whoever waits to send can end
        code: grpc.StatusCode = call.code()
    return code


def _fuzz(
    address: str, method: str, script: st.SearchStrategy[list[bytes]], is_idle: Callable[[], bool]
) -> Counter[str]:
    codes: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(script=script)
    def say(script: list[bytes]) -> None:
        code = _say(address, method, script)
        codes[code.name] += 1
        assert code in _FAULTS
        until = time.monotonic() + 10
        while not is_idle():
            assert time.monotonic() < until, "something was left behind"

    say()
    return codes


async def test_the_generators_port() -> None:
    """Guards the status contract, and slots against whoever talks nonsense."""
    generator = ToyGenerator()
    servicer = GeneratorServicer(lease_s=30)
    servicer.load(generator)
    opening = generator_pb2.OpenSession(
        prompt=common_pb2.Prompt(text="hello"),
        n=4,
        sampling=common_pb2.Sampling(max_tokens=8),
        first_round_tokens=2,
    )
    script = _script(generator_pb2.SessionRequest(open=opening), _COMMANDS)
    async with listening(servicer.service()) as address:
        codes = await asyncio.to_thread(
            _fuzz, address, _GENERATOR, script, lambda: generator.ledger.owned == 0
        )
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= codes.keys()


async def test_the_rewards_port() -> None:
    """Guards the status contract, and what a session keeps."""
    worker = await Worker.start(ToyReward)
    try:
        servicer = RewardServicer(max_batch=3, lease_s=30)
        servicer.serve([worker])
        opening = reward_pb2.OpenScoring(prompt=common_pb2.Prompt(text="hello"))
        script = _script(reward_pb2.ScoreSessionRequest(open=opening), _SCORING)
        async with listening(servicer.service()) as address:
            codes = await asyncio.to_thread(
                _fuzz, address, _REWARD, script, lambda: worker._num_sessions == 0
            )
    finally:
        worker.close()
    assert {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= codes.keys()
