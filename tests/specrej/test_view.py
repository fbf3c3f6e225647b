"""A request as text: what is shown is what happened, while it runs and afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specrej import contracts as c
from specrej.client.view import plain_line, saved_text, summary_line
from tests.specrej.fakes import GENERATION, trace


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_started": 16, "num_live": 8, "num_rejected": 8},
            "round 2  candidates ████▒▒▒▒░░░░░░░░  token 32  live 16→8  best 0.412"
            "  slots 1,544 (\N{MINUS SIGN}512)  tok/s 361",
        ),
        ({"num_finished": 3, "num_rejected": 1}, "live 8→4  finished 3  best"),
        ({"num_finished": 2, "num_rejected": 2}, "candidates ██◆▒░░░░░░░░░░░░"),
        ({"freed_slots": 0, "extend_ms": 0.0}, "slots 1,544  tok/s 0"),
        ({"wave": 2, "is_check": True}, "round 2 (wave 2) (check)  candidates"),
        ({"forks": (c.Fork(8, 1),), "num_vetoed": 2}, "live 8→4 (1 forks) (2 vetoed)"),
    ],
)
def test_a_round_is_one_line(changes: dict[str, Any], text: str) -> None:
    """Guards against numbers in the wrong place, candidates that vanish without being rejected, a
    "(-0)" in the last round, and a division by a round of no time."""
    assert text in plain_line(trace(2, **changes), 32)


def test_the_summary_compares_with_best_of_n() -> None:
    """Guards against a saving computed the wrong way round, and against "-0%"."""
    assert summary_line(GENERATION) == (
        "reward 0.500, 1,000 tokens made, best-of-8 about 2,500 (\N{MINUS SIGN}60%), 2.0 s"
    )
    assert "[cached]" in summary_line(replace(GENERATION, cached=True))
    assert saved_text(replace(GENERATION.usage, best_of_n_tokens_estimate=1000)) == ""
