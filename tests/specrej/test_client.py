"""The client against a real server: values, errors, deadlines, retries, cancellation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

import specrej
from specrej import Client, RewardClient, errors, wire
from specrej import contracts as c
from specrej.client import Options, build_request
from specrej.stack import Ports
from tests.specrej.fakes import EVENTS, GENERATION, RECORD, SERVICE, FakeOrchestrator, FakeReward

OPTIONS = Options(
    n=8,
    alpha=0.25,
    schedule=c.Schedule(kind="tokens", tokens=(8, 32)),
    algorithm=c.Algorithm.BEST_OF_N,
    rewards={"relevance": 1.0, "likelihood": 0.5},
    return_candidates=2,
    max_tokens=64,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    stop=["\n\n"],
    seed=7,
    ignore_eos=True,
    min_tokens=5,
    logprobs=True,
    model="tiny",
    cache=c.CacheControl.REFRESH,
    allow_degraded=True,
)
REQUEST = c.GenerationRequest(
    prompt=c.Prompt.from_user("why?"),
    sampling=c.Sampling(64, 0.7, 50, 0.9, ("\n\n",), 7, True, 5, True),
    selection=c.Selection(
        n=8,
        alpha=0.25,
        schedule=c.Schedule(kind="tokens", tokens=(8, 32)),
        algorithm=c.Algorithm.BEST_OF_N,
        rewards=(c.WeightedReward("relevance"), c.WeightedReward("likelihood", 0.5)),
        return_candidates=2,
    ),
    model="tiny",
    cache=c.CacheControl.REFRESH,
    allow_degraded=True,
)


def test_every_option_reaches_its_field() -> None:
    """Guards against an option that is taken and dropped, or lands in the wrong field."""
    assert build_request("why?", **OPTIONS) == wire.request_to_wire(REQUEST)
    assert OPTIONS.keys() == Options.__annotations__.keys()


def test_what_is_left_out_is_absent_on_the_wire() -> None:
    """Guards against the client's defaults shadowing the server's."""
    message = build_request("why?")
    assert message.sampling.ListFields() == []
    assert message.selection.ListFields() == []
    assert [field.name for field, _ in message.ListFields()] == ["prompt", "sampling", "selection"]


def test_rewards_may_be_values() -> None:
    """Guards the second accepted form of `rewards`."""
    named = build_request("why?", rewards={"relevance": 2.0})
    assert build_request("why?", rewards=[c.WeightedReward("relevance", 2.0)]) == named


def test_rewards_may_be_normalised_and_veto() -> None:
    """Guards against a normalisation or a veto that is taken and dropped."""
    reward = c.WeightedReward("harmless", 0.5, specrej.Normalization("fixed", 0.2, 1.1), -1.0)
    (sent,) = build_request("why?", rewards=[reward]).selection.rewards
    assert wire.weighted_from_wire(sent) == reward


@pytest.mark.parametrize(
    "prompt",
    ["why?", c.Prompt.from_user("why?"), [c.Message("user", "why?")]],
    ids=["str", "Prompt", "messages"],
)
def test_a_prompt_has_three_forms(prompt: str | c.Prompt | list[c.Message]) -> None:
    """Guards against a string being taken for a sequence of messages."""
    assert wire.prompt_from_wire(build_request(prompt).prompt) == c.Prompt.from_user("why?")


def test_raw_text_stays_raw() -> None:
    """Guards against raw text being wrapped in a chat turn."""
    assert build_request(c.Prompt(text="once")).prompt.text == "once"


@pytest.mark.parametrize(
    "options",
    [
        Options(n=2**31),
        Options(seed=2**63),
        Options(stop=["\ud800"]),
        Options(rewards=[c.WeightedReward("a", normalization=c.Normalization("bath"))]),
    ],
)
def test_what_no_message_can_hold_is_an_invalid_request(options: Options) -> None:
    """Guards against protobuf's ValueError reaching a caller who catches SpecrejError."""
    with pytest.raises(errors.InvalidRequest):
        build_request("why?", **options)


def test_an_unknown_option_is_a_type_error() -> None:
    """Guards against a misspelt option that is silently ignored."""
    with pytest.raises(TypeError, match="temprature"):
        build_request("why?", temprature=1.0)  # type: ignore[call-arg]


async def test_generate_returns_the_whole_answer(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against fields lost between the wire and the value."""
    async with Client(address) as client:
        assert await client.generate("why?", **OPTIONS) == GENERATION
    assert orchestrator.requests == [wire.request_to_wire(REQUEST)]


async def test_stream_yields_every_event_in_order(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against lost, reordered or half-converted events."""
    async with Client(address) as client:
        assert tuple([event async for event in client.stream("why?", **OPTIONS)]) == EVENTS
    assert orchestrator.requests == [wire.request_to_wire(REQUEST)]


async def test_a_stream_without_an_answer_is_an_error(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against a loop that ends as if it had been answered."""
    orchestrator.events = EVENTS[:-1]
    async with Client(address) as client:
        with pytest.raises(errors.InternalError, match="without an answer"):
            _ = [event async for event in client.stream("why?")]


async def test_describe(address: str) -> None:
    """Guards against fields lost between the wire and the value."""
    async with Client(address) as client:
        assert await client.describe() == SERVICE


async def test_a_record(address: str) -> None:
    """Guards against a record of another request, or none where there should be an error."""
    async with Client(address) as client:
        assert await client.record("r1") == RECORD
        with pytest.raises(errors.NotFound):
            await client.record("r2")


async def test_all_violations_arrive(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against an exception that tells only the status text."""
    violations = (errors.Violation("sampling.top_p", "bad"), errors.Violation("selection.n", "too"))
    orchestrator.failures = [errors.InvalidRequest(violations, metadata={"limit": "64"})] * 2
    async with Client(address) as client:
        with pytest.raises(errors.InvalidRequest) as unary:
            await client.generate("why?")
        with pytest.raises(errors.InvalidRequest) as streamed:
            _ = [event async for event in client.stream("why?")]
    for raised in (unary.value, streamed.value):
        assert raised.violations == violations
        assert raised.metadata == {"limit": "64"}
    assert len(orchestrator.requests) == 2, "a bad request is not worth a retry"


async def test_overload_is_not_retried_and_tells_the_delay(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against clients that add load to a full server."""
    orchestrator.failures = [errors.Overloaded("full", retry_after_s=0.25)]
    async with Client(address) as client:
        with pytest.raises(errors.Overloaded) as raised:
            await client.generate("why?")
    assert raised.value.retry_after_s == 0.25
    assert len(orchestrator.requests) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_unavailable_is_retried(
    address: str, orchestrator: FakeOrchestrator, streamed: bool
) -> None:
    """Guards against a service config that grpc ignores: a restart would fail every call."""
    orchestrator.failures = [errors.Unavailable("loading", retry_after_s=0.01)] * 2
    async with Client(address) as client:
        if streamed:
            assert [event async for event in client.stream("why?")][-1] == EVENTS[-1]
        else:
            assert await client.generate("why?") == GENERATION
    assert len(orchestrator.requests) == 3


async def test_no_server_is_unavailable() -> None:
    """Guards against a bare grpc error, or waiting for the deadline, when nothing listens."""
    async with Client(f"127.0.0.1:{Ports.free().orchestrator}") as client:
        with pytest.raises(errors.Unavailable):
            await client.describe(timeout_s=20)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_deadline_holds(
    address: str, orchestrator: FakeOrchestrator, streamed: bool
) -> None:
    """Guards against calls that hang with their server, and slots held for nobody."""
    orchestrator.hangs = True
    async with Client(address) as client:
        with pytest.raises(errors.DeadlineExceeded):
            if streamed:
                _ = [event async for event in client.stream("why?", timeout_s=0.3)]
            else:
                await client.generate("why?", timeout_s=0.3)
    await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_every_call_has_a_deadline(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against calls without deadlines, and a call's own deadline being ignored."""
    async with Client(address, timeout_s=50) as client:
        await client.generate("why?")
        await client.generate("why?", timeout_s=20)
        _ = [event async for event in client.stream("why?")]
    first, second, third = orchestrator.times_left
    # A little slack: grpc rounds deadlines up on their way.
    assert 30 < first < 51 and second < 21 and 30 < third < 51


async def test_leaving_a_stream_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against candidates that grow for a caller who has gone."""
    orchestrator.hangs = True
    async with Client(address) as client, aclosing(client.stream("why?")) as events:
        async for event in events:
            assert event == EVENTS[0]
            await asyncio.wait_for(orchestrator.asked.wait(), 10)
            break
        await events.aclose()
        # The channel is still open: it is the call that was cancelled.
        await asyncio.wait_for(orchestrator.cancelled.wait(), 10)


async def test_cancelling_the_caller_cancels_the_call(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    """Guards against work that goes on after its task was cancelled."""
    orchestrator.hangs = True
    async with Client(address) as client:
        asking = asyncio.ensure_future(client.generate("why?"))
        await asyncio.wait_for(orchestrator.asked.wait(), 10)
        asking.cancel()
        await asyncio.wait_for(orchestrator.cancelled.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_score_keeps_the_order(reward_address: str, reward: FakeReward) -> None:
    """Guards against scores that belong to other responses."""
    async with RewardClient(reward_address) as client:
        scores = await client.score("why?", ["a", "abc", "ab"], reward="length")
    assert scores == c.Scores((1.0, 3.0, 2.0), 7)
    assert not reward.requests[-1].unfinished
    async with RewardClient(reward_address) as client:
        await client.score("why?", ["a"], unfinished=True)
    assert reward.requests[-1].unfinished
    assert reward.requests[0].reward == "length"
    assert wire.prompt_from_wire(reward.requests[0].prompt) == c.Prompt.from_user("why?")


async def test_rewards_are_described(reward_address: str) -> None:
    """Guards against fields lost between the wire and the value."""
    async with RewardClient(reward_address) as client:
        assert await client.describe() == (c.RewardDescription("length", "f", "len", max_batch=8),)


def test_every_public_name_resolves() -> None:
    """Guards against a name in __all__ that the lazy import does not know."""
    assert all(getattr(specrej, name) for name in specrej.__all__)
    with pytest.raises(AttributeError, match="Cleint"):
        specrej.Cleint  # noqa: B018
