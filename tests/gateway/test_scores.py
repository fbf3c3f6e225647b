"""/v1/score and /v1/rerank, and what an answer says about verifiers, votes and stops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from gateway.__main__ import Server
from specrej import contracts as c
from specrej.contracts import errors, wire
from tests.gateway.gateways import BODY, CHAT, STREAM, post, whole_reply
from tests.images import image_part
from tests.specrej.fakes import EVENTS, GENERATION, FakeOrchestrator

SCORE, RERANK = "/v1/score", "/v1/rerank"
WHY = {"role": "user", "content": "why?"}
CHAT_BODY = {"messages": [WHY], "text_2": "b"}
VERIFIER = {"name": "answer", "data": {"answer": ["4", None]}}


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({"text_1": "why?", "text_2": ["a", "abc"]}, {"why?": ["a", "abc"]}),
        ({"queries": "why?", "documents": "ab"}, {"why?": ["ab"]}),
        ({"data_1": ["p", "q"], "data_2": ["a", "ab"]}, {"p": ["a"], "q": ["ab"]}),
        ({"messages": [WHY], "items": ["a"]}, {"why?": ["a"]}),
    ],
)
async def test_scores_in_the_forms_of_vllm(
    gateway: Server, orchestrator: FakeOrchestrator, body: Any, calls: dict[str, list[str]]
) -> None:
    """Guards against scores of other pairs, and fields that are dropped without a word."""
    more = {"model": "length", "data": {"answer": 4}, "unfinished": True, "truncate": 3}
    status, headers, reply = await post(gateway.port, SCORE, {**body, **more})
    assert status == 200 and headers["x-specrej-ignored"] == "truncate"
    values = [float(len(text)) for texts in calls.values() for text in texts]
    data = [{"index": n, "object": "score", "score": value} for n, value in enumerate(values)]
    assert (reply["object"], reply["model"], reply["data"]) == ("list", "length", data)
    usage = reply["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 7 * len(calls)
    sent = orchestrator.scored
    assert {one.prompt.messages[0].content: [*one.responses] for one in sent} == calls
    assert {(s.reward, s.data, s.unfinished) for s in sent} == {("length", '{"answer":4}', True)}


async def test_answers_are_ranked(gateway: Server) -> None:
    """Guards against indices of another order, and equal scores in another one."""
    body = {"query": "why?", "documents": ["a", {"text": "abc"}, "b"]}
    status, _, reply = await post(gateway.port, RERANK, body)
    assert (status, reply["model"], reply["usage"]["total_tokens"]) == (200, "length", 7)
    found = [(r["index"], r["relevance_score"], r["document"]["text"]) for r in reply["results"]]
    assert found == [(1, 3.0, "abc"), (0, 1.0, "a"), (2, 1.0, "b")]
    _, _, reply = await post(gateway.port, RERANK, {**body, "top_n": 1, "return_documents": False})
    assert reply["results"] == [{"index": 1, "relevance_score": 3.0}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_2": "a"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE, {"text_1": ["a"] * 17, "text_2": ["c"] * 17}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": 3}, "text_2"),
        (SCORE, {"messages": [{**WHY, "content": [image_part(b"a")]}], "text_2": "a"}, "messages"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
async def test_bodies_that_cannot_be_scored(
    gateway: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, reply = await post(gateway.port, path, body)
    assert (status, reply["error"]["param"].partition("[")[0]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "field", "param"),
    [
        (SCORE, {"text_1": "a", "text_2": "b"}, "responses[1]", "text_2[1]"),
        (SCORE, CHAT_BODY, "prompt.messages[0].parts[1]", "messages[0].content[1]"),
        (SCORE, CHAT_BODY, "prompt", "messages"),
        (RERANK, {"query": "a", "documents": ["b"]}, "prompt.messages[0].content", "query"),
    ],
)
async def test_errors_of_scores_have_the_callers_field(
    gateway: Server, orchestrator: FakeOrchestrator, path: str, body: Any, field: str, param: str
) -> None:
    invalid = errors.InvalidRequest([errors.Violation(field, "is bad")])
    unknown = errors.NotFound('unknown reward "x"', metadata={"field": "reward"})
    orchestrator.failures = [invalid, unknown]
    status, _, reply = await post(gateway.port, path, body)
    assert (status, reply["error"]["param"]) == (400, param)
    status, _, reply = await post(gateway.port, path, body)
    error = reply["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_data_stages_and_stops_arrive(
    gateway: Server, orchestrator: FakeOrchestrator
) -> None:
    """Guards against data that is not JSON any more, and presets that name no verifier."""
    rewards = [VERIFIER, {"name": "judge", "stage": "end", "data": "[1]"}]
    options = {"stop_at": 0.5, "waves": 2, "first": 3, "rewards": rewards}
    more = {"vote": {"extractor": "boxed"}, "confidence_cut": {"keep": 0.5, "window": 8}}
    await post(gateway.port, CHAT, {**BODY, "specrej": {**options, **more}})
    for vote in ({"extractor": "regex", "argument": "a"}, None):
        await post(gateway.port, CHAT, {**BODY, "model": "toy:vote-16", "specrej": {"vote": vote}})
    verified = {**BODY, "model": "toy:verify-16"}
    status, _, reply = await post(gateway.port, CHAT, verified)
    assert (status, reply["error"]["param"]) == (400, "specrej.rewards")
    assert "verifier" in reply["error"]["message"]
    for choices in (1, 5):
        verified |= {"n": choices, "specrej": {"rewards": [VERIFIER]}}
        await post(gateway.port, CHAT, verified)
    own, voting, usual, verify, several = (
        wire.request_from_message(sent, []).selection for sent in orchestrator.requests
    )
    assert own.rewards == (
        c.WeightedReward("answer", data='{"answer":["4",null]}'),
        c.WeightedReward("judge", stage="end", data="[1]"),
    )
    assert (own.stop_at, own.waves, own.first) == (0.5, 2, 3)
    assert (own.vote, own.confidence_cut) == (c.Vote("boxed"), c.ConfidenceCut(0.5, 8))
    assert (voting.n, voting.vote, usual.vote) == (16, c.Vote("regex", "a"), c.Vote("number"))
    assert (verify.n, verify.waves, verify.stop_at) == (16, 4, 1.0)
    assert several.waves == 0, "five choices are more than the preset's first wave"


@pytest.mark.parametrize(
    "changes", [{}, {"score": 0.75}, {"finish": c.FinishReason.LENGTH}, {"vetoed": True}]
)
async def test_an_answer_says_whether_it_is_verified(
    gateway: Server, orchestrator: FakeOrchestrator, changes: dict[str, Any]
) -> None:
    """Guards against a truncated or vetoed text as a verified one, and NaN in JSON."""
    is_verified = not changes
    best = replace(GENERATION.best, score=1.0, rewards=(1.0, math.nan), vote="4")
    votes = (c.VoteShare("4", 1.0, 2),)
    made = replace(GENERATION, candidates=(replace(best, **changes),), votes=votes, num_begun=4)
    made = replace(made, stopped_by=c.StopReason.SCORE, num_distinct=1)
    orchestrator.answer, orchestrator.events = made, (EVENTS[0], c.Finished(made))
    body = {**BODY, "specrej": {"rewards": [VERIFIER], "stop_at": 1.0}}
    _, headers, reply = await post(gateway.port, CHAT, body)
    about = reply["specrej"]
    assert headers["x-specrej-stopped-by"] == about["stopped_by"] == "score"
    assert headers["x-specrej-verified"] == str(is_verified).lower()
    assert about["verified"] is is_verified
    assert about["votes"] == [{"answer": "4", "share": 1.0, "count": 2}]
    assert (about["num_distinct"], about["num_begun"], about["vote"]) == (1, 4, "4")
    streamed = await whole_reply(gateway.port, "/v1/specrej/stream", {**STREAM, **body})
    event = json.loads(streamed.decode().rpartition("event: finished\ndata: ")[2].split("\n")[0])
    assert event["candidates"][0]["rewards"] == [1.0, None]
    orchestrator.answer = replace(made, stopped_by=None, degradations=(c.Degradation.REWARD,))
    _, headers, reply = await post(gateway.port, CHAT, body)
    assert reply["specrej"]["verified"] is False and "x-specrej-stopped-by" not in headers
    _, headers, reply = await post(gateway.port, CHAT, BODY)
    assert "verified" not in reply["specrej"] and "x-specrej-verified" not in headers
