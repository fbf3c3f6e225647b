"""A foreign reward service that violates the protocol over real gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrej.backend.v1 import reward_pb2 as pb
from specrej.server.serving import Context
from tests.specrej.fakes import FakeReward

# By fault: how the answer's number differs from that of its batch, and the answer's fields.
_FAULTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "wrong_ids": (-1, {"scores": pb.BatchScores(scores=[0.0] * 2)}),
    "no_scores": (0, {}),
    "stale": (0, {"stale": pb.StaleScoring()}),
}


class Rogue(FakeReward):
    """Its answers to batches of two have the fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._offset, self._fields = _FAULTS[fault]

    async def ScoreSession(  # type: ignore[override]  # noqa: N802
        self, requests: Any, context: Context
    ) -> None:
        number = (await anext(requests)).sequence
        opened = pb.ScoringOpened(fingerprint="f")
        await context.write(pb.ScoreSessionResponse(sequence=number, opened=opened))
        number = (await anext(requests)).sequence + self._offset
        await context.write(pb.ScoreSessionResponse(sequence=number, **self._fields))
        await anext(requests, None)
