"""Contract values survive the wire; unknown enum numbers are reported with their field path."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from specrej import contracts as c
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.contracts import wire
from specrej.contracts.errors import Violation
from specrej.v1 import orchestrator_pb2 as pb
from tests.specrej.fakes import GENERATION

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TIMES = st.integers(0, 2**32).map(float)
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    int: INT32,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=5),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}
LONG = {
    *("seed", "capacity", "owned", "session", "cached", "slot_bytes"),
    *("session_slots", "freed_slots", "capacity_slots"),
    *("generated_tokens", "reward_tokens", "best_of_n_tokens_estimate"),
}
# Fields that are not sent.
LOCAL: dict[type, set[str]] = {
    c.Finished: {"source"},
    **{kind: {"kind"} for kind in (c.JsonSchema, c.Regex, c.Grammar, c.JsonObject)},
}


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """All values of a type; of a dataclass, every field that is sent is drawn."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    inner = [values(arg, name) for arg in get_args(hint) if arg not in (NoneType, ...)]
    if ... in get_args(hint):
        return st.lists(inner[0], max_size=3).map(tuple)
    if inner:
        return st.one_of(inner) | (st.none() if NoneType in get_args(hint) else st.nothing())
    if hint is int and name in LONG:
        return INT64
    if hint is float and name.endswith("_ms"):
        return TIMES
    if hint in SCALARS:
        return SCALARS[hint]
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints, local = get_type_hints(hint), LOCAL.get(hint, set())
    sent_fields = [item.name for item in fields(hint) if item.name not in local]
    return st.builds(hint, **{name: values(hints[name], name) for name in sent_fields})


REQUESTS: st.SearchStrategy[c.GenerationRequest] = values(c.GenerationRequest)


def has_answer(event: c.Event) -> bool:
    return not isinstance(event, c.Finished) or bool(event.generation.candidates)


def sent(message: Message) -> Any:
    """The message as the peer parses it."""
    return type(message).FromString(message.SerializeToString())


@given(REQUESTS)
def test_request_survives_the_wire(request: c.GenerationRequest) -> None:
    """Guards against a field lost, swapped or narrowed on its way to the server."""
    violations: list[Violation] = []
    message = sent(wire.to_message(request, pb.GenerateRequest))
    assert wire.request_from_message(message, violations) == request
    assert violations == []


@given(values(c.Event).filter(has_answer))
def test_event_survives_the_wire(event: c.Event) -> None:
    """Guards against a field lost, swapped or narrowed on its way to the caller."""
    assert wire.event_from_message(sent(wire.event_to_message(event))) == event


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (c.Round, generator_pb2.PrefixBatch),
        (c.ServiceDescription, pb.OrchestratorServiceDescribeResponse),
        (c.RewardDescription, reward_pb2.RewardDescription),
    ],
)
@given(data=st.data())
def test_value_survives_the_wire(
    contract: type, message: type[Message], data: st.DataObject
) -> None:
    """Guards against logprobs of other tokens."""
    value = data.draw(values(contract))
    assert wire.from_message(sent(wire.to_message(value, message)), contract) == value


def test_absent_fields_have_the_defaults_of_the_contract() -> None:
    """Guards against zero in place of a default: max_tokens 0, alpha 0."""
    request = wire.request_from_message(pb.GenerateRequest(), [])
    assert request == c.GenerationRequest(c.Prompt())


def test_explicit_zero_is_not_absent() -> None:
    """Guards against `alpha=0`, `temperature=0` and `veto_below=0` read as absent."""
    message = pb.GenerateRequest()
    message.selection.rewards.add(name="r", veto_below=0)
    message.selection.alpha = message.sampling.temperature = 0
    message.selection.n = 0
    request = wire.request_from_message(sent(message), [])
    assert (request.selection.alpha, request.sampling.temperature) == (0, 0)
    assert request.absent == ("schedule", "prefer_complete", "max_tokens"), "alpha is there"
    assert request.selection.n == 0
    assert request.selection.rewards == (c.WeightedReward("r", veto_below=0.0),)


def test_absent_values_of_rewards_stay_absent() -> None:
    """Guards against a veto of 0 that nobody asked for."""
    message = pb.WeightedReward(name="r", normalization=pb.Normalization())
    assert wire.from_message(message, c.WeightedReward) == c.WeightedReward("r")


def test_unknown_enum_numbers_are_violations() -> None:
    """Guards against a newer client's choice served as another one."""
    # Fields: selection (4) with algorithm (4) = 99, and cache_control (5) = 99.
    message = pb.GenerateRequest.FromString(b"\x22\x02\x20\x63\x28\x63")
    violations: list[Violation] = []
    request = wire.request_from_message(message, violations)
    assert violations == [
        Violation("selection.algorithm", "unknown value 99"),
        Violation("cache_control", "unknown value 99"),
    ]
    assert request.selection.algorithm == c.Selection().algorithm
    assert request.cache == c.CacheControl.USE


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_enum_number_without_default_raises(number: int) -> None:
    """Guards against a round that ended for a reason this version does not have."""
    message = generator_pb2.PrefixBatch.FromString(bytes((0x10, number)))
    with pytest.raises(ValueError, match=f"ended_by: unknown value {number}"):
        wire.from_message(message, c.Round)


TEXTS = st.dictionaries(st.integers(0, 3), st.text("ab🙂", max_size=6), max_size=4)


@given(st.lists(st.tuples(TEXTS, st.dictionaries(st.integers(4, 6), st.integers(0, 5)))))
def test_streamed_texts_arrive_whole(rounds: list[tuple[dict[int, str], dict[int, int]]]) -> None:
    """Guards against texts joined to those of another candidate, a rejected one or a round before,
    and against text that a fork's parent has sent already."""
    sender, receiver, gauge = wire.StreamedTexts(), wire.StreamedTexts(), c.SlotGauge(1, 1, 1)
    for texts, forks in rounds:
        candidates = tuple(c.Candidate(n, text, 1, 0.0) for n, text in texts.items())
        grown = c.Round(candidates, c.RoundEnd.DECISION_TOKEN, 1, gauge, num_live=2)
        assert receiver.from_message(sent(sender.to_message(grown))) == grown
        again = sender.to_message(grown)
        assert not any(prefix.text for prefix in again.prefixes)
        sender.fork(forks)
        receiver.fork(forks)
        made = tuple(c.Candidate(n, texts.get(parent, ""), 1, 0.0) for n, parent in forks.items())
        forked = sender.to_message(replace(grown, candidates=made))
        assert not any(prefix.text for prefix in forked.prefixes)
        assert receiver.from_message(forked).candidates == made
    beyond = generator_pb2.PrefixBatch(prefixes=[generator_pb2.Prefix(text_start=99)])
    with pytest.raises(ValueError, match="text_start"):
        receiver.from_message(beyond)


def test_times_are_durations() -> None:
    """Guards against a unit mistaken by a thousand."""
    message = wire.to_message(c.Timings(total_ms=2.25), pb.Timings)
    assert message.total_duration.ToJsonString() == "0.002250s"


def test_event_without_kind_raises() -> None:
    """Guards against an empty message read as an event."""
    with pytest.raises(ValueError, match="no known kind"):
        wire.event_from_message(pb.GenerateStreamResponse())


def test_plain_json_keeps_names_and_numbers() -> None:
    """Guards against camelCase names and 64-bit integers as strings, as in protobuf's JSON."""
    plain = json.loads(json.dumps(wire.to_plain(GENERATION)))
    assert plain["usage"]["generated_tokens"] == 1000
    assert plain["finish_reason"] == "FINISH_REASON_STOP"
    assert plain["rounds"][0]["ended_by"] == "ROUND_END_DECISION_TOKEN"
    assert [ranked["score"] for ranked in plain["candidates"]] == [0.5, 0.25]
    assert (plain["text"], plain["score"], plain["cached"]) == ("the best", 0.5, False)
    assert plain["fingerprints"] == {"generator": "g", "reward": "f"}
    assert plain["timings"].keys() == {item.name for item in fields(c.Timings)}
    assert plain["timings"]["total_ms"] == GENERATION.timings.total_ms
