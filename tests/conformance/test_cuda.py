"""Rewards on CUDA against the processor, with growing texts and cuts: `make gpu-check`.

The own engine on CUDA is a subject of the suite where there is CUDA (subjects.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reward_service.reward import score_batch
from tests.reward_service import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")

_WORDS = ["Mix", "flour", "and", "yeast,", "then", "wait:", "né", "面包", "🍞", "twice."]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_causal_rewards_score_as_on_the_processor(tmp_path: Path, family: str) -> None:
    tiny.save(tmp_path, tiny.make_config(family, None))
    assert _largest_difference("classifier", tmp_path) < 1e-3


def test_relevance_is_as_on_the_processor() -> None:
    assert _largest_difference("relevance", tiny.MINILM) < 1e-3


def _largest_difference(kind: str, directory: Path) -> float:
    here, there = (_scores(kind, directory, device) for device in ("cpu", "cuda"))
    assert max(here) - min(here) > 0.1
    return max(abs(a - b) for a, b in zip(here, there, strict=True))


def _scores(kind: str, directory: Path, device: str) -> list[float]:
    """Of six texts that grow over four rounds, in which two are rejected."""
    reward = tiny.load(kind, directory, device=device, token_budget=100)
    session: Any = reward.open(tiny.PROMPT)
    return [
        value
        for texts in _rounds()
        for value in score_batch(session, reward, tiny.batch(texts)).values
    ]


def _rounds() -> Iterator[dict[int, str]]:
    for number in range(1, 5):
        rows = range(6 if number < 3 else 4)
        yield {row: " ".join(_WORDS[row % 3 : row % 3 + number * (1 + row % 2)]) for row in rows}
