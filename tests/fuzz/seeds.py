"""What fuzzing begins with, by target: whole, right examples, so that what it makes of them gets
deep; and what it found, as it was found.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter

from orchestrator import family
from orchestrator.envelope import Envelope
from orchestrator.keys import FORMAT_VERSION
from specrej import contracts as c
from specrej import wire
from specrej.client import build_request
from specrej.errors import InvalidRequest, Overloaded, SpecrejError, Violation
from specrej.security import Role, new_token
from specrej.status import to_status

_GENERATION = c.Generation(
    candidates=(c.RankedCandidate(1, "text", 0.5, c.FinishReason.STOP, 1, -1.0),),
    rounds=(),
    usage=c.Usage(1, 2, 1, 0, 0, 4),
    timings=c.Timings(),
    n=2,
)
_ENVELOPE = Envelope(FORMAT_VERSION, "k", "f", 1, 1.0, _GENERATION)
_COMPOSITE = {
    "name": "balanced",
    "rewards": [
        {"name": "a", "normalization": {"kind": "fixed", "mean": 0.2, "deviation": 1.1}},
        {"name": "b", "weight": 0.5, "normalization": {"kind": "batch"}, "veto_below": -1},
    ],
}
_REWARDS = [
    {"name": "toy", "kind": "toy"},
    {"name": "f", "kind": "function", "function": "a:b"},
    {"name": "h", "kind": "http", "url": "http://a/", "headers": {"x": "y"}},
    {"name": "g", "kind": "grpc", "address": "a:1"},
]
# Python's parser of JSON recurses, and its error is no ValueError.
_DEEP = b"[" * 3_000


def seeds() -> Mapping[str, Sequence[bytes]]:
    """By the names of the targets."""
    schedules = [
        c.Schedule("tokens", (16, 32)),
        c.Schedule("geometric", first=8, factor=2.0),
        c.Schedule(),
    ]
    requests = [
        build_request("Hello?", seed=3, n=8, schedule=schedule, rewards={"a": 1.0, "b": 2.0})
        for schedule in schedules
    ]
    told = [{"kind": each.kind, "tokens": each.tokens, "first": each.first} for each in schedules]
    generation = wire.generation_to_wire(_GENERATION).SerializeToString()
    event = wire.event_to_wire(c.Finished(_GENERATION)).SerializeToString()
    packed = TypeAdapter(Envelope).dump_json(_ENVELOPE)
    line = new_token("team", [Role.GENERATE, Role.GATEWAY])[1]
    return {
        "request": [message.SerializeToString() for message in requests],
        "messages": [bytes([5]) + generation, bytes([6]) + event],
        "stored_value": [packed, zlib.compress(packed)],
        "family_index": [family.packed(family.member_of(_ENVELOPE))],
        "composites": [json.dumps([_COMPOSITE]).encode()],
        "schedule": [json.dumps(each).encode() for each in told],
        "rewards": [json.dumps(_REWARDS).encode()],
        "prompts": [b"# none\nWhy?\n\xc3\xa9\r\n"],
        "tokens": [f"# a comment\n{line}\n".encode(), _DEEP],
        "token": [b"abc-._~+/=\n"],
        "http_scores": [b'{"scores": [1, -0.5e3, NaN]}', b'{"scores": [1e400, 1', _DEEP],
        "status_details": [
            _details(7, Overloaded("full", retry_after_s=2)),
            _details(2, InvalidRequest([Violation("n", "must be 1")])),
            b"\x07\xff\xff",
        ],
    }


def _details(code: int, error: SpecrejError) -> bytes:
    trailers = to_status(error)[2]
    details = trailers[-1][1]
    assert isinstance(details, bytes)
    return bytes([code]) + details
