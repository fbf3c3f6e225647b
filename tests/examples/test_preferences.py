"""Preference pairs: which candidates become one, and the file that TRL reads."""

from __future__ import annotations

import pytest

from examples.preferences.preferences import pair_of
from specrej import FinishReason, RankedCandidate

pytestmark = pytest.mark.asyncio(loop_scope="session")

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def candidate(text: str, score: float, finish: FinishReason = STOP) -> RankedCandidate:
    return RankedCandidate(0, text, score, finish, num_tokens=1, mean_logprob=0.0)


async def test_a_pair_is_the_best_and_the_worst_complete_answer() -> None:
    """Guards against pairs of length: cut off and empty answers have the extreme scores here."""
    candidates = (
        candidate("good", 0.8),
        candidate("fair", 0.5),
        candidate("bad", 0.2),
        candidate("cut", 0.9, LENGTH),
        candidate("short", 0.1, LENGTH),
        candidate(" ", 0.0),
    )
    pair = pair_of("why?", candidates, min_margin=0.5)
    assert pair == {
        "prompt": [{"role": "user", "content": "why?"}],
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": "bad"}],
        "score_chosen": 0.8,
        "score_rejected": 0.2,
    }
