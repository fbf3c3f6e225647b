"""What is counted when two engines are compared."""

from __future__ import annotations

import pytest

from benchmarks.backends import Case, geometric


@pytest.mark.parametrize(
    ("new_tokens", "expected"),
    [(8, (8,)), (16, (16,)), (17, (16, 17)), (64, (16, 32, 64)), (100, (16, 32, 64, 100))],
)
def test_decision_tokens_double_up_to_the_end(new_tokens: int, expected: tuple[int, ...]) -> None:
    assert geometric(new_tokens) == expected


def test_tokens_that_were_never_made_do_not_count() -> None:
    assert Case("whole", 16, (64,)).num_tokens == 16 * 64
    assert Case("rounds", 16, (16, 32, 64)).num_tokens == 16 * 16 + 8 * 16 + 4 * 32
    assert Case("rounds", 1, (16, 32)).num_tokens == 32
