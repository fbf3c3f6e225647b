"""The generator's port over real gRPC with the toy behind it, beyond tests/conformance."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from generator_service.servicer import GeneratorServicer
from generator_service.toy import ToyGenerator, is_toy, load_toy
from specrej.backend.v1 import generator_pb2 as pb
from specrej.backend.v1 import generator_pb2_grpc
from specrej.contracts import Prompt, Sampling, SessionSpec
from specrej.v1 import common_pb2
from tests.serving import failure_of, reason_of, serving, until, violations_of

PROMPT = common_pb2.Prompt(text="one two three")
OPEN = pb.OpenSession(
    prompt=PROMPT,
    n=4,
    sampling=common_pb2.Sampling(max_tokens=20),
    first_round_tokens=8,
    cache_salt="é" * 128,  # the limit is in characters, not in bytes
)


@asynccontextmanager
async def stub_of(generator: ToyGenerator | None, lease_s: float = 5) -> AsyncIterator[Any]:
    """A client of a generator behind a real port; None: it is loading."""
    servicer = GeneratorServicer(lease_s)
    if generator:
        servicer.load(generator)
    async with serving(servicer.service()) as channel:
        yield generator_pb2_grpc.GeneratorServiceStub(channel)


@pytest.fixture
def generator() -> ToyGenerator:
    return ToyGenerator(end_every=10**9)


@pytest.fixture
async def stub(generator: ToyGenerator) -> AsyncIterator[Any]:
    """Afterwards no session is open and no slot is owned."""
    async with stub_of(generator) as stub:
        yield stub
        await until(lambda: not generator.ledger.owned and not generator.ledger.num_sessions)


async def answer_of(call: Any, sequence: int, **command: Any) -> pb.SessionResponse:
    await call.write(pb.SessionRequest(sequence=sequence, **command))
    answer = await call.read()
    assert answer is not grpc.aio.EOF
    return answer  # type: ignore[no-any-return]


async def test_repeated_and_old_numbers_change_nothing(stub: Any, generator: ToyGenerator) -> None:
    """A half-closed stream then ends the session."""
    call = stub.Session()
    opened = (await answer_of(call, 1, open=OPEN)).opened
    described = (await stub.Describe(pb.GeneratorServiceDescribeRequest())).generator
    assert opened.fingerprint == described.fingerprint != ""
    extend = pb.ExtendSession(until_tokens=8)
    first = await answer_of(call, 2, extend=extend)
    assert await answer_of(call, 2, extend=pb.ExtendSession(until_tokens=20)) == first
    await answer_of(call, 3, prune=pb.PruneSession(keep=[0]))
    owned = generator.ledger.owned
    assert (await answer_of(call, 2, extend=extend)).HasField("stale")
    assert (await answer_of(call, 1, open=OPEN)).HasField("stale")
    assert (await answer_of(call, 3, prune=pb.PruneSession())).pruned.freed_slots == 24
    assert generator.ledger.owned == owned
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


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
async def test_commands_out_of_order(stub: Any, commands: list[dict[str, Any]]) -> None:
    call = stub.Session()
    for sequence, command in enumerate(commands[:-1], start=1):
        await answer_of(call, sequence, **command)
    error = await failure_of(answer_of(call, len(commands), **commands[-1]))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "OUT_OF_ORDER"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
async def test_every_violation_of_open_is_reported(stub: Any, weight: float) -> None:
    """Guards the turns of tenants, too: a row of weight 0 would be charged nothing finite."""
    bad = pb.OpenSession(
        prompt=common_pb2.Prompt(text="  "),
        n=5000,
        sampling=common_pb2.Sampling(temperature=-1),
        first_round_tokens=0,
        weight=weight,
    )
    error = await failure_of(answer_of(stub.Session(), 1, open=bad))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations_of(error)) == {
        "open.prompt.text",
        "open.n",
        "open.sampling.temperature",
        "open.first_round_tokens",
        "open.weight",
    }


@pytest.mark.parametrize(
    ("sequence", "command", "field"),
    [
        (2, {"extend": pb.ExtendSession(until_tokens=0)}, "extend.until_tokens"),
        (2, {"extend": pb.ExtendSession(until_tokens=21)}, "extend.until_tokens"),
        (2, {}, "command"),
        (0, {"prune": pb.PruneSession()}, "sequence"),
        # Candidate 3 lives: a fork must not replace it.
        (
            2,
            {"prune": pb.PruneSession(forks=[common_pb2.Fork(candidate_id=3, parent_id=0)])},
            "prune.forks",
        ),
    ],
)
async def test_an_invalid_command_is_refused(
    stub: Any, sequence: int, command: dict[str, Any], field: str
) -> None:
    call = stub.Session()
    await answer_of(call, 1, open=OPEN)
    error = await failure_of(answer_of(call, sequence, **command))
    assert list(violations_of(error)) == [field]


async def test_a_session_without_commands_ends_with_its_lease(generator: ToyGenerator) -> None:
    """Guards against slots that a hanging peer holds."""
    async with stub_of(generator, lease_s=0.5) as stub:
        call = stub.Session()
        await answer_of(call, 1, open=OPEN)
        error = await asyncio.wait_for(failure_of(call.read()), 20)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "SESSION_EXPIRED"
    assert generator.ledger.owned == 0


async def test_calls_are_unavailable_while_the_model_is_loading() -> None:
    async with stub_of(None) as stub:
        error = await failure_of(stub.Describe(pb.GeneratorServiceDescribeRequest()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2000"


# The toy


async def test_options_of_a_toy_are_in_its_name() -> None:
    """Guards against faults that come after the end of the toy's answers."""
    toy = load_toy("toy:step_ms=20,failing_seed=13", 1000)
    spec = SessionSpec(Prompt(text="one"), 2, Sampling(max_tokens=20), 8)
    async with toy.open(spec) as session:
        began = time.monotonic()
        await session.extend(5)
        assert time.monotonic() - began >= 5 * 0.02
    with pytest.raises(RuntimeError):
        async with toy.open(replace(spec, sampling=Sampling(max_tokens=20, seed=13))) as session:
            await session.extend(20)
    assert toy.ledger.owned == 0


@pytest.mark.parametrize("name", ["toy:step_ms=x", "toy:speed=9", "toy:failing_seed=1.5"])
def test_unknown_options_of_a_toy_are_refused(name: str) -> None:
    """Guards against misspelt options without effect."""
    assert is_toy(name)
    assert not is_toy("toys")
    with pytest.raises(FileNotFoundError, match="no such toy"):
        load_toy(name, 1000)
