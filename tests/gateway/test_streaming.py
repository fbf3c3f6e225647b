"""The parts of a stream of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.completions import Answer
from gateway.streaming import _part
from tests.gateway.gateways import CHAT, STREAM, gateway_at, whole_reply
from tests.specrej.fakes import GENERATION, ONE, FakeOrchestrator


def test_a_part_has_the_same_lines_for_every_client() -> None:
    """Guards against clients for which U+2028, U+2029 or U+0085 in a text ends the line."""
    text = "one\u2028two\u2029three\u0085four\nfive"
    name, data, *end = _part({"text": text}, "finished").decode().splitlines()
    assert (name, end) == ("event: finished", [""])
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def test_no_text_is_sent_twice() -> None:
    """Guards against a whole second text where the first one's last bytes became invalid."""
    answer = Answer("toy", 1, is_chat=True, logprobs=False)
    assert [*answer.delta("r", "the be\u2019")]
    rest, _ = answer.closing("r", ONE, include_usage=False)
    assert rest["choices"][0]["delta"] == {"content": "st"}


def test_the_usage_counts_all_choices() -> None:
    answer = Answer("toy", 2, is_chat=True, logprobs=False)
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    assert answer.whole(GENERATION)["usage"] == usage


@pytest.mark.parametrize(
    ("body", "is_sent"),
    [({}, True), ({"logprobs": True}, False), ({"n": 2, "specrej": {"n": 4}}, False)],
)
async def test_text_is_requested_where_it_is_sent(
    orchestrator: FakeOrchestrator, address: str, body: dict[str, Any], is_sent: bool
) -> None:
    """Guards against a run that stops after each token for text that only comes at the end."""
    async with gateway_at(address) as server:
        for path in (CHAT, "/v1/specrej/stream"):
            await whole_reply(server.port, path, {**STREAM, **body})
    assert [stream.text_deltas for stream in orchestrator.streams] == [is_sent, True]
