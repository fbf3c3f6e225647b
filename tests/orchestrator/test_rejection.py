"""The rejection policy: the paper's rules and the invariants."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop.rejection import cut, forks_of, num_kept, num_released, rank, width_at
from orchestrator.loop.schedule import most_rounds, next_decision_token
from specrej.contracts import Branching, Schedule

# Half of them among five values, so that ties are frequent.
VALUES = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0]) | st.floats(-1e6, 1e6, allow_nan=False)
SCORES = st.dictionaries(st.integers(0, 500), VALUES, min_size=1, max_size=60)
ALPHAS = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 0.99])
RELEASES = st.just(0) | st.integers(1, 70)  # 0: the slots are not full


def live_of(scores: dict[int, float]) -> set[int]:
    """Two thirds of the candidates, independent of their scores."""
    return {candidate for candidate in scores if candidate % 3 != 1}


@pytest.mark.parametrize(
    ("ranked", "alpha", "kept"),
    [
        (8, 0.5, 4),
        (5, 0.5, 2),  # 2.5 rounds to even
        (7, 0.5, 4),  # 3.5 rounds to even
        (1, 0.5, 1),  # 0.5 rounds to 0, but one candidate is always kept
        (2, 0.9, 1),
        (15, 0.9, 2),  # exactly 1.5, which in binary is slightly less and rounds to 1
        (5, 0.1, 4),
        (10, 0.0, 10),
    ],
)
def test_the_kept_share_is_rounded_to_even(ranked: int, alpha: float, kept: int) -> None:
    assert num_kept(ranked, alpha) == kept


@given(SCORES, st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_truncated_candidates_rank_last_and_vetoed_ones_behind_them(
    scores: dict[int, float], truncated: set[int], vetoed: set[int]
) -> None:
    """One order decides: groups first, within a group the score, and of ties the lower id."""
    order = rank(scores, vetoed, truncated)
    assert sorted(order) == sorted(scores)
    for better, worse in itertools.pairwise(order):
        one, other = ((n in vetoed, n in truncated, -scores[n], n) for n in (better, worse))
        assert one < other


@given(st.integers(2, 2000), st.integers(1, 4000))
def test_full_slots_release_room_for_a_token_of_each_survivor(live: int, tokens: int) -> None:
    """Guards against rounds without growth, which score all candidates again for nothing."""
    released = num_released(live, tokens)
    stored = tokens - 1  # per candidate: the newest token holds no slot
    assert 1 <= released <= live
    assert released * stored >= live - released
    assert released == 1 or (released - 1) * stored < live - (released - 1)


@given(SCORES, ALPHAS, RELEASES)
def test_a_cut_never_empties_and_progresses_when_slots_are_full(
    scores: dict[int, float], alpha: float, release: int
) -> None:
    """Never empty and Progress: full slots of which no candidate is released would loop."""
    live, full = live_of(scores), release > 0
    kept = cut(scores, live, alpha, release=release)
    assert kept
    assert kept <= set(scores)
    if live:
        assert len(live - kept) >= min(release, len(live) - 1)
    if not full:
        assert len(kept) == num_kept(len(scores), alpha)
        assert min(scores[i] for i in kept) >= max(
            (scores[i] for i in set(scores) - kept), default=float("-inf")
        )
    # Without vetoes, the arguments for them change nothing.
    assert kept == cut(scores, live, alpha, release=release, vetoed={501}, has_answer=True)


@st.composite
def vetoes(draw: st.DrawFn) -> tuple[dict[int, float], set[int], set[int]]:
    """Scores, the live candidates, and few, many or all candidates as vetoed ones."""
    scores = draw(SCORES)
    vetoed = set(draw(st.sets(st.sampled_from(sorted(scores))) | st.just(set(scores))))
    return scores, live_of(scores), vetoed


@given(vetoes(), ALPHAS, st.booleans(), st.booleans())
def test_vetoed_candidates_are_rejected_unless_no_other_is_left(
    ranked: tuple[dict[int, float], set[int], set[int]], alpha: float, full: bool, has_answer: bool
) -> None:
    """Guards against a veto that a high score or a low alpha overrules, against full slots of which
    no candidate is released, and against vetoes that cost other candidates their places."""
    scores, live, vetoed = ranked
    kept = cut(scores, live, alpha, release=full, vetoed=vetoed, has_answer=has_answer)
    assert kept <= set(scores)
    if full:
        assert live - kept or len(live) <= 1
    num_others = len(scores) - len(vetoed)
    if num_others:
        assert kept and not kept & vetoed
        if not full:
            assert len(kept) == min(num_others, num_kept(len(scores), alpha))
    elif has_answer:
        assert not kept
    else:
        (last,) = kept
        candidates = vetoed & live or vetoed
        assert scores[last] == max(scores[candidate] for candidate in candidates)
        assert last in candidates


@given(SCORES, ALPHAS, st.integers(1, 9), RELEASES)
def test_a_cut_keeps_the_best_of_a_least_number(
    scores: dict[int, float], alpha: float, least: int, release: int
) -> None:
    """Guards promised answers against a high alpha, and against full slots, which must still
    release a live candidate."""
    live = live_of(scores)
    kept = cut(scores, live, alpha, least=least, release=release)
    num_live = len(kept & live)
    if not release:
        assert kept == {*rank(scores)[: max(least, num_kept(len(scores), alpha))]}
    elif len(live) > 1:
        assert num_live < len(live)
        assert num_live >= min(least, len(live) - 1) or len(kept) >= min(least, len(scores))
    if least == 1:
        assert kept == cut(scores, live, alpha, release=release)


def test_full_slots_release_the_worst_live_candidate() -> None:
    """Rejecting a finished one would free no slots."""
    scores = {0: 5.0, 1: 4.0, 2: 3.0, 3: 1.0}
    kept = cut(scores, {0, 1}, 0.0, release=1)
    assert kept == {0, 2, 3}


@given(st.lists(st.integers(0, 99), unique=True, max_size=20), st.integers(2, 40))
def test_forks_fill_a_width_evenly(survivors: list[int], width: int) -> None:
    forks = forks_of(survivors, width, 100)
    assert len(forks) == (max(0, width - len(survivors)) if survivors else 0)
    assert [*forks] == list(range(100, 100 + len(forks)))
    children = [list(forks.values()).count(survivor) for survivor in survivors]
    assert children == sorted(children, reverse=True)
    assert max(children, default=0) - min(children, default=0) <= 1


@pytest.mark.parametrize("taper", [0.0, 0.5, 1.0])
def test_a_taper_bounds_the_tokens_of_a_round(taper: float) -> None:
    """Guards against a last round that generates more than all others, and against an exponent on
    the wrong side. The rounds begin at 16, 32, 64, ... tokens."""
    widths = [width_at(Branching(32, 2, taper), 16, 16 * 2**number) for number in range(6)]
    assert (
        widths
        == {
            0.0: [32] * 6,
            0.5: [32, 23, 16, 11, 8, 6],
            1.0: [32, 16, 8, 4, 2, 2],  # never below `keep`
        }[taper]
    )
    assert width_at(Branching(32, 2, taper), 16, 4) == 32


# Decision tokens: where rounds end


@pytest.mark.parametrize(
    ("schedule", "max_tokens", "decision_tokens"),
    [
        (Schedule("memory"), 100, [100]),
        (Schedule("tokens", tokens=(5, 20, 60)), 100, [5, 20, 60, 100]),
        (Schedule("tokens", tokens=(5, 200)), 100, [5, 100]),
        (Schedule(first=16, factor=2.0), 128, [16, 32, 64, 128]),
        (Schedule(first=16, factor=2.0), 10, [10]),
        # floor(1.1**i) stays 1 for long: repeated tokens would be rounds of no tokens.
        (Schedule(first=1, factor=1.1), 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_decision_tokens_of_each_kind_of_schedule(
    schedule: Schedule, max_tokens: int, decision_tokens: list[int]
) -> None:
    tokens = [next_decision_token(schedule, 0, max_tokens)]
    for _ in range(max_tokens):
        if tokens[-1] < max_tokens:
            tokens.append(next_decision_token(schedule, tokens[-1], max_tokens))
    assert tokens == decision_tokens
    assert len(tokens) == most_rounds(schedule, max_tokens)


@given(st.integers(1, 10**6), st.floats(1.001, 16), st.integers(1, 300))
def test_a_geometric_schedule_has_no_empty_rounds_and_no_more_than_it_is_charged_for(
    first: int, factor: float, max_tokens: int
) -> None:
    schedule = Schedule(first=first, factor=factor)
    num_tokens = num_rounds = 0
    while num_tokens < max_tokens:
        until = next_decision_token(schedule, num_tokens, max_tokens)
        assert num_tokens < until <= max_tokens
        num_tokens, num_rounds = until, num_rounds + 1
    assert num_rounds <= most_rounds(schedule, max_tokens)
