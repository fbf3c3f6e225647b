"""Weights of a softmax on vectors, against numpy in double precision."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from inference.cpu_exp import weigh as weigh_all
from inference.cpu_exp import weigh_columns
from inference.cpu_tiles import PANEL
from inference.cpu_vectors import LANES


@numba.njit
def _weigh(source: Any, target: Any, most: Any, scale: Any) -> Any:
    return weigh_all(source.ctypes.data, target.ctypes.data, source.size, most, scale)


_of_a_panel, _of_a_vector = (weigh_columns(vectors) for vectors in (PANEL // LANES, 1))


@numba.njit
def _weigh_panel(scores: Any, scale: Any, totals: Any) -> None:
    _of_a_panel(scores.ctypes.data, scores.shape[0], scale, totals.ctypes.data)


@numba.njit
def _weigh_vector(scores: Any, scale: Any, totals: Any) -> None:
    _of_a_vector(scores.ctypes.data, scores.shape[0], scale, totals.ctypes.data)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 15, 16, 17, 33, 256])
def test_weights_and_their_sum(count: int) -> None:
    """Guards the last, unfilled vector: of what lies behind it nothing is read or written."""
    random = np.random.default_rng(0)
    source = random.normal(0, 9, count).astype(np.float32)
    target = np.full(count + 20, 7, np.float32)
    most, scale = np.float32(source.max(initial=0)), np.float32(0.7)
    total = _weigh(source, target[:count], most, scale)
    expected = np.exp((source.astype(np.float64) - most) * scale)
    np.testing.assert_allclose(target[:count], expected, rtol=2e-5)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)
    assert (target[count:] == 7).all()


def test_what_is_far_below_has_no_weight() -> None:
    """Guards against e**-87 for minus infinity, which a draw of many tokens would add up."""
    source = np.array([0, -86, -88, -np.inf, -1e30], np.float32)
    target = np.empty_like(source)
    assert _weigh(source, target, np.float32(0), np.float32(1)) == 1
    assert target[1] > 0
    assert (target[2:] == 0).all()


@pytest.mark.parametrize(("columns", "weigh"), [(PANEL, _weigh_panel), (LANES, _weigh_vector)])
def test_columns_have_their_own_highest(columns: int, weigh: Any) -> None:
    random = np.random.default_rng(0)
    scores = random.normal(0, 30, (19, columns)).astype(np.float32)
    scores[3:, 1] = -1e30
    exact = scores.astype(np.float64)
    expected = np.exp((exact - exact.max(axis=0)) * 0.5)
    totals = np.empty(columns, np.float32)
    weigh(scores, np.float32(0.5), totals)
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(totals, expected.sum(axis=0), rtol=1e-6)
