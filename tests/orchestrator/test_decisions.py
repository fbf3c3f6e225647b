"""What decides a cut or a stop, as functions: ranks, schedules, rewards, the time left, votes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.edge.extractors import extractor, functions_of
from orchestrator.loop import stopping
from orchestrator.loop.composition import combine
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.rejection import cut, forks_of, num_kept, num_released, rank, width_at
from orchestrator.loop.schedule import most_rounds, next_decision_token
from orchestrator.loop.votes import Ballot, is_decided, probability_ahead, tally, votes_needed
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, RewardInvalid
from tests.orchestrator.caching import Clock

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
    for better, worse in pairwise(order):
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


@given(SCORES, ALPHAS, st.just(1) | st.integers(1, 9), RELEASES)
def test_a_cut_keeps_the_best_of_a_least_number_and_progresses_when_slots_are_full(
    scores: dict[int, float], alpha: float, least: int, release: int
) -> None:
    """Never empty and Progress: full slots of which no candidate is released would loop. Guards
    promised answers against a high alpha, and against full slots."""
    live = live_of(scores)
    kept = cut(scores, live, alpha, least=least, release=release)
    num_live = len(kept & live)
    assert kept and kept <= set(scores)
    if not release:
        assert kept == {*rank(scores)[: max(least, num_kept(len(scores), alpha))]}
    elif len(live) > 1:
        assert num_live < len(live)
        assert num_live >= min(least, len(live) - 1) or len(kept) >= min(least, len(scores))
    if live and least == 1:
        assert len(live) - num_live >= min(release, len(live) - 1)
    # Without vetoes, the arguments for them change nothing.
    assert kept == cut(
        scores, live, alpha, least=least, release=release, vetoed={501}, has_answer=True
    )


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


def test_full_slots_release_the_worst_live_candidate() -> None:
    """Rejecting a finished one would free no slots."""
    assert cut({0: 5.0, 1: 4.0, 2: 3.0, 3: 1.0}, {0, 1}, 0.0, release=1) == {0, 2, 3}


@given(st.lists(st.integers(0, 99), unique=True, max_size=20), st.integers(2, 40))
def test_forks_fill_a_width_evenly(survivors: list[int], width: int) -> None:
    forks = forks_of(survivors, width, 100)
    assert len(forks) == (max(0, width - len(survivors)) if survivors else 0)
    assert [*forks] == list(range(100, 100 + len(forks)))
    children = [list(forks.values()).count(survivor) for survivor in survivors]
    assert children == sorted(children, reverse=True)
    assert max(children, default=0) - min(children, default=0) <= 1


@pytest.mark.parametrize(
    ("taper", "expected"),
    [(0.0, [32] * 6), (0.5, [32, 23, 16, 11, 8, 6]), (1.0, [32, 16, 8, 4, 2, 2])],
)
def test_a_taper_bounds_the_tokens_of_a_round(taper: float, expected: list[int]) -> None:
    """Guards against a last round that generates more than all others, and against an exponent on
    the wrong side. The rounds begin at 16, 32, 64, ... tokens; `keep` is 2."""
    widths = [width_at(c.Branching(32, 2, taper), 16, 16 * 2**number) for number in range(6)]
    assert widths == expected
    assert width_at(c.Branching(32, 2, taper), 16, 4) == 32


# Decision tokens: where rounds end


@pytest.mark.parametrize(
    ("schedule", "max_tokens", "decision_tokens"),
    [
        (c.Schedule("memory"), 100, [100]),
        (c.Schedule("tokens", tokens=(5, 20, 60)), 100, [5, 20, 60, 100]),
        (c.Schedule("tokens", tokens=(5, 200)), 100, [5, 100]),
        (c.Schedule(first=16, factor=2.0), 128, [16, 32, 64, 128]),
        (c.Schedule(first=16, factor=2.0), 10, [10]),
        # floor(1.1**i) stays 1 for long: repeated tokens would be rounds of no tokens.
        (c.Schedule(first=1, factor=1.1), 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_decision_tokens_of_each_kind_of_schedule(
    schedule: c.Schedule, max_tokens: int, decision_tokens: list[int]
) -> None:
    for last, following in pairwise([0, *decision_tokens]):
        assert next_decision_token(schedule, last, max_tokens) == following
    assert decision_tokens[-1] == max_tokens
    assert len(decision_tokens) == most_rounds(schedule, max_tokens)


@given(st.integers(1, 10**6), st.floats(1.001, 16), st.integers(1, 300), st.integers(0, 40))
def test_a_geometric_schedule_has_no_empty_rounds_and_no_more_than_it_is_charged_for(
    first: int, factor: float, max_tokens: int, cached: int
) -> None:
    """Where rounds cost, each ends one token behind a whole block."""
    schedule = c.Schedule(first=first, factor=factor)
    num_tokens = num_rounds = 0
    while num_tokens < max_tokens:
        planned = next_decision_token(schedule, num_tokens, max_tokens)
        until = next_decision_token(schedule, num_tokens, max_tokens, cached_prompt_tokens=cached)
        assert num_tokens < until <= max_tokens
        if not cached:
            assert until == planned
        elif until < max_tokens:
            assert (cached + until) % 16 == 1 and 0 <= until - planned < 16
        num_tokens, num_rounds = until, num_rounds + 1
    assert num_rounds <= most_rounds(schedule, max_tokens)


# Raw values of each candidate, one per reward, and the rewards.
ScoredValues = tuple[dict[int, tuple[float, ...]], list[c.WeightedReward]]
BATCH = c.Normalization("batch")
RAW_VALUES = st.floats(-1e6, 1e6)
WEIGHTS = st.floats(-1e6, 1e6).filter(lambda weight: abs(weight) > 1e-9)


@st.composite
def scored(draw: st.DrawFn, values: st.SearchStrategy[float] = RAW_VALUES) -> ScoredValues:
    """Up to 12 candidates' raw values of up to 4 rewards."""
    count = draw(st.integers(1, 4))
    rewards = [
        c.WeightedReward(
            f"r{index}",
            draw(WEIGHTS),
            draw(st.sampled_from([c.Normalization(), BATCH])),
            draw(st.none() | st.floats(-1e6, 1e6)),
        )
        for index in range(count)
    ]
    rows = st.tuples(*[values] * count)
    return draw(st.dictionaries(st.integers(0, 99), rows, min_size=1, max_size=12)), rewards


def single(values: Sequence[float], reward: c.WeightedReward | None = None) -> list[float]:
    """The scores from one reward's values."""
    rows = {number: (value,) for number, value in enumerate(values)}
    verdicts = combine(rows, [reward or c.WeightedReward("r", normalization=BATCH)])
    return [verdicts[number].score for number in rows]


@given(scored(), st.randoms())
def test_order_changes_no_score(values_and_rewards: ScoredValues, random: Random) -> None:
    """Guards against equal requests, and equal cache keys, with different answers."""
    values, rewards = values_and_rewards
    order = random.sample(range(len(rewards)), len(rewards))
    numbers = random.sample(sorted(values), len(values))
    swapped = {number: [values[number][index] for index in order] for number in numbers}
    assert combine(swapped, [rewards[index] for index in order]) == combine(values, rewards)


@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=30),
    st.integers(-(10**6), 10**6),
    st.sampled_from([2.0**-30, 0.25, 1.0, 3.0, 1e3, 1e100]),
)
def test_unit_and_origin_change_no_score(values: list[int], shift: int, scale: float) -> None:
    """Guards against a reward that dominates a sum because of its unit."""
    moved = single([scale * (value + shift) for value in values])
    assert moved == pytest.approx(single([float(value) for value in values]), abs=1e-6)


@given(st.lists(RAW_VALUES, min_size=2, max_size=30, unique=True))
def test_batch_normalised_values_have_mean_0_deviation_1_and_order(values: list[float]) -> None:
    """Guards against the deviation of a sample instead of that of the whole batch."""
    scores = single(values)
    assert math.fsum(scores) / len(scores) == pytest.approx(0, abs=1e-6)
    assert math.fsum(score**2 for score in scores) / len(scores) == pytest.approx(1)
    assert [score for _, score in sorted(zip(values, scores, strict=True))] == sorted(scores)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 40))
def test_equal_values_are_normalised_to_0(value: float, count: int) -> None:
    """Guards against a division by zero or by a rounding error."""
    assert single([value] * count) == [0.0] * count


@given(st.lists(RAW_VALUES, min_size=1, max_size=10), WEIGHTS)
def test_a_single_reward_scores_by_its_weight(values: list[float], weight: float) -> None:
    """Guards against a weight that applies only among several rewards."""
    assert single(values, c.WeightedReward("r", weight)) == [weight * value for value in values]


@given(scored())
def test_vetoes_compare_raw_values(values_and_rewards: ScoredValues) -> None:
    """Guards against thresholds for normalised or weighted values, or for another reward."""
    values, rewards = values_and_rewards
    verdicts = combine(values, rewards)
    for number, raw in values.items():
        below = [
            reward.veto_below is not None and value < reward.veto_below
            for value, reward in zip(raw, rewards, strict=True)
        ]
        assert verdicts[number].vetoed == any(below)


@given(st.lists(st.floats(-1.7e308, 1.7e308), min_size=1, max_size=20))
def test_batch_normalisation_accepts_every_float(values: list[float]) -> None:
    """Guards against overflow and underflow at either end of the range, subnormals included."""
    bound = math.sqrt(len(values)) + 1e-9
    assert all(abs(score) <= bound for score in single(values))


@pytest.mark.parametrize(
    "values",
    [
        {0: (1e303, 0.0)},  # times a million: infinite
        {0: (1.7e302, 1.7e302)},  # both terms are finite, their sum is not
        {0: (1e303, -1e303)},  # infinities of both signs
    ],
)
def test_a_sum_that_is_not_finite_is_refused(values: Mapping[int, Sequence[float]]) -> None:
    """Guards against ranking by infinity, and against OverflowError as INTERNAL."""
    with pytest.raises(RewardInvalid, match="not finite"):
        combine(values, [c.WeightedReward("a", 1e6), c.WeightedReward("b", 1e6)])


MAX_TOKENS = 128


def controller(
    time_left_s: float, *, clock: Clock | None = None, measured: bool = True
) -> DeadlineController:
    """A controller that has measured 16 steps of 64 rows, 0.1 s each, after a prompt of 3 s."""

    def next_token(position: int) -> int:
        return next_decision_token(c.Schedule(), position, MAX_TOKENS)

    deadline = DeadlineController(next_token, MAX_TOKENS, time_left_s, clock or Clock())
    deadline.note_stride(64, 1, 0, 3.0)
    if measured:
        deadline.note_stride(64, 16, 0, 1.6)
    return deadline


def test_reading_the_prompt_is_no_step() -> None:
    """Guards against deep cuts, since the first stride of a long prompt took seconds."""
    deadline = DeadlineController(lambda position: 2 * position, MAX_TOKENS, 60.0, Clock())
    assert deadline.stride_tokens(0, 16, 64) == 1
    deadline.note_stride(64, 1, 0, 8.0)
    assert deadline.stride_tokens(1, 64, 64) == 1  # as if a step took all of these 8 s
    deadline.note_stride(64, 15, 0, 1.5)
    assert deadline.step_s(64) == pytest.approx(0.1)


@pytest.mark.parametrize(("left_s", "tokens"), [(3600.0, 128), (60.0, 29), (4.0, 16)])
def test_where_pauses_cost_the_first_stride_is_long(left_s: float, tokens: int) -> None:
    """Guards against prompts that a server computes again for each of several short strides."""
    deadline = DeadlineController(lambda position: 2 * position, MAX_TOKENS, left_s, Clock())
    deadline.pauses_freely = False
    assert deadline.stride_tokens(0, 128, 64) == tokens
    deadline.note_stride(64, tokens, 0, 0.1 * tokens)
    assert deadline.step_s(64) == pytest.approx(0.1)


def test_without_a_deadline_nothing_changes() -> None:
    deadline = controller(math.inf)
    assert deadline.stride_tokens(16, 128, 64) == 112
    assert not deadline.must_cut(16, 128, 64)
    assert deadline.alpha(16, 64, 64, 0.5) == 0.5
    assert deadline.patience_s == math.inf and not (deadline.is_over or deadline.hurried)


@pytest.mark.parametrize(
    ("time_left_s", "alpha"), [(100.0, 0.5), (5.0, 0.1)], ids=["ample time", "too little for one"]
)
def test_cuts_stay_as_planned_where_others_do_not_help(time_left_s: float, alpha: float) -> None:
    """A far deadline costs no quality. Before one that not even a single candidate can meet, many
    candidates are likelier to have one that ends early."""
    deadline = controller(time_left_s)
    deadline.note_scoring(64, 0.1)
    assert deadline.alpha(16, 64, 64, alpha) == alpha
    # With one number of rows, what a step of one row takes is a guess: one cut as planned shows it.
    is_guess = time_left_s < 10
    assert deadline.must_cut(16, 32, 64) == deadline.hurried == is_guess
    assert not deadline.must_cut(16, 32, 64)


def test_a_short_deadline_raises_alpha_no_more_than_needed() -> None:
    """Guards against rejecting all candidates where rejecting half of them is enough."""
    alphas = []
    for time_left_s in (30.0, 12.0, 9.0, 7.0, 5.9):
        deadline = controller(time_left_s)
        alphas.append(deadline.alpha(16, 64, 64, 0.1))
        assert deadline.hurried == (alphas[-1] > 0.1)
    assert alphas == sorted(alphas) and alphas[0] == 0.1 < alphas[2] < alphas[-1]
    assert num_kept(64, alphas[-1]) < 8


def test_candidates_are_forked_if_all_can_end_in_time() -> None:
    deadline = controller(30.0)  # 112 steps are left, of 0.1 s for 64 rows
    assert deadline.has_time_for(16, 64) and not deadline.hurried
    assert not deadline.has_time_for(16, 640) and deadline.hurried


@given(
    part=st.floats(0.5, 0.55) | st.floats(0.5, 1.1),
    requested=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    num_ranked=st.integers(2, 300),
    position=st.integers(1, MAX_TOKENS // 2),
    step_s=st.floats(0.01, 2),
    score_s=st.floats(0, 0.1),
)
def test_alpha_is_never_below_the_requested_one_and_keeps_a_candidate(
    part: float, requested: float, num_ranked: int, position: int, step_s: float, score_s: float
) -> None:
    """`part` of the time of all steps is left, `score_s` of a step's time is that of its scores."""
    deadline = controller(part * step_s * (MAX_TOKENS - position) + 0.1, measured=False)
    deadline.note_stride(num_ranked, 16, 0, 16 * step_s)
    deadline.note_scoring(num_ranked, score_s * step_s)
    alpha = deadline.alpha(position, num_ranked, num_ranked, requested)
    assert requested <= alpha < 1
    assert num_kept(num_ranked, alpha) >= 1
    assert deadline.hurried == (alpha > requested)
    assert 1 <= deadline.stride_tokens(0, 50, num_ranked) <= 50


def test_a_cut_comes_early_where_the_planned_one_would_be_too_late() -> None:
    """Guards Best-of-N and long rounds: at the decision token there would be no time left."""
    clock = Clock()
    deadline = controller(10.0, clock=clock)
    assert not deadline.must_cut(16, 32, 64)  # 1.6 s, and then 96 steps of one row, 0.05 s each
    assert deadline.must_cut(16, 128, 64)  # 11.2 s
    clock.now_s += 3.5
    assert deadline.must_cut(16, 32, 64) and deadline.hurried
    clock.now_s += 1.0
    deadline.note_stride(32, 1, 0, 0.09)  # so another number of rows is measured
    assert not deadline.must_cut(16, 32, 64)  # too late for a cut to help
    assert not deadline.must_cut(16, 128, 1)  # a single candidate is left


def test_a_stride_takes_a_quarter_of_the_time_left() -> None:
    """Guards against one stride that takes all of the time left because its estimate was wrong."""
    assert controller(300.0, measured=False).stride_tokens(0, 128, 64) == 16
    assert controller(30.0, measured=False).stride_tokens(0, 128, 64) == 2  # of 3 s at most
    assert controller(10.0).stride_tokens(16, 128, 64) == math.floor(0.25 * 9.7 / 0.1)


def test_the_time_is_over_when_no_step_fits() -> None:
    clock = Clock()
    deadline = controller(10.0, clock=clock, measured=False)
    assert not deadline.is_over
    deadline.note_stride(4, 10, 0, 4.0)
    clock.now_s += 9.0
    assert not deadline.is_over  # 0.7 s are left, and a step of one row takes 0.25 s
    clock.now_s += 0.5
    assert deadline.is_over


def test_candidates_that_end_early_need_less_time() -> None:
    """Guards against cuts for the sake of tokens that no candidate will ever reach."""
    endless, ending = controller(6.0), controller(6.0, measured=False)
    ending.note_stride(64, 16, 60, 1.6)
    assert endless.alpha(16, 64, 64, 0.1) > ending.alpha(16, 64, 64, 0.1) == 0.1


def test_the_time_of_a_step_is_extrapolated_to_other_numbers_of_rows() -> None:
    deadline = controller(10.0, measured=False)
    deadline.note_stride(100, 10, 0, 10.0)
    assert deadline.step_s(50) == pytest.approx(0.75)
    deadline.note_stride(50, 10, 0, 6.0)
    deadline.note_stride(50, 0, 0, 6.0)  # without tokens it measures nothing
    assert deadline.step_s(25) == pytest.approx(0.4)
    assert deadline.step_s(100) == pytest.approx(1.0)


BALLOTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), max_size=12
).map(lambda votes: [Ballot(i, of, 1.0, score) for i, (of, score) in enumerate(votes)])
VOTES = st.builds(
    c.Vote,
    weight=st.sampled_from(["one", "reward"]),
    stop_probability=st.sampled_from([0.7, 0.9, 0.95, 1.0]),
)


@given(BALLOTS, st.integers(0, 12))
def test_a_decided_vote_cannot_be_lost(ballots: list[Ballot], num_seen: int) -> None:
    """Guards the exact stop: whatever the others vote for, one new answer included, the leading
    answer stays ahead; and it comes as early as that is true."""
    seen, num_left = ballots[:num_seen], len(ballots[num_seen:])
    choices = tally(seen)
    leaders = set()
    for answer in "abcd":
        rest = [Ballot(100 + number, answer, 1.0, 2.0) for number in range(num_left)]
        leaders.add(tally([*seen, *rest])[0].answer if seen or rest else "")
    is_sure = num_left > 0 and bool(seen) and leaders == {choices[0].answer}
    assert is_decided(choices, c.Vote(), num_left) == is_sure


@given(BALLOTS)
def test_ties_are_decided_by_the_best_score_then_the_id(ballots: list[Ballot]) -> None:
    """Guards against an order that depends on that of the ballots."""
    choices = tally(ballots)
    assert choices == tally(reversed(ballots))
    for first, second in pairwise(choices):
        keys = [(-choice.weight, -choice.score, choice.best) for choice in (first, second)]
        assert keys[0] < keys[1]
    for choice in choices:
        own = [ballot for ballot in ballots if ballot.answer == choice.answer]
        assert choice.count == len(own)
        assert choice.score == max(ballot.score for ballot in own)
        assert choice.best == min(b.candidate for b in own if b.score == choice.score)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_probability_ahead_is_that_of_the_beta_posterior(count: int, other: int) -> None:
    """Against an independent numeric integral of the density of Beta(count + 1, other + 1)."""
    steps, scale = 800, (count + other + 1) * math.comb(count + other, count)
    points = (0.5 + (i + 0.5) / steps / 2 for i in range(steps))
    density = [scale * p**count * (1 - p) ** other for p in points]
    assert probability_ahead(count, other) == pytest.approx(sum(density) / steps / 2, abs=1e-4)
    assert probability_ahead(count, other) + probability_ahead(other, count) == pytest.approx(1)


def test_a_probable_leader_ends_a_vote_before_a_sure_one() -> None:
    choices = tally(Ballot(number, "a", 1.0, 0.0) for number in range(5))
    assert not is_decided(choices, c.Vote(stop_probability=1.0), 10)
    assert [is_decided(choices, c.Vote(), n) for n in (4, 5)] == [True, False], "a tie can lose"
    assert is_decided(choices, c.Vote(stop_probability=0.95), 10), "(1 - 1/2^6) = 0.984"
    assert not is_decided(choices, c.Vote(stop_probability=0.99), 10)
    weighted = c.Vote(weight="reward")
    assert not is_decided(choices, weighted, 1), "a vote of unknown weight could win"


def test_many_votes_are_counted_in_no_time() -> None:
    """Guards the event loop: it took minutes."""
    choices = tally(Ballot(number, "ab"[number % 2], 1.0, 0.0) for number in range(16_384))
    assert 0 < votes_needed(choices, c.Vote(stop_probability=1 - 1e-15), 16_384) < 2048


@given(st.integers(1, 100), st.integers(0, 100), BALLOTS, st.none() | VOTES)
def test_waves_at_most_double_up_to_n(
    n: int, first: int, seen: list[Ballot], vote: c.Vote | None
) -> None:
    """Guards against a candidate that begins twice or never."""
    choices = tally(seen)
    selection = c.Selection(n=n, waves=first, vote=vote)
    waves: list[range] = []
    while wave := stopping.next_wave(selection, waves[-1].stop if waves else 0, choices):
        waves.append(wave)
    assert [number for wave in waves for number in wave] == list(range(n))
    assert len(waves[0]) == min(first or n, n)
    for wave in waves[1:-1]:
        assert len(waves[0]) <= len(wave) <= wave.start
        assert vote or len(wave) == wave.start, "as many as there are already"


@given(BALLOTS, VOTES, st.integers(1, 12))
def test_no_fewer_votes_than_needed_decide(seen: list[Ballot], vote: c.Vote, num_left: int) -> None:
    """Guards against waves that are larger than what decides, and smaller than what can."""
    choices = tally(seen)
    leader = choices[0].answer if choices else "a"
    needed = votes_needed(choices, vote, num_left)
    for more in range(1, num_left):
        ballots = [*seen, *(Ballot(100 + i, leader, 1.0, 0.0) for i in range(more))]
        decides = is_decided(tally(ballots), vote, num_left - more)
        assert decides == (more >= needed)


FEW_SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6)


@given(
    FEW_SCORES,
    st.builds(
        c.Selection,
        stop_at=st.none() | st.sampled_from([0.5, 1.0, 2.0]),
        first=st.integers(0, 4),
        min_answers=st.integers(1, 3),
    ),
    st.integers(0, 3),
)
@example([1.0], c.Selection(stop_at=0.5, min_answers=2), 1)
def test_nothing_stops_early(scores: list[float], selection: c.Selection, num_left: int) -> None:
    """Guards against fewer answers than were promised, and a stop without its reason."""
    reason = stopping.reason_to_stop(selection, scores, [], num_left)
    is_enough = len(scores) >= selection.min_answers and bool(scores) and num_left > 0
    has_score = selection.stop_at is not None and bool(scores) and max(scores) >= selection.stop_at
    has_first = selection.first > 0 and len(scores) >= selection.first
    assert (reason is not None) == (is_enough and (has_score or has_first))
    if reason:
        assert reason is (c.StopReason.SCORE if has_score else c.StopReason.FIRST)


@given(st.lists(st.floats(-5, 5), max_size=12), st.integers(1, 6))
def test_the_least_confident_window(values: list[float], window: int) -> None:
    """Against the definition."""
    windows = [values[at : at + window] for at in range(max(1, len(values) - window + 1))]
    expected = min(sum(one) / len(one) for one in windows) if values else math.inf
    assert stopping.least_confidence(values, window) == pytest.approx(expected)


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=9), st.integers(1, 99))
@example([*map(float, range(25))], 28)
def test_the_threshold_keeps_the_fraction(values: list[float], percent: int) -> None:
    """In decimal: 0.28 * 25 is above 7 in binary."""
    least = stopping.threshold(values, percent / 100)
    num_reaching, num_above = sum(map(least.__le__, values)), sum(map(least.__lt__, values))
    assert 100 * num_reaching >= percent * len(values)
    assert 100 * num_above < percent * len(values) or not values, "a greater one would keep fewer"


def test_a_confident_step_has_improbable_alternatives() -> None:
    assert stopping.confidence([0.0, -20.0]) > stopping.confidence([-0.7, -0.7])


@pytest.mark.parametrize(
    ("vote", "text", "expected"),
    [
        (c.Vote(), "first 3, then 1,234.50 apples.", "1234.5"),
        (c.Vote(), "it is +1000.0", "1000"),
        (c.Vote(), "1e3", "1000"),
        (c.Vote(), "-0.0", "0"),
        (c.Vote(), "half is .5", "0.5"),
        (c.Vote(), "about 5 %", "5"),
        (c.Vote(), "on 2024-05-01.", "1"),
        (c.Vote(), "-3", "-3"),
        (c.Vote(), "\u22123", "-3"),
        (c.Vote(), "5-3", "3"),
        (c.Vote(), "5%", "5%"),
        (c.Vote(), "123456789012345678901234567890.10", "123456789012345678901234567890.1"),
        (c.Vote(), "none", None),
        (c.Vote("boxed"), r"\boxed{1} so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (c.Vote("boxed"), r"\boxed{3} and \boxed{4", "3"),
        (c.Vote("boxed"), r"{ \boxed{a{b}} } c}", "a{b}"),
        (c.Vote("boxed"), r"\boxed{ 1,000 }", "1000"),
        (c.Vote("regex", r"Answer: (\w+)"), "Answer: a. Answer: b", "b"),
        (c.Vote("regex", r"[ab]"), "a b", "b"),
        (c.Vote("regex", r"Answer: (\w+)"), "no", None),
        (c.Vote("json", "/a/1"), 'text {"a": [1, {"y": 1, "x": 2.0}]}', '{"x":2.0,"y":1}'),
        (c.Vote("json", ""), "4.0", "4.0"),
        (c.Vote("json", "/a~1b"), '{"a/b": "x"}', "x"),
        (c.Vote("json", "/c"), '{"a": 1}', None),
        (c.Vote("json", "/c"), "{" * 100_000, None),
        (
            c.Vote("tool_call"),
            '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": 2}}\n</tool_call>',
            '{"arguments":{"a":2,"b":1},"name":"f"}',
        ),
        (c.Vote("tool_call"), '{"name": "f"}', '{"arguments":{},"name":"f"}'),
        (c.Vote("tool_call"), "I would call f", None),
        (c.Vote("function", "length"), "four", "4"),
        (c.Vote("function", "fails"), "four", None),
    ],
)
def test_what_a_text_votes_for(vote: c.Vote, text: str, expected: str | None) -> None:
    functions = functions_of({"length": "builtins:len", "fails": "builtins:int"})
    assert extractor(vote, functions)(text) == expected


@pytest.mark.parametrize(
    "vote",
    [c.Vote("regex", "("), c.Vote("regex", r"(a)\1"), c.Vote("json", "a"), c.Vote("function", "x")],
)
def test_what_cannot_be_extracted_is_refused(vote: c.Vote) -> None:
    with pytest.raises(InvalidRequest) as raised:
        extractor(vote, {})
    (violation,) = raised.value.violations
    assert violation.field == "selection.vote.argument"
    assert "b'" not in violation.description, "the library's reason is of bytes"


def test_a_hostile_expression_takes_no_time() -> None:
    """Guards the event loop: by backtracking the first would take exponential time, and all matches
    of the second take quadratic time."""
    assert extractor(c.Vote("regex", "(a*)*b"), {})("a" * 60_000) is None
    assert extractor(c.Vote("regex", "(?s)a.*b|a"), {})("a" * 1_000_000) == "a"


@pytest.mark.parametrize(("kind", "opening"), [("boxed", r"\boxed{"), ("tool_call", "<tool_call>")])
def test_openings_that_never_close_take_no_time(kind: Any, opening: str) -> None:
    """Guards the event loop: each opening was read to the end of the text, for minutes."""
    assert extractor(c.Vote(kind), {})(opening * 100_000) is None
