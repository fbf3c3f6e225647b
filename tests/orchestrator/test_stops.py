"""What ends a request early: votes, waves and confidence, as functions of numbers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.edge.extractors import extractor, functions_of
from orchestrator.loop.stopping import (
    confidence,
    least_confidence,
    next_wave,
    reason_to_stop,
    threshold,
)
from orchestrator.loop.votes import Ballot, is_decided, probability_ahead, tally, votes_needed
from specrej.contracts import Selection, StopReason, Vote
from specrej.contracts.errors import InvalidRequest

BALLOTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), max_size=12)
VOTES = st.builds(
    Vote,
    weight=st.sampled_from(["one", "reward"]),
    stop_probability=st.sampled_from([0.7, 0.9, 0.95, 1.0]),
)


@given(BALLOTS, st.integers(0, 12))
def test_a_decided_vote_cannot_be_lost(votes: list[tuple[str, float]], num_seen: int) -> None:
    """Guards the exact stop: whatever the others vote for, one new answer included, the leading
    answer stays ahead; and it comes as early as that is true."""
    ballots = [Ballot(number, of, 1.0, score) for number, (of, score) in enumerate(votes)]
    seen, num_left = ballots[:num_seen], len(ballots[num_seen:])
    choices = tally(seen)
    leaders = set()
    for answer in "abcd":
        rest = [Ballot(100 + number, answer, 1.0, 2.0) for number in range(num_left)]
        leaders.add(tally([*seen, *rest])[0].answer if seen or rest else "")
    is_sure = num_left > 0 and bool(seen) and leaders == {choices[0].answer}
    assert is_decided(choices, Vote(), num_left) == is_sure


@given(BALLOTS)
def test_ties_are_decided_by_the_best_score_then_by_the_lower_id(
    votes: list[tuple[str, float]],
) -> None:
    """Guards against an order that depends on that of the ballots."""
    ballots = [Ballot(number, of, 1.0, score) for number, (of, score) in enumerate(votes)]
    choices = tally(ballots)
    assert choices == tally(reversed(ballots))
    for first, second in pairwise(choices):
        assert (-first.weight, -first.score, first.best) < (
            -second.weight,
            -second.score,
            second.best,
        )
    for choice in choices:
        own = [ballot for ballot in ballots if ballot.answer == choice.answer]
        assert choice.count == len(own)
        assert choice.score == max(ballot.score for ballot in own)
        assert choice.best == min(b.candidate for b in own if b.score == choice.score)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_probability_ahead_is_that_of_the_beta_posterior(count: int, other: int) -> None:
    """Against an independent numeric integral of the density of Beta(count + 1, other + 1)."""
    steps = 400
    density = [
        math.exp(
            math.lgamma(count + other + 2)
            - math.lgamma(count + 1)
            - math.lgamma(other + 1)
            + count * math.log(p)
            + other * math.log1p(-p)
        )
        for p in ((0.5 + (i + 0.5) / steps / 2) for i in range(steps))
    ]
    assert probability_ahead(count, other) == pytest.approx(sum(density) / steps / 2, abs=1e-4)
    assert probability_ahead(count, other) + probability_ahead(other, count) == pytest.approx(1)


def test_a_probable_leader_ends_a_vote_before_a_sure_one() -> None:
    choices = tally(Ballot(number, "a", 1.0, 0.0) for number in range(5))
    assert not is_decided(choices, Vote(stop_probability=1.0), 10)
    assert is_decided(choices, Vote(stop_probability=0.95), 10), "(1 - 1/2^6) = 0.984"
    assert not is_decided(choices, Vote(stop_probability=0.99), 10)
    weighted = Vote(weight="reward")
    assert not is_decided(choices, weighted, 1), "a vote of unknown weight could win"


@given(st.integers(1, 100), st.integers(0, 100), BALLOTS, st.none() | VOTES)
def test_waves_at_most_double_up_to_n(
    n: int, first: int, votes: list[tuple[str, float]], vote: Vote | None
) -> None:
    """Guards against a candidate that begins twice or never."""
    choices = tally(Ballot(i, of, 1.0, score) for i, (of, score) in enumerate(votes))
    selection = Selection(n=n, waves=first, vote=vote)
    waves: list[range] = []
    while wave := next_wave(selection, waves[-1].stop if waves else 0, choices):
        waves.append(wave)
    assert [number for wave in waves for number in wave] == list(range(n))
    assert len(waves[0]) == min(first or n, n)
    for wave in waves[1:-1]:
        assert len(waves[0]) <= len(wave) <= wave.start
        assert vote or len(wave) == wave.start, "as many as there are already"


@given(BALLOTS, VOTES, st.integers(1, 12))
def test_no_fewer_votes_than_needed_decide(
    votes: list[tuple[str, float]], vote: Vote, num_left: int
) -> None:
    """Guards against waves that are larger than what decides, and smaller than what can."""
    seen = [Ballot(i, of, 1.0, score) for i, (of, score) in enumerate(votes)]
    choices = tally(seen)
    leader = choices[0].answer if choices else "a"
    needed = votes_needed(choices, vote, num_left)
    for more in range(1, num_left):
        ballots = [*seen, *(Ballot(100 + i, leader, 1.0, 0.0) for i in range(more))]
        decides = is_decided(tally(ballots), vote, num_left - more)
        assert decides == (more >= needed)


SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6)


@given(
    SCORES,
    st.builds(
        Selection,
        stop_at=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
        first=st.integers(0, 4),
        min_answers=st.integers(1, 3),
    ),
    st.integers(0, 3),
)
def test_nothing_stops_before_its_condition(
    scores: list[float], selection: Selection, num_left: int
) -> None:
    """Guards against fewer answers than were promised, and a stop without its reason."""
    reason = reason_to_stop(selection, scores, [], num_left)
    is_enough = len(scores) >= selection.min_answers and bool(scores) and num_left > 0
    has_score = selection.stop_at is not None and bool(scores) and max(scores) >= selection.stop_at
    has_first = selection.first > 0 and len(scores) >= selection.first
    assert (reason is not None) == (is_enough and (has_score or has_first))
    if reason:
        assert reason is (StopReason.SCORE if has_score else StopReason.FIRST)


@given(st.lists(st.floats(-5, 5), max_size=12), st.integers(1, 6))
def test_the_least_confident_window(values: list[float], window: int) -> None:
    """Against the definition."""
    windows = [values[at : at + window] for at in range(max(1, len(values) - window + 1))]
    expected = min(sum(one) / len(one) for one in windows) if values else math.inf
    assert least_confidence(values, window) == pytest.approx(expected)


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=9), st.floats(0.01, 0.99))
def test_the_threshold_keeps_the_fraction(values: list[float], keep: float) -> None:
    least = threshold(values, keep)
    num_reaching = sum(value >= least for value in values)
    assert num_reaching >= keep * len(values)
    above = [value for value in values if value > least]
    assert len(above) < keep * len(values) or not values, "a greater one would keep fewer"


def test_a_confident_step_has_improbable_alternatives() -> None:
    assert confidence([0.0, -20.0]) > confidence([-0.7, -0.7])


@pytest.mark.parametrize(
    ("vote", "text", "expected"),
    [
        (Vote(), "first 3, then 1,234.50 apples.", "1234.5"),
        (Vote(), "it is +1000.0", "1000"),
        (Vote(), "1e3", "1000"),
        (Vote(), "-0.0", "0"),
        (Vote(), "half is .5", "0.5"),
        (Vote(), "about 5 %", "5"),
        (Vote(), "on 2024-05-01.", "1"),
        (Vote(), "-3", "-3"),
        (Vote(), "5%", "5%"),
        (Vote(), "123456789012345678901234567890.10", "123456789012345678901234567890.1"),
        (Vote(), "none", None),
        (Vote("boxed"), r"\boxed{1} so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (Vote("boxed"), r"\boxed{3} and \boxed{4", "3"),
        (Vote("boxed"), r"\boxed{ 1,000 }", "1000"),
        (Vote("regex", r"Answer: (\w+)"), "Answer: a. Answer: b", "b"),
        (Vote("regex", r"[ab]"), "a b", "b"),
        (Vote("regex", r"Answer: (\w+)"), "no", None),
        (Vote("json", "/a/1"), 'text {"a": [1, {"y": 1, "x": 2.0}]}', '{"x":2.0,"y":1}'),
        (Vote("json", ""), "4.0", "4.0"),
        (Vote("json", "/a~1b"), '{"a/b": "x"}', "x"),
        (Vote("json", "/c"), '{"a": 1}', None),
        (Vote("json", "/c"), "{" * 100_000, None),
        (
            Vote("tool_call"),
            '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": 2}}\n</tool_call>',
            '{"arguments":{"a":2,"b":1},"name":"f"}',
        ),
        (Vote("tool_call"), '{"name": "f"}', '{"arguments":{},"name":"f"}'),
        (Vote("tool_call"), "I would call f", None),
        (Vote("function", "length"), "four", "4"),
        (Vote("function", "fails"), "four", None),
    ],
)
def test_what_a_text_votes_for(vote: Vote, text: str, expected: str | None) -> None:
    functions = functions_of({"length": "builtins:len", "fails": "builtins:int"})
    assert extractor(vote, functions)(text) == expected


@pytest.mark.parametrize(
    "vote", [Vote("regex", "("), Vote("regex", r"(a)\1"), Vote("json", "a"), Vote("function", "x")]
)
def test_what_cannot_be_extracted_is_refused(vote: Vote) -> None:
    with pytest.raises(InvalidRequest) as raised:
        extractor(vote, {})
    (violation,) = raised.value.violations
    assert violation.field == "selection.vote.argument"
    assert "b'" not in violation.description, "the library's reason is of bytes"


def test_a_hostile_expression_takes_no_time() -> None:
    """Guards the event loop: by backtracking the first would take exponential time, and all matches
    of the second take quadratic time."""
    assert extractor(Vote("regex", "(a*)*b"), {})("a" * 60_000) is None
    assert extractor(Vote("regex", "(?s)a.*b|a"), {})("a" * 1_000_000) == "a"


@pytest.mark.parametrize(("kind", "opening"), [("boxed", r"\boxed{"), ("tool_call", "<tool_call>")])
def test_openings_that_never_close_take_no_time(kind: Any, opening: str) -> None:
    """Guards the event loop: each opening was read to the end of the text, for minutes."""
    assert extractor(Vote(kind), {})(opening * 100_000) is None
