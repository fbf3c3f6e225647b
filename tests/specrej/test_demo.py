"""What the demo says of an answer; the demo itself is an end-to-end test."""

from __future__ import annotations

import io

from rich.console import Console

from specrej.demo import show_answer
from tests.specrej.fakes import GENERATION


def test_the_answer_is_shown_with_its_cost() -> None:
    """Guards against a comparison with the wrong number, or a phase that is left out."""
    out = io.StringIO()
    show_answer(GENERATION, Console(file=out, width=60))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]
    assert lines == [
        "the best",
        "reward 0.500, the best of 8 candidates",
        "tokens 1,000 made",
        "best-of-8 about 2,500 (\N{MINUS SIGN}60%)",
        "time 2.00 s: waiting 0.00 s, making tokens 1.90 s, scoring 0.05 s, pruning 0.00 s",
    ]
