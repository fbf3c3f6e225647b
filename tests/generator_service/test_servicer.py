"""The generator's port over real gRPC, with the toy behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator, ToySession
from specrej.v1 import common_pb2, generator_pb2_grpc
from specrej.v1 import generator_pb2 as pb
from tests.serving import failure_of, reason_of, serving, until, violations_of

PROMPT = common_pb2.Prompt(text="one two three")
OPEN = pb.OpenSession(
    prompt=PROMPT, n=4, sampling=common_pb2.Sampling(max_tokens=20), first_round_tokens=8
)


class Port:
    """A toy generator behind a real port."""

    def __init__(self, channel: grpc.aio.Channel, generator: ToyGenerator) -> None:
        self.stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        self.ledger = generator.ledger

    async def freed(self) -> None:
        """Returns once no slot is owned."""
        await until(lambda: not self.ledger.owned and not self.ledger.num_sessions)


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    servicer, generator = GeneratorServicer(lease_s=5), ToyGenerator(end_every=10**9)
    servicer.load(generator)
    async with serving(servicer.service()) as channel:
        yield Port(channel, generator)


async def ask(call: Any, sequence: int, **command: Any) -> pb.SessionResponse:
    await call.write(pb.SessionRequest(sequence=sequence, **command))
    answer = await call.read()
    assert answer is not grpc.aio.EOF
    return answer  # type: ignore[no-any-return]


async def test_a_session_from_open_to_close(port: Port) -> None:
    call = port.stub.Session()
    opened = (await ask(call, 1, open=OPEN)).opened
    assert (opened.n, opened.prompt_tokens) == (4, 3)
    described = await port.stub.Describe(pb.GeneratorServiceDescribeRequest())
    assert opened.fingerprint == described.fingerprint != ""
    batch = (await ask(call, 2, extend=pb.ExtendSession(until_tokens=8))).prefix_batch
    assert [prefix.candidate_id for prefix in batch.prefixes] == [0, 1, 2, 3]
    assert all(len(prefix.new_token_ids) == 8 for prefix in batch.prefixes)
    assert batch.slots.session == 3 + 4 * 8
    pruned = (await ask(call, 3, prune=pb.PruneSession(keep=[1, 3]))).pruned
    assert (pruned.freed_slots, pruned.slots.session) == (16, 3 + 2 * 8)
    batch = (await ask(call, 4, extend=pb.ExtendSession(until_tokens=20))).prefix_batch
    assert [prefix.candidate_id for prefix in batch.prefixes] == [1, 3]
    assert batch.prefixes[0].mean_logprob == pytest.approx(
        batch.prefixes[0].cumulative_logprob / 20
    )
    assert (await ask(call, 5, close=pb.CloseSession())).HasField("closed")
    assert port.ledger.owned == 0
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


async def test_a_session_with_logprobs_and_the_longest_salt(port: Port) -> None:
    """Guards against fields dropped on either way, and a limit in bytes instead of characters."""
    wanted = pb.OpenSession()
    wanted.CopyFrom(OPEN)
    wanted.sampling.logprobs, wanted.cache_salt = True, "é" * 128
    call = port.stub.Session()
    await ask(call, 1, open=wanted)
    for sequence, until_tokens in ((2, 8), (3, 20)):
        extend = pb.ExtendSession(until_tokens=until_tokens)
        batch = (await ask(call, sequence, extend=extend)).prefix_batch
        for prefix in batch.prefixes:
            assert len(prefix.new_logprobs) == len(prefix.new_token_ids)
    call.cancel()


async def test_salt_and_first_id_reach_the_generator() -> None:
    """Guards against prompt prefixes shared by all because the port dropped the salt."""
    given = []

    class Salted(ToyGenerator):
        @asynccontextmanager
        async def open(self, *arguments: Any) -> AsyncIterator[ToySession]:
            given.append(arguments[-2:])
            async with super().open(*arguments) as session:
                yield session

    servicer, wanted = GeneratorServicer(lease_s=5), pb.OpenSession()
    servicer.load(Salted())
    wanted.CopyFrom(OPEN)
    wanted.cache_salt = "pepper"
    wanted.first_candidate_id = 7
    async with serving(servicer.service()) as channel:
        call = generator_pb2_grpc.GeneratorServiceStub(channel).Session()
        await ask(call, 1, open=wanted)
        await ask(call, 2, close=pb.CloseSession())
    assert given == [("pepper", 7)]


async def test_repeated_and_old_numbers_change_nothing(port: Port) -> None:
    """A prune that is sent twice must not free twice, nor an extend grow twice."""
    call = port.stub.Session()
    await ask(call, 1, open=OPEN)
    extend = pb.ExtendSession(until_tokens=8)
    first = await ask(call, 2, extend=extend)
    assert await ask(call, 2, extend=pb.ExtendSession(until_tokens=20)) == first
    await ask(call, 3, prune=pb.PruneSession(keep=[0]))
    owned = port.ledger.owned
    assert (await ask(call, 2, extend=extend)).HasField("stale")
    assert (await ask(call, 1, open=OPEN)).HasField("stale")
    assert (await ask(call, 3, prune=pb.PruneSession())).pruned.freed_slots == 24
    assert port.ledger.owned == owned


@pytest.mark.parametrize(
    ("keep", "freed"),
    [
        ([], 32),
        ([0, 1, 2, 3], 0),
        ([0, 0, 0], 24),
        ([99, -5, 2**31 - 1], 32),
        ([1, 77], 24),
    ],
)
async def test_prune_takes_any_ids(port: Port, keep: list[int], freed: int) -> None:
    """Unknown, duplicate and never-issued ids: idempotent, never an assertion."""
    call = port.stub.Session()
    await ask(call, 1, open=OPEN)
    await ask(call, 2, extend=pb.ExtendSession(until_tokens=8))
    answer = await ask(call, 3, prune=pb.PruneSession(keep=keep))
    assert answer.pruned.freed_slots == freed


@pytest.mark.parametrize(
    "commands",
    [
        [{"extend": pb.ExtendSession(until_tokens=8)}],
        [{"prune": pb.PruneSession(keep=[0])}],
        [{"open": OPEN}, {"open": OPEN}],
        [{"open": OPEN}, {"close": pb.CloseSession()}, {"open": OPEN}],
        [{"open": OPEN}, {"close": pb.CloseSession()}, {"prune": pb.PruneSession()}],
    ],
)
async def test_commands_out_of_order(port: Port, commands: list[dict[str, Any]]) -> None:
    call = port.stub.Session()
    for sequence, command in enumerate(commands[:-1], start=1):
        await ask(call, sequence, **command)
    error = await failure_of(ask(call, len(commands), **commands[-1]))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "OUT_OF_ORDER"
    await port.freed()


async def test_every_bad_field_of_open_at_once(port: Port) -> None:
    bad = pb.OpenSession(
        prompt=common_pb2.Prompt(text="  "),
        n=5000,
        sampling=common_pb2.Sampling(
            max_tokens=0,
            temperature=float("nan"),
            top_k=-2,
            top_p=0,
            seed=-1,
            stop=["", "a" * 300],
            min_tokens=-1,
        ),
        first_round_tokens=0,
        cache_salt="x" * 129,
        first_candidate_id=-1,
    )
    error = await failure_of(ask(port.stub.Session(), 1, open=bad))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations_of(error)) == {
        "open.prompt.text",
        "open.n",
        "open.sampling.max_tokens",
        "open.sampling.temperature",
        "open.sampling.top_k",
        "open.sampling.top_p",
        "open.sampling.seed",
        "open.sampling.stop[0]",
        "open.sampling.stop[1]",
        "open.sampling.min_tokens",
        "open.first_round_tokens",
        "open.cache_salt",
        "open.first_candidate_id",
    }
    assert port.ledger.num_sessions == 0


@pytest.mark.parametrize("until", [0, -1, 21, 2**31 - 1])
async def test_a_decision_token_out_of_range(port: Port, until: int) -> None:
    call = port.stub.Session()
    await ask(call, 1, open=OPEN)
    error = await failure_of(ask(call, 2, extend=pb.ExtendSession(until_tokens=until)))
    assert list(violations_of(error)) == ["extend.until_tokens"]
    await port.freed()


@pytest.mark.parametrize("sequence", [0, -1])
async def test_numbers_start_at_one(port: Port, sequence: int) -> None:
    error = await failure_of(ask(port.stub.Session(), sequence, open=OPEN))
    assert list(violations_of(error)) == ["sequence"]


async def test_an_empty_command(port: Port) -> None:
    error = await failure_of(ask(port.stub.Session(), 1))
    assert list(violations_of(error)) == ["command"]


@pytest.mark.parametrize("end", ["half-close", "cancel", "channel"])
async def test_slots_are_free_however_the_stream_ends(port: Port, end: str) -> None:
    """Stream lifetime is KV lifetime."""
    call = port.stub.Session()
    await ask(call, 1, open=OPEN)
    await ask(call, 2, extend=pb.ExtendSession(until_tokens=8))
    assert port.ledger.owned > 0
    if end == "half-close":
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    else:
        call.cancel()
    await port.freed()


async def test_a_silent_peer_loses_its_session() -> None:
    """An idle lease: the peer hangs without closing."""
    servicer, generator = GeneratorServicer(lease_s=0.5), ToyGenerator()
    servicer.load(generator)
    async with serving(servicer.service()) as channel:
        call = generator_pb2_grpc.GeneratorServiceStub(channel).Session()
        await ask(call, 1, open=OPEN)
        error = await failure_of(call.read())
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "SESSION_EXPIRED"
        assert generator.ledger.owned == 0


async def test_unavailable_while_loading() -> None:
    async with serving(GeneratorServicer(lease_s=5).service()) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        error = await failure_of(stub.Describe(pb.GeneratorServiceDescribeRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2000"


async def test_a_bug_is_opaque() -> None:
    """No class name, path or text of an exception may leave the process."""

    class Broken(ToyGenerator):
        async def describe(self) -> Any:
            raise RuntimeError("/secret/path of OurInternalClass")

    servicer = GeneratorServicer(lease_s=5)
    servicer.load(Broken())
    async with serving(servicer.service()) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        error = await failure_of(stub.Describe(pb.GeneratorServiceDescribeRequest()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert reason_of(error) == "INTERNAL"
    assert "secret" not in str(error.details())
    assert "Runtime" not in str(error.details())


async def test_describe(port: Port) -> None:
    answer = await port.stub.Describe(pb.GeneratorServiceDescribeRequest())
    assert (answer.model, answer.max_candidates) == ("toy", 1024)
    assert answer.slots.capacity == port.ledger.capacity
