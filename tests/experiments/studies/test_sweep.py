"""Replayed settings: savings, regrets, scores, and what Best-of-N would need for as much."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.figures import improvement as figure
from experiments.replay import Replayer
from experiments.studies import best_of_n, improvement, matched, perplexity, sweep
from experiments.studies.compute import UNKNOWN, ComputeModel, best_of_n_flops
from experiments.studies.improvement_score import Base, base_of, improvement_score
from experiments.studies.live import LiveRun
from experiments.studies.matched import expected_saving, matched_n
from experiments.studies.plans import DOUBLING, plans
from experiments.studies.runs import MEMORY, Plan, groups, run
from experiments.trajectories import Trajectories
from specrej.contracts import Schedule
from tests.experiments.synthetic import COMPUTE, WALK, collection, made_of, trajectories

EIGHTS = Schedule("geometric", first=8, factor=2.0)


def measure(
    prompts: list[Trajectories], plan: Plan, compute: ComputeModel = COMPUTE
) -> sweep.Measured:
    return sweep.measure([Replayer(each, WALK) for each in prompts], plan, compute)


def by_hand() -> Trajectories:
    """Answers of 16 tokens; at token 8 they score 0 1 2 3, in the end 3 9 1 2."""
    scores = np.zeros((4, 16))
    scores[:, :8] = np.arange(4.0)[:, None]
    scores[:, 8:] = np.array([3.0, 9.0, 1.0, 2.0])[:, None]
    return made_of(scores, np.full(4, 16), positions=(8, 16))


def test_a_run_by_hand() -> None:
    """Half of four are stopped at token 8, among them the one that would have been best."""
    found = run(Replayer(by_hand(), WALK), Plan(4, 0.5, EIGHTS), np.arange(4))
    assert [each.survivors for each in found.rounds] == [(2, 3), ()]
    assert [each.generated_tokens for each in found.rounds] == [4 * 8, 2 * 8]
    assert (found.answer, found.best_of_n_answer) == (3, 1)
    measured = measure([by_hand()], Plan(4, 0.5, EIGHTS))
    assert measured.regrets.tolist() == [7]
    assert measured.rewards.tolist() == [2]
    assert (measured.tokens.tolist(), measured.full_tokens.tolist()) == ([48], [64])


def test_groups_are_replayed_each() -> None:
    """Of two at alpha 0.5 one is stopped: 1 of {0, 1} stays, and wins; 3 of {2, 3} stays."""
    measured = measure([by_hand()], Plan(2, 0.5, EIGHTS))
    assert measured.regrets.tolist() == [0]
    assert measured.tokens.tolist() == [24]
    # Best-of-2 is averaged over all pairs, not over those two.
    assert measured.rewards.tolist() == pytest.approx([(9 * 3 + 3 * 2 + 2) / 6])


def test_groups_do_not_overlap() -> None:
    found = groups(10, 3, most=4)
    assert [each.tolist() for each in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError, match="11 candidates of 10"):
        groups(10, 11, most=1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(min_value=0, max_value=10_000),
    st.sampled_from([0.1, 0.3, 0.5, 0.75, 0.9]),
    st.sampled_from([(EIGHTS, 0), (DOUBLING, 0), (MEMORY, 16), (Schedule("tokens", (12, 48)), 0)]),
)
def test_regret_is_never_negative_and_tokens_never_more(
    seed: int, alpha: float, how: tuple[Schedule, int]
) -> None:
    """Whatever is rejected: an answer that was written to its end is one of the N."""
    schedule, memory_tokens = how
    prompts = collection(3, 32, stop_share=0.4, seed=seed)
    measured = measure(prompts, Plan(16, alpha, schedule, memory_tokens))
    assert (measured.regrets >= 0).all()
    assert (measured.tokens <= measured.full_tokens).all()
    assert (measured.flops > 0).all()


def test_rejecting_nobody_is_best_of_n() -> None:
    prompts = collection(3, 32, stop_share=0.3)
    measured = measure(prompts, Plan(32, 0.0, DOUBLING))
    assert (measured.regrets == 0).all()
    assert measured.tokens.tolist() == measured.full_tokens.tolist()


def test_a_sweep_tells_what_was_measured() -> None:
    prompts = collection(5, 32)
    measured = [measure(prompts, Plan(32, alpha, DOUBLING)) for alpha in (0.0, 0.5)]
    whole, half = sweep.study(prompts, WALK, measured, base_n=4).points
    assert (whole.saving.value, whole.regret_share) == (1, 0)
    # 16 of all, 16 of half, 32 of a quarter.
    assert half.saving.value == pytest.approx(64 / (16 + 16 / 2 + 32 / 4))
    assert half.improvement.value <= whole.improvement.value


def test_the_score_by_hand() -> None:
    """Base answers of 0 to 10: 15 is half of that range better, 5 half worse."""
    base = Base(4, np.array([10.0, 10.0]), np.array([0.0, 0.0]))
    assert improvement_score(np.array([15.0, 15.0]), base).value == 150
    assert improvement_score(np.array([15.0, 5.0]), base).value == 100


def test_a_prompt_whose_answers_are_equal_says_nothing() -> None:
    base = Base(4, np.array([10.0, 7.0]), np.array([0.0, 7.0]))
    assert improvement_score(np.array([15.0, 7.0]), base).value == 150


@given(st.integers(min_value=0, max_value=1000), st.sampled_from([2, 4, 16]))
def test_best_of_n_against_itself_is_100(seed: int, n: int) -> None:
    prompts = collection(4, 16, seed=seed)
    base = base_of(prompts, WALK, n)
    found = improvement_score(best_of_n.curve(prompts, WALK, [n]).rewards[:, 0], base)
    assert found.value == pytest.approx(100)
    assert (found.low, found.high) == pytest.approx((100, 100))


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=0, max_value=1000), st.sampled_from([1, 2, 4, 8, 16]))
def test_best_of_n_needs_its_own_n(seed: int, n: int) -> None:
    prompts = collection(4, 16, seed=seed)
    ns = best_of_n.doublings(16)
    rewards = best_of_n.curve(prompts, WALK, ns).rewards.mean(axis=0)[None]
    target = best_of_n.curve(prompts, WALK, [n]).rewards.mean(axis=0)
    assert matched_n(ns, rewards, target)[0] == pytest.approx(n)


@pytest.mark.parametrize(
    ("target", "n"), [(-1, 1), (0, 1), (0.5, math.sqrt(2)), (1, 2), (3, 8), (3.01, math.inf)]
)
def test_matched_n_lies_on_lines_over_log_n(target: float, n: float) -> None:
    rewards = np.array([[0.0, 1.0, 2.0, 3.0]])
    assert matched_n((1, 2, 4, 8), rewards, np.array([target]))[0] == pytest.approx(n)


def test_where_more_answers_are_no_better_the_fewest_count() -> None:
    rewards = np.array([[0.0, 1.0, 1.0, 1.0]])
    assert matched_n((1, 2, 4, 8), rewards, np.array([1.0]))[0] == 2


def test_the_match_of_a_run_that_rejects_nobody() -> None:
    """It is Best-of-N: as good as it, at the same cost, in tokens and in FLOPs."""
    prompts = collection(5, 32, stop_share=0.3)
    replayers = [Replayer(each, WALK) for each in prompts]
    # Judged once: a reward that reads at every cut would pay for its looking.
    silent = ComputeModel("no reward", COMPUTE.generator)
    measured = [measure(prompts, Plan(32, 0.0, DOUBLING), silent)]
    full_flops = best_of_n_flops(replayers, silent)
    (match,) = matched.study(prompts, WALK, measured, full_flops).matches
    for found in (match.ratio, match.flops_ratio):
        assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    assert match.matched_n.value == pytest.approx(32)
    assert (match.saving, match.kept) == pytest.approx((1, 1))


def test_the_ratio_is_the_product_of_its_factors() -> None:
    prompts = collection(6, 64)
    measured = [measure(prompts, Plan(64, alpha, EIGHTS)) for alpha in (0.5, 0.7, 0.9)]
    full_flops = best_of_n_flops([Replayer(each, WALK) for each in prompts], COMPUTE)
    result = matched.study(prompts, WALK, measured, full_flops)
    for match in result.matches:
        assert match.ratio.value == pytest.approx(match.saving * match.kept)
        assert match.ratio.low <= match.ratio.value <= match.ratio.high
        # All answers are as long: what is expected is saved, but for rounding of few answers.
        assert match.saving == pytest.approx(match.expected, rel=0.1)
        assert match.expected == pytest.approx(match.bound_full)
    assert result.default.alpha == 0.5
    assert result.best.ratio.value == max(
        each.ratio.value for each in result.matches if each.matched_n.value >= 16
    )


def _half_by_chance(seed: int) -> tuple[list[Trajectories], sweep.Measured]:
    """20 prompts of 32 answers of one length, on scales that differ; a run that gives the best of
    the first 16 for a quarter of the tokens: Best-of-16 is as good, for twice the run's tokens."""
    chance = np.random.default_rng(seed)
    finals = np.exp(0.5 * chance.standard_normal((20, 1))) * chance.standard_exponential((20, 32))
    prompts = [
        made_of(row[:, None] * np.ones(8), np.full(32, 8), positions=(8,), prompt_id=str(i))
        for i, row in enumerate(finals)
    ]
    rewards, ones = finals[:, :16].max(axis=1), np.ones(20)
    regrets = finals.max(axis=1) - rewards
    plan = Plan(32, 0.5, DOUBLING)
    arrays = (regrets, 64 * ones, 256 * ones, 64 * ones, 0 * ones, 0 * ones)
    return prompts, sweep.Measured(plan, rewards, *arrays)


def test_the_interval_of_a_ratio_covers_what_is_true() -> None:
    """2, whatever luck 20 prompts and their 32 answers had; 60 times. 95 % of that is 57 +- 1.7;
    prompts alone are drawn anew, and the luck of their answers is among what differs."""
    flops = np.ones((20, 2))
    covered, values = 0, []
    for seed in range(60):
        prompts, measured = _half_by_chance(seed)
        (match,) = matched.study(prompts, WALK, [measured], flops).matches
        covered += match.ratio.low <= 2 <= match.ratio.high
        values.append(match.ratio.value)
    assert covered >= 51
    assert np.median(values) == pytest.approx(2, rel=0.1)


def test_what_lies_outside_of_what_was_measured_is_said() -> None:
    """As good as less than one answer, better than all, and in some of the draws only."""
    prompts, measured = _half_by_chance(1)
    flops = np.ones((20, 2))
    notes = []
    for rewards in (measured.rewards * 0, measured.rewards + 100, measured.rewards):
        changed = dataclasses.replace(measured, rewards=rewards)
        (match,) = matched.study(prompts, WALK, [changed], flops).matches
        notes.append((match.range_note, match.censored))
    assert notes[:2] == [("below 1", 1), ("beyond", 1)]
    assert notes[2][1] < 0.5


def test_between_two_ns_of_which_the_first_is_flat() -> None:
    """A line to the next N begins where the reward does: at 4, not at the first N that has it."""
    rewards = np.array([[0.0, 2.0, 2.0, 3.0]])
    assert matched_n((1, 2, 4, 8), rewards, np.array([2.0]))[0] == 2
    assert matched_n((1, 2, 4, 8), rewards, np.array([2.5]))[0] == pytest.approx(2**2.5)


@pytest.mark.parametrize(("max_tokens", "expected"), [(128, 3.2), (512, 512 / 56), (2048, 28.44)])
def test_the_saving_of_doublings(max_tokens: int, expected: float) -> None:
    """16 (1 + log2(T / 16) / 2) tokens per answer instead of T."""
    tokens = [16 * 2**i for i in range(20) if 16 * 2**i < max_tokens]
    found = expected_saving(np.full(3, max_tokens), 0.5, tokens)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found == pytest.approx(max_tokens / (16 * (1 + math.log2(max_tokens / 16) / 2)))


def test_short_answers_lower_what_is_expected() -> None:
    tokens = (16, 32, 64)
    long, short = np.full(4, 128), np.array([10, 20, 128, 128])
    assert 1 < expected_saving(short, 0.5, tokens) < expected_saving(long, 0.5, tokens)
    assert expected_saving(np.full(4, 12), 0.5, tokens) == 1


def test_rejection_of_the_long_ones_saves_more_than_expected() -> None:
    """Guards against calling it a bound: half of the answers end at 20 and score high, half go on
    to 128 and score low. A cut at 16 keeps just the short ones."""
    lengths = np.where(np.arange(64) % 2, 128, 20)
    scores = np.where(lengths == 20, 1.0, 0.0)[:, None] * np.ones((64, 128))
    prompts = [made_of(scores, lengths, positions=(16, 32, 64, 128)) for _ in range(4)]
    measured = [measure(prompts, Plan(64, 0.5, DOUBLING))]
    (match,) = matched.study(prompts, WALK, measured, np.ones((4, 2))).matches
    assert match.saving > 1.5 * match.expected
    assert match.saving == pytest.approx((20 + 128) / 2 / (16 + 4 / 2), rel=0.1)


def test_a_setting_is_chosen_on_one_half_and_measured_on_the_other() -> None:
    """Guards against calling luck skill: of settings that are equal but for noise, the best one
    looks better on the prompts that it was chosen on."""
    prompts = collection(8, 32)
    measured = [
        measure(prompts, Plan(32, alpha, how))
        for alpha, how in itertools.product((0.5, 0.6, 0.7, 0.8), (EIGHTS, DOUBLING))
    ]
    full_flops = best_of_n_flops([Replayer(each, WALK) for each in prompts], COMPUTE)
    result = matched.study(prompts, WALK, measured, full_flops)
    assert 0 < result.crossed < result.best.ratio.value * 1.5
    few = matched.study(prompts[:7], WALK, [measure(prompts[:7], measured[0].plan)], full_flops[:7])
    assert math.isnan(few.crossed)


def test_flops_are_those_of_lengths() -> None:
    """Best-of-N is linear in N beyond its prompt, and costs what a replay of it does."""
    replayer = Replayer(trajectories(n=16, stop_share=0.5), WALK)
    reading, each = COMPUTE.best_of_n(replayer)
    measured = measure([replayer.trajectories], Plan(16, 0.0, Schedule("tokens", ())))
    assert reading + 16 * each == pytest.approx(measured.flops[0])
    assert 0 < reading < each


def test_a_reward_that_reads_anew_is_paid_for() -> None:
    prompt = [trajectories(n=16)]
    plan = Plan(16, 0.5, EIGHTS)
    silent = ComputeModel("no reward", COMPUTE.generator)
    assert measure(prompt, plan).flops[0] > measure(prompt, plan, silent).flops[0]


def test_improvement_has_the_base_at_one_and_100() -> None:
    prompts = collection(5, 32)
    replayers = [Replayer(each, WALK) for each in prompts]
    measured = [measure(prompts, Plan(32, 0.5, DOUBLING))]
    flops = best_of_n_flops(replayers, COMPUTE)
    result = improvement.study(prompts, WALK, measured, 8, flops, "m")
    base = next(each for each in result.points if (each.method, each.n) == ("Best-of-N", 8))
    assert (base.tokens, base.flops, base.score.value) == pytest.approx((1, 1, 100))
    assert [each.n for each in result.points] == [2, 4, 8, 16, 32, 32]
    assert len(result.tables()) == 1


def timed(
    prompt_id: str, seconds: float, score: float, alpha: float = 0.0, as_replayed: bool = True
) -> LiveRun:
    """Best-of-8, or Speculative Rejection of 32."""
    algorithm = "speculative-rejection" if alpha else "best-of-n"
    n = 32 if alpha else 8
    return LiveRun(
        *(prompt_id, WALK, 64, algorithm, n, seconds, score, alpha), as_replayed=as_replayed
    )


def of_live(prompts: list[Trajectories], live: list[LiveRun]) -> improvement.Improvement:
    flops = best_of_n_flops([Replayer(each, WALK) for each in prompts], COMPUTE)
    return improvement.study(prompts, WALK, [], 8, flops, "m", live=live)


def test_live_runs_are_compared_on_the_prompts_that_they_share() -> None:
    """Guards against holding a live answer, a complete one if there is any, against the highest
    reward that is to be expected: Best-of-N's live answer to the same prompt counts."""
    prompts = collection(3, 32)
    base = base_of(prompts, WALK, 8)
    scale = float(base.best[0] - base.worst[0])
    live = [
        timed("p0", 4.0, -7.0),
        timed("p1", 99.0, 0.0),
        timed("p0", 1.0, -7.0, alpha=0.5),
        timed("p0", 3.0, -7.0 + scale / 2, alpha=0.5),
        timed("elsewhere", 1.0, 0.0, alpha=0.5),
    ]
    result = of_live(prompts, live)
    full, fast = result.timed
    assert (full.seconds, fast.seconds) == (1, 0.5)
    assert (full.score.value, fast.score.value) == pytest.approx((100, 125))
    assert fast.num_runs == 2
    assert result.left_out == ""
    assert len(result.tables()) == 2


def test_live_runs_that_are_not_as_replayed_are_counted_only() -> None:
    """Guards against differences of arithmetic that are drawn as if rejection had made them."""
    live = [
        timed("p0", 4.0, 1.0),
        timed("p0", 2.0, 1.0, alpha=0.5),
        timed("p1", 4.0, 1.0, as_replayed=False),
        timed("p1", 1.0, 9.0, alpha=0.5),
        timed("p0", 99.0, 9.0, alpha=0.5, as_replayed=False),
        timed("elsewhere", 1.0, 0.0, as_replayed=False),
    ]
    result = of_live(collection(3, 32), live)
    assert [each.seconds for each in result.timed] == [1, 0.5]
    assert [each.score.value for each in result.timed] == pytest.approx([100, 100])
    assert result.left_out == "2 not as replayed left out"
    assert result.tables()[1].caption.endswith(result.left_out)
    (*_, drawn) = figure.draw(result, "x")
    assert result.left_out in drawn.heading
    assert result.left_out in drawn.title


def test_perplexity_by_hand() -> None:
    """A token of probability 1/4 each: the model might as well draw from four."""
    assert perplexity.perplexity(math.log(0.25)) == pytest.approx(4)
    logprobs = np.full((4, 16), math.log(0.25))
    logprobs[3] = math.log(0.5)
    prompt = made_of(np.zeros((4, 16)), np.full(4, 16), logprobs, positions=(8, 16))
    replayers = [Replayer(prompt, "likelihood")]
    measured = sweep.measure(replayers, Plan(4, 0.5, EIGHTS), UNKNOWN)
    one, two, full, fast = perplexity.study([prompt], [measured], [2, 4]).rows
    # Guards against e to the mean log-probability, which is less than any draws' mean.
    assert one.perplexity.value == pytest.approx((4 + 4 + 4 + 2) / 4)
    assert two.perplexity.value == pytest.approx((4 + 2) / 2)
    assert full.perplexity.value == fast.perplexity.value == pytest.approx(2)
    assert fast.speed_up.value == pytest.approx(64 / 48)
    assert fast.best_found == 1
    # Guards against a 1 that nobody has measured.
    assert all(math.isnan(each.best_found) for each in (one, two, full))


def test_plans_cut_where_prefixes_were_scored() -> None:
    prompts = collection(2, 64)
    known = plans(prompts, WALK)
    assert {plan.alpha for plan in known} == {round(i / 10, 1) for i in range(1, 10)}
    assert {plan.n for plan in known} == {16, 32, 64}
    assert len({plan.name for plan in known}) == 5
    assert max(plan.n for plan in known) == known[0].n
    coarse = [trajectories(n=16, positions=(32, 64))]
    assert {plan.name for plan in plans(coarse, WALK)} == {"from 32, x2"}
    assert len({plan.name for plan in plans(coarse, "likelihood")}) == 5


def test_a_plan_has_as_much_memory_as_its_name_says() -> None:
    """Guards against a floor of one whole answer that made "memory for 16 each" 20 each."""
    prompts = [trajectories(n=64, max_tokens=320, positions=(16, 32, 320))]
    by_memory = [plan for plan in plans(prompts, WALK) if plan.memory_tokens]
    assert {plan.n for plan in by_memory} == {64, 32}  # 16 x 16 is less than an answer
    for plan in by_memory:
        assert plan.setting(WALK, 10).slots == 10 + plan.n * 16


def test_flops_of_models_that_nobody_knows_are_left_out() -> None:
    """Guards against those of another model: SmolLM2's, whatever was collected."""
    prompts = collection(5, 32)
    measured = [measure(prompts, Plan(32, 0.5, DOUBLING), UNKNOWN)]
    flops = best_of_n_flops([Replayer(each, WALK) for each in prompts], UNKNOWN)
    (match,) = matched.study(prompts, WALK, measured, flops).matches
    assert math.isnan(match.flops_ratio.value)
    assert math.isnan(match.flops_ratio.low)
    assert match.ratio.value > 1


@pytest.mark.parametrize(
    ("plan", "name", "planned"),
    [
        (Plan(8, 0.5, DOUBLING), "from 16, x2", (16, 32)),
        (Plan(8, 0.5, Schedule("tokens", (4, 9))), "at 4, 9", (4, 9)),
        (Plan(8, 0.5, MEMORY, 16), "memory for 16 each", None),
        (Plan(8, 0.5, MEMORY), "no cuts", ()),
    ],
)
def test_names_of_plans(plan: Plan, name: str, planned: tuple[int, ...] | None) -> None:
    assert plan.name == name
    assert plan.planned(64) == planned
