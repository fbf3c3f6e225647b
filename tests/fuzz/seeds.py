"""Initial inputs of each target: complete, valid examples, and the inputs of past findings."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from specrej import contracts as c
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.client.client import build_request
from specrej.security import Role, new_token
from specrej.v1 import common_pb2
from tests.fuzz.targets import BETWEEN

_GENERATION = c.Generation(
    candidates=(c.RankedCandidate(1, "text", 0.5, c.FinishReason.STOP, 1, -1.0),),
    rounds=(),
    usage=c.Usage(1, 2, 1, 0, 0, 4),
    timings=c.Timings(),
    n=2,
)
_PROMPT = common_pb2.Prompt(text="hello")
_OPEN = generator_pb2.OpenSession(
    prompt=_PROMPT, n=4, sampling=common_pb2.Sampling(max_tokens=8), first_round_tokens=2
)
_SPECREJ = {
    "n": 16,
    "alpha": 0.5,
    "schedule": {"kind": "tokens", "tokens": [16, 32]},
    "branching": {"width": 8, "keep": 2, "taper": 0.5},
    "rewards": {"a": 1.0},
    "cache": "use",
    "timeout_s": 3.5,
}
_BODIES = [
    {
        "model": "specrej",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
        "logit_bias": {"7": -1},
        "specrej": _SPECREJ,
    },
    {"model": "a", "prompt": ["Why?"], "logprobs": 2, "stop": "\n", "seed": 7, "temperature": 0.7},
]
# Python's JSON parser recurses, and RecursionError is not a ValueError.
_DEEP = b"[" * 3_000


def seeds() -> Mapping[str, Sequence[bytes]]:
    """Return the inputs by target."""
    schedules: list[c.Schedule] = [
        c.Schedule("tokens", tokens=(16, 32)),
        c.Schedule(first=8, factor=2.0),
        c.Schedule(),
    ]
    requests = [
        build_request("Hello?", seed=3, n=8, schedule=schedule, rewards={"a": 1.0, "b": 2.0})
        for schedule in schedules
    ]
    packed = TypeAdapter(tuple[c.Generation]).dump_json((_GENERATION,))
    line = new_token("team", [Role.GENERATE, Role.GATEWAY])[1]
    return {
        "request": [message.SerializeToString() for message in requests],
        "gateway_request": [json.dumps(body).encode() for body in _BODIES],
        "stored_value": [packed, zlib.compress(packed)],
        "tokens": [f"# a comment\n{line}\n".encode(), _DEEP],
        "generator_port": [
            _messages(
                generator_pb2.SessionRequest(sequence=1, open=_OPEN),
                generator_pb2.SessionRequest(
                    sequence=2, extend=generator_pb2.ExtendSession(until_tokens=4)
                ),
                generator_pb2.SessionRequest(
                    sequence=3, prune=generator_pb2.PruneSession(keep=[0, 2])
                ),
                generator_pb2.SessionRequest(sequence=4, close=generator_pb2.CloseSession()),
            )
        ],
        "reward_port": [
            _messages(
                reward_pb2.ScoreSessionRequest(
                    sequence=1, open=reward_pb2.OpenScoring(prompt=_PROMPT)
                ),
                reward_pb2.ScoreSessionRequest(
                    sequence=2,
                    batch=reward_pb2.ScoreBatch(
                        candidates=[reward_pb2.ScoreCandidate(candidate_id=1, text="a")]
                    ),
                ),
            )
        ],
    }


def _messages(*messages: Any) -> bytes:
    return BETWEEN.join(message.SerializeToString() for message in messages)
