"""Compiled exponentials and softmax columns against numpy in double precision; kept code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np

from specrej_models.cpu.jobs import cache_folder
from specrej_models.cpu.tiles import LANES, exp, softmax_columns


@numba.njit
def _softmax(scores: Any, totals: Any) -> None:
    at = np.int64(scores.ctypes.data), np.int64(totals.ctypes.data)
    softmax_columns(at[0], 4 * scores.shape[1], scores.shape[0], at[1])


@numba.njit
def _exp(values: Any) -> Any:
    results = np.empty_like(values)
    for j in range(values.size):
        results[j] = exp(values[j])
    return results


def test_exp_is_accurate_and_zero_far_below() -> None:
    """Guards against e**-87 for minus infinity, which a sum over many tokens would add up."""
    values = np.linspace(-86.9, 0, 1001).astype(np.float32)
    np.testing.assert_allclose(_exp(values), np.exp(values.astype(np.float64)), rtol=1e-5)
    assert _exp(np.zeros(1, np.float32)) == 1
    assert (_exp(np.array([-88, -1e30, -np.inf], np.float32)) == 0).all()


def test_columns_have_their_own_maximum() -> None:
    """Guards against lanes that are mixed up, and columns beyond the last that are written."""
    random = np.random.default_rng(0)
    scores = random.normal(0, 30, (19, LANES + 3)).astype(np.float32)
    scores[3:, 1] = -1e30
    before, exact = scores.copy(), scores[:, :LANES].astype(np.float64)
    expected = np.exp(exact - exact.max(axis=0))
    totals = np.full(LANES + 1, 7, np.float32)
    _softmax(scores, totals)
    np.testing.assert_allclose(scores[:, :LANES], expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(totals[:LANES], expected.sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(scores[:, LANES:], before[:, LANES:])
    assert totals[LANES] == 7


def test_code_is_kept_apart_for_each_text_that_goes_into_it(tmp_path: Path) -> None:
    """Guards against a kernel that goes on with an older form of what it calls."""
    called = tmp_path / "called.py"
    called.write_text("1")
    before = cache_folder(tmp_path, tmp_path)
    assert cache_folder(tmp_path, tmp_path) == before
    called.write_text("2")
    assert cache_folder(tmp_path, tmp_path) != before
