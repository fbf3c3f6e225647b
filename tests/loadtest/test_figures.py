"""Percentiles, intervals, ratios, and what is made of them."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sweep import words
from loadtest.sweep.figures import cell, estimate, percentile, ratio
from loadtest.sweep.page import page
from loadtest.sweep.plan import Block, Condition
from loadtest.sweep.results import to_json
from specrej.contracts import Algorithm
from tests.loadtest.sweeps import SETTINGS, made_up, request

BLOCK = Block(0, Condition.STEADY, Algorithm.BEST_OF_N, 4, 4)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_are_those_of_the_standard_library(values: list[float], share: float) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
    assert percentile(values, share) == pytest.approx(expected, abs=1e-6)


def test_what_was_not_answered_counts_as_longer_than_anything() -> None:
    """Guards against a service that looks quick because its slow answers are left out."""
    values = [1.0, 2.0, 3.0, math.inf]
    assert percentile(values, 0.5) == 2.5
    assert math.isinf(percentile(values, 0.9))
    assert math.isinf(percentile([1.0, math.inf], 0.5))
    assert percentile([1.0, 2.0, math.inf], 0.5) == 2.0


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 samples of 20, at least 85 % (of 95, for few values) hold the true mean."""
    drawn = random.Random(3)
    held = 0
    for _ in range(200):
        found = estimate([drawn.gauss(10, 2) for _ in range(20)], statistics.fmean)
        held += found.low <= 10 <= found.high
    assert held >= 170


def test_ratios_of_medians() -> None:
    found = ratio([(1.0, 2.0), (1.1, 2.2), (0.9, 1.8), (1.0, 2.0)])
    assert found.value == pytest.approx(0.5)
    assert 0.4 < found.low <= found.value <= found.high < 0.62
    assert math.isnan(ratio([]).value)
    assert ratio([(1.0, math.inf)]).value == 0


def test_pairs_are_drawn_as_they_are() -> None:
    """Guards against prompts of different lengths being taken for doubt about the ratio."""
    found = ratio([(seconds, 2 * seconds) for seconds in (1.0, 5.0, 20.0, 80.0)])
    assert found.value == found.low == found.high == 0.5


def test_few_requests_are_not_certain() -> None:
    """Guards against one request each, whose draws are all the same, and a verdict of them."""
    assert math.isnan(ratio([(1.0, 2.0)] * 3).high)
    assert math.isnan(estimate([1.0], statistics.fmean).low)
    few = made_up(replace(SETTINGS, repeats=1, minutes=0, ns=(64, 128)))
    assert {each.verdict for each in few.comparisons if each.condition == "alone"} == {
        "not told apart"
    }
    assert "too few requests" in words.claim(few)
    assert not re.search(r"\bnan\b", page(few), re.IGNORECASE)


def test_a_cell_counts_everything_once() -> None:
    times = ((1.0, "OK"), (2.0, "OK"), (12.0, "OK"), (15.0, "GAVE_UP"))
    asked = [request(BLOCK, s, index=i, code=code) for i, (s, code) in enumerate(times)]
    found = cell("steady", "best-of-n", 4, asked, [20.0], 0, 10.0, late=1)
    assert found.codes == {"GAVE_UP": 1, "OK": 3}
    assert found.answers_per_s == 3 / 20
    assert found.goodput_per_s == 2 / 20  # one took longer than 10 s, one was not answered
    assert found.good_share.value == 0.5
    assert found.p50.value == 7.0
    assert math.isinf(found.p99)
    assert found.mean == 5.0


def test_nothing_answered_is_no_figure() -> None:
    asked = [request(BLOCK, 15.0, code="GAVE_UP")]
    found = cell("steady", "best-of-n", 4, asked, [20.0], 0, 10.0, late=0)
    assert math.isnan(found.reward.value)
    assert math.isinf(found.p50.value)


def test_the_claim_says_what_was_measured() -> None:
    """Guards against a sentence that says "below" whatever the figures are."""
    results = made_up()
    told = {}
    for low, high in ((0.5, 0.9), (0.9, 1.1), (1.1, 1.3)):
        found = tuple(
            replace(each, latency=replace(each.latency, low=low, high=high))
            for each in results.comparisons
        )
        told[low] = words.claim(replace(results, comparisons=found))
    assert "is <b>below</b> that of Best-of-N at N = 64" in told[0.5]
    assert "<b>not be told apart</b>" in told[0.9]
    assert "<b>not below</b>" in told[1.1]
    assert all("Speculative Rejection at N = 128" in text for text in told.values())


def test_json_has_no_numbers_that_json_has_not() -> None:
    whole = to_json(made_up())
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    assert any(each["p50"]["value"] is None for each in whole["cells"])


def test_the_page_needs_nothing_else() -> None:
    """Guards a report that opens from a file, and prompts that are no HTML."""
    text = page(made_up())
    assert "<script" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert "&lt;b&gt;Who?&lt;/b&gt;" in text


def test_an_unfinished_sweep_says_so() -> None:
    results = made_up()
    assert "Unfinished" not in page(results)
    assert "Unfinished" in page(replace(results, is_whole=False))


def test_a_small_sweep_has_a_page() -> None:
    assert "N = 2" in page(made_up(replace(SETTINGS, ns=(1, 2))))
    assert "No pair" in page(made_up(replace(SETTINGS, ns=(4,))))
