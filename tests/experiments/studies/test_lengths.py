"""Which answers end early."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.studies import lengths
from tests.experiments.synthetic import WALK, made_of


def test_by_hand() -> None:
    """Of one prompt's four answers three end, the best among them; none of the other's."""
    num_tokens = np.array([10, 20, 64, 6])
    scores = np.ones((4, 64)) * np.array([[3.0], [5.0], [4.0], [1.0]])
    early = made_of(scores, num_tokens, prompt_id="early")
    late = made_of(scores, np.full(4, 64), prompt_id="late")
    found = lengths.study([late, early], WALK)
    one = found.prompts[1]
    assert (one.ended_share, one.best_tokens, one.best_ended) == (0.75, 20, True)
    assert one.tokens[1] == 15
    assert one.tendency == pytest.approx(np.corrcoef(num_tokens, [3, 5, 4, 1])[0, 1])
    assert (found.mean_tokens, found.best_tokens.value) == ((64 + 25) / 2, 42)
    (table,) = found.tables()
    assert [row[0] for row in table.rows] == ["early", "late"]
    assert [row[-2] for row in table.rows] == ["yes", "no"]
