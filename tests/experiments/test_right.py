"""Recorded candidates answer as the generator that made them."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.recorded import Answer, RecordedGenerator
from generator_service.toy import ToyGenerator
from specrej.contracts import Algorithm, ConfidenceCut, Generation, Vote
from tests.orchestrator.runs import FixedScorer, answer, request

N = 8
LOGPROBS = {"logprobs": True, "top_logprobs": 5, "seed": 3}


async def recorded() -> RecordedGenerator:
    """All candidates of a toy."""
    asking = request(n=N, sampling=LOGPROBS, algorithm=Algorithm.BEST_OF_N)
    whole = await answer(asking, ToyGenerator(), FixedScorer())
    ranked = sorted(whole.candidates, key=lambda one: one.id)
    return RecordedGenerator([Answer.from_json(Answer.of(one).to_json()) for one in ranked])


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"algorithm": Algorithm.BEST_OF_N},
        {"alpha": 0.0, "waves": 2, "stop_at": 200.0},
        {"waves": 3, "first": 3},
        {"alpha": 0.0, "vote": Vote(stop_probability=0.7), "waves": 2},
        {"alpha": 0.0, "waves": 4, "confidence_cut": ConfidenceCut(0.5, 8)},
    ],
)
async def test_a_replay_is_what_the_service_would_answer(policy: dict[str, Any]) -> None:
    def extract(text: str) -> str:
        return text.split()[-1]

    async def made(generator: Any) -> Generation:
        asking = request(n=N, sampling={"seed": 3}, **policy)
        return await answer(asking, generator, FixedScorer(), extract=extract)

    live, replayed = await made(ToyGenerator()), await made(await recorded())
    for part in ("stopped_by", "votes", "num_begun"):
        assert getattr(live, part) == getattr(replayed, part)
    assert [c.id for c in live.candidates] == [c.id for c in replayed.candidates]
    assert [c.text for c in live.candidates] == [c.text for c in replayed.candidates]
    assert live.usage.generated_tokens == replayed.usage.generated_tokens
    rounds = [
        [(t.wave, t.is_check, t.decision_token, t.num_live) for t in one.rounds]
        for one in (live, replayed)
    ]
    assert rounds[0] == rounds[1]
