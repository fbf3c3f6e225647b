"""Contract values survive the wire; unknown numbers are reported, not guessed."""

from __future__ import annotations

import json
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrej import contracts as c
from specrej import wire
from specrej.errors import Violation
from specrej.v1 import generator_pb2, orchestrator_pb2
from tests.specrej.fakes import EVENTS, GENERATION, SERVICE

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
MESSAGES = st.lists(st.builds(c.Message, TEXT, TEXT), max_size=3).map(tuple)
PROMPTS = st.builds(c.Prompt, MESSAGES, TEXT)
SAMPLINGS = st.builds(
    c.Sampling,
    max_tokens=INT32,
    temperature=FLOAT,
    top_k=INT32,
    top_p=FLOAT,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    seed=INT64,
    ignore_eos=st.booleans(),
    min_tokens=INT32,
    logprobs=st.booleans(),
)
SCHEDULES = st.one_of(
    st.just(c.Schedule(kind="memory")),
    st.builds(c.Schedule, st.just("tokens"), tokens=st.lists(INT32, max_size=4).map(tuple)),
    st.builds(c.Schedule, st.just("geometric"), first=INT32, factor=FLOAT),
)
NORMALIZATIONS = st.one_of(
    st.just(c.Normalization()),
    st.just(c.Normalization("batch")),
    st.builds(c.Normalization, st.just("fixed"), FLOAT, FLOAT),
)
REWARDS = st.builds(c.WeightedReward, TEXT, FLOAT, NORMALIZATIONS, st.none() | FLOAT)
SELECTIONS = st.builds(
    c.Selection,
    n=INT32,
    alpha=FLOAT,
    schedule=SCHEDULES,
    algorithm=st.sampled_from(c.Algorithm),
    rewards=st.lists(REWARDS, max_size=3).map(tuple),
    return_candidates=INT32,
)
REQUESTS = st.builds(
    c.GenerationRequest, PROMPTS, SAMPLINGS, SELECTIONS, TEXT, st.sampled_from(c.CacheControl)
)
FLOATS = st.lists(FLOAT, max_size=3).map(tuple)
TOKEN_IDS = st.lists(INT32, max_size=3).map(tuple)
RANKED = st.builds(
    c.RankedCandidate,
    id=INT32,
    text=TEXT,
    score=FLOAT,
    finish=st.sampled_from(c.FinishReason),
    num_tokens=INT32,
    mean_logprob=FLOAT,
    token_ids=TOKEN_IDS,
    logprobs=FLOATS,
    rewards=FLOATS,
    vetoed=st.booleans(),
)
CANDIDATES = st.builds(
    c.Candidate,
    id=INT32,
    text=TEXT,
    num_tokens=INT32,
    logprob=st.floats(-1e9, 0),
    finish=st.none() | st.sampled_from(c.FinishReason),
    new_token_ids=TOKEN_IDS,
    new_logprobs=FLOATS,
)
ROUNDS = st.builds(
    c.Round,
    candidates=st.lists(CANDIDATES, max_size=3).map(tuple),
    ended_by=st.sampled_from(c.RoundEnd),
    num_tokens=INT32,
    slots=st.builds(c.SlotGauge, INT64, INT64, INT64, INT64),
)
COUNTS = (
    *("number", "decision_token", "num_started", "num_finished", "num_rejected", "num_live"),
    "num_vetoed",
)
SLOTS = ("session_slots", "freed_slots", "capacity_slots", "generated_tokens")
FATES = st.builds(c.CandidateTrace, INT32, FLOAT, st.sampled_from(c.Fate))
TRACES = st.builds(
    c.RoundTrace,
    **dict.fromkeys(COUNTS, INT32),
    **dict.fromkeys(SLOTS, INT64),
    **dict.fromkeys(("best_score", "extend_ms", "score_ms", "prune_ms"), FLOAT),
    ended_by=st.sampled_from(c.RoundEnd),
    scores=FLOATS,
    candidates=st.lists(FATES, max_size=3).map(tuple),
)
USAGES = st.builds(c.Usage, INT32, INT64, INT32, INT64, INT64, INT64)
RECORDS = st.builds(
    c.RequestRecord,
    **dict.fromkeys(("request_id", "outcome"), TEXT),
    **dict.fromkeys(("started_unix_s", "elapsed_ms", "score"), FLOAT),
    **dict.fromkeys(("max_tokens", "n", "prompt_tokens", "answer_id"), INT32),
    **dict.fromkeys(("queued_at_ms", "running_at_ms", "opened_at_ms"), st.none() | FLOAT),
    selection=SELECTIONS,
    rounds=st.lists(st.builds(c.RecordedRound, FLOAT, TRACES), max_size=3).map(tuple),
    source=st.none() | st.sampled_from(c.AnswerSource),
    usage=st.none() | USAGES,
    degradations=st.lists(st.sampled_from(list(c.Degradation)), unique=True).map(tuple),
    hurried=st.booleans(),
)
GENERATIONS = st.builds(
    c.Generation,
    candidates=st.lists(RANKED, min_size=1, max_size=3).map(tuple),
    rounds=st.lists(TRACES, max_size=3).map(tuple),
    usage=USAGES,
    timings=st.builds(c.Timings, *[FLOAT] * 7),
    n=INT32,
    request_id=TEXT,
    generator_fingerprint=TEXT,
    reward_fingerprint=TEXT,
    cached=st.booleans(),
    degradations=st.lists(st.sampled_from(list(c.Degradation)), unique=True).map(tuple),
    hurried=st.booleans(),
)
EVENT_VALUES = st.one_of(
    st.builds(c.Admitted, INT32, INT32, TEXT),
    st.builds(c.RoundCompleted, TRACES, st.lists(INT32, max_size=3).map(tuple), TEXT),
    st.builds(c.Finished, GENERATIONS),
)

M = TypeVar(
    "M",
    generator_pb2.PrefixBatch,
    orchestrator_pb2.GenerateRequest,
    orchestrator_pb2.GenerateStreamResponse,
    orchestrator_pb2.RequestRecord,
    orchestrator_pb2.WeightedReward,
)


def sent(message: M) -> M:
    """As the other side reads it."""
    return type(message).FromString(message.SerializeToString())


@given(REQUESTS)
def test_a_request_survives(request: c.GenerationRequest) -> None:
    """Guards against a field lost, swapped or narrowed on its way to the server."""
    violations: list[Violation] = []
    message = sent(wire.request_to_wire(request))
    assert wire.request_from_wire(message, c.Schedule(kind="memory"), violations) == request
    assert violations == []


@given(EVENT_VALUES)
def test_an_event_survives(event: c.Event) -> None:
    """Guards against a field lost, swapped or narrowed on its way to the caller."""
    assert wire.event_from_wire(sent(wire.event_to_wire(event))) == event


@given(RECORDS)
def test_a_record_survives(record: c.RequestRecord) -> None:
    """Guards against moments that have not come read as 0 ms, and fates of other candidates."""
    assert wire.record_from_wire(sent(wire.record_to_wire(record))) == record


@given(ROUNDS)
def test_a_round_survives(ended: c.Round) -> None:
    """Guards against logprobs of other tokens, and cached slots taken for owned ones."""
    assert wire.round_from_wire(sent(wire.round_to_wire(ended))) == ended


def test_absent_fields_get_the_contracts_defaults() -> None:
    """Guards against zero standing in for a default: max_tokens 0, alpha 0."""
    request = wire.request_from_wire(orchestrator_pb2.GenerateRequest(), c.Schedule(first=9), [])
    assert request.sampling == c.Sampling()
    assert request.selection == c.Selection(schedule=c.Schedule(first=9))
    assert request.cache is c.CacheControl.USE


def test_an_explicit_zero_is_not_absent() -> None:
    """Guards against `alpha=0` and `temperature=0` turning into the defaults."""
    message = orchestrator_pb2.GenerateRequest()
    message.selection.alpha = 0
    message.sampling.temperature = 0
    request = wire.request_from_wire(sent(message), c.Schedule(), [])
    assert (request.selection.alpha, request.sampling.temperature) == (0, 0)


def test_a_veto_at_0_is_not_absent() -> None:
    """Guards against `veto_below=0`, the likeliest threshold, turning into no veto."""
    reward = c.WeightedReward("r", veto_below=0.0)
    assert wire.weighted_from_wire(sent(wire.weighted_to_wire(reward))) == reward
    bare = orchestrator_pb2.WeightedReward(name="r")
    assert wire.weighted_from_wire(bare) == c.WeightedReward("r")
    assert wire.weighted_to_wire(c.WeightedReward("r")).ListFields()[1:] == [
        (orchestrator_pb2.WeightedReward.DESCRIPTOR.fields_by_name["weight"], 1.0)
    ]


def test_a_normalization_of_no_kind_is_none() -> None:
    """Guards against an empty message read as one with a deviation of 0."""
    message = orchestrator_pb2.Normalization()
    assert wire.normalization_from_wire(message) == c.Normalization()


def test_an_unknown_normalization_is_not_sent() -> None:
    """Guards against a typing mistake in its kind that the server would never hear of."""
    with pytest.raises(ValueError, match="bath"):
        wire.normalization_to_wire(c.Normalization("bath"))


def test_unknown_enum_numbers_are_violations() -> None:
    """Guards against a newer client's choice being served as something else."""
    message = orchestrator_pb2.GenerateRequest()
    # A typed client cannot say it; a newer one can.
    message.MergeFromString(b"\x22\x02\x20\x63\x28\x63")
    violations: list[Violation] = []
    wire.request_from_wire(message, c.Schedule(), violations)
    assert [violation.field for violation in violations] == ["selection.algorithm", "cache_control"]


def test_an_event_of_no_kind_is_refused() -> None:
    """Guards against an empty message being taken for an event."""
    with pytest.raises(ValueError, match="no known kind"):
        wire.event_from_wire(orchestrator_pb2.GenerateStreamResponse())


def test_the_service_description_survives() -> None:
    """Guards against fields lost in `describe`."""
    assert wire.service_from_wire(wire.service_to_wire(SERVICE)) == SERVICE


def test_plain_json_keeps_names_and_numbers() -> None:
    """Guards against camelCase names and 64-bit integers as strings, as protobuf's JSON has."""
    plain = json.loads(json.dumps(wire.to_plain(wire.generation_to_wire(GENERATION))))
    assert plain["usage"]["generated_tokens"] == 1000
    assert plain["finish_reason"] == "FINISH_REASON_STOP"
    assert plain["rounds"][0]["ended_by"] == "ROUND_END_DECISION_TOKEN"
    assert [ranked["score"] for ranked in plain["candidates"]] == [0.5, 0.25]
    assert plain["cached"] is False


def test_plain_json_leaves_out_what_is_absent() -> None:
    """Guards against defaults invented by the printer, of which only one kind can be set."""
    plain = wire.to_plain(wire.event_to_wire(EVENTS[0]))
    assert plain == {"admitted": {"request_id": "r1", "n": 8, "prompt_tokens": 9}}
