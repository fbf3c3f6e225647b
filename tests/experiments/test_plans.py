"""Replayed plans: matched Best-of-N, improvement scores and perplexity."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.figures import charts
from experiments.flops import UNKNOWN, ComputeModel
from experiments.json_lines import add_line
from experiments.replay import Replayer
from experiments.studies import best_of_n, improvement, matched, perplexity, plans
from experiments.studies.analysis import analyse
from experiments.studies.improvement import (
    Base,
    LiveRun,
    base_of,
    improvement_score,
    read_live,
)
from experiments.studies.matched import Match, expected_saving, matched_cost
from experiments.studies.plans import DOUBLING, MEMORY, Measured, Plan, groups
from experiments.trajectories import FloatArray, Trajectories
from specrej.contracts import Schedule
from tests.experiments.synthetic import COMPUTE, WALK, collection, from_scores, trajectories

EIGHTS = Schedule(first=8, factor=2.0)
NO_REWARD = ComputeModel("no reward", COMPUTE.generator)


def measure(prompts: list[Trajectories], plan: Plan, compute: ComputeModel = COMPUTE) -> Measured:
    return plans.measure([Replayer(prompt, WALK) for prompt in prompts], plan, compute)


def full_flops(prompts: list[Trajectories], compute: ComputeModel = COMPUTE) -> FloatArray:
    return compute.best_of_n([Replayer(prompt, WALK) for prompt in prompts])


def match(prompts: list[Trajectories], measured: Measured) -> Match:
    """A match where FLOPs do not matter."""
    (result,) = matched.study(prompts, WALK, [measured], np.ones((len(prompts), 2))).matches
    return result


def four_answers() -> Trajectories:
    """Answers of 16 tokens; at token 8 they score 0 1 2 3, in the end 3 9 1 2."""
    scores = np.zeros((4, 16))
    scores[:, :8] = np.arange(4.0)[:, None]
    scores[:, 8:] = np.array([3.0, 9.0, 1.0, 2.0])[:, None]
    return from_scores(scores, np.full(4, 16), positions=(8, 16))


def test_plan_rejects_the_lower_half() -> None:
    """Two of four are rejected at token 8, among them the best final answer."""
    run = Plan(4, 0.5, EIGHTS).run(Replayer(four_answers(), WALK), np.arange(4))
    assert [cut.survivors for cut in run.rounds] == [(2, 3), ()]
    assert (run.answer, run.best_of_n_answer) == (3, 1)
    measured = measure([four_answers()], Plan(4, 0.5, EIGHTS))
    assert (measured.regrets.tolist(), measured.rewards.tolist()) == ([7], [2])
    assert (measured.tokens.tolist(), measured.full_tokens.tolist()) == ([48], [64])


def test_groups_are_disjoint_and_averaged() -> None:
    """Of groups of two at alpha 0.5, candidates 1 and 3 survive, and 1 wins."""
    measured = measure([four_answers()], Plan(2, 0.5, EIGHTS))
    assert measured.regrets.tolist() == [0]
    assert measured.tokens.tolist() == [24]
    # Best-of-2 is averaged over all pairs, not over these two.
    assert measured.rewards.tolist() == pytest.approx([(9 * 3 + 3 * 2 + 2) / 6])
    assert [rows.tolist() for rows in groups(10, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(groups(100, 3)) == 4
    with pytest.raises(ValueError, match="11 candidates of 10"):
        groups(10, 11)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(min_value=0, max_value=10_000),
    st.sampled_from([0.1, 0.3, 0.5, 0.75, 0.9]),
    st.sampled_from(
        [(EIGHTS, 0), (DOUBLING, 0), (MEMORY, 16), (Schedule("tokens", tokens=(12, 48)), 0)]
    ),
)
def test_regret_is_not_negative_and_tokens_are_not_more(
    seed: int, alpha: float, how: tuple[Schedule, int]
) -> None:
    prompts = collection(3, 32, stop_share=0.4, seed=seed)
    measured = measure(prompts, Plan(16, alpha, *how))
    assert (measured.regrets >= 0).all()
    assert (measured.value_regrets >= 0).all()
    assert (measured.tokens <= measured.full_tokens).all()
    assert (measured.flops > 0).all()


@pytest.mark.parametrize(
    ("rewards", "worst", "score"),
    [
        ([15.0, 15.0], [0.0, 0.0], 150),  # better by half of the base's range
        ([15.0, 5.0], [0.0, 0.0], 100),
        ([15.0, 9.0], [0.0, 10.0], 150),  # a prompt with equal base answers is left out
    ],
)
def test_improvement_score(rewards: list[float], worst: list[float], score: float) -> None:
    base = Base(4, np.array([10.0, 10.0]), np.array(worst))
    assert improvement_score(np.array(rewards), base).value == score


@pytest.mark.parametrize("n", [8, 12])
def test_scores_of_few_answers_are_finite(n: int) -> None:
    """Guards against a base of one answer: rewards were divided by differences of rounding."""
    result = analyse("few", collection(5, n), WALK, alphas=(0.5,)).improvement
    scores = [point.score.value for point in result.points]
    assert scores and all(abs(score) < 1000 for score in scores)


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=0, max_value=1000), st.sampled_from([1, 2, 4, 16]))
def test_best_of_n_compared_with_itself(seed: int, n: int) -> None:
    """Its matched N is its own, and its improvement score is 100."""
    prompts = collection(4, 16, seed=seed)
    own = best_of_n.curve(prompts, WALK, [n]).rewards
    ns = best_of_n.doublings(16)
    rewards = best_of_n.curve(prompts, WALK, ns).rewards.mean(axis=0)[None]
    assert matched_cost(ns, rewards, own.mean(axis=0))[0] == pytest.approx(n)
    if n > 1:
        score = improvement_score(own[:, 0], base_of(prompts, WALK, n))
        assert (score.value, score.low, score.high) == pytest.approx((100, 100, 100))


@pytest.mark.parametrize(
    ("rewards", "target", "n"),
    [
        ([0.0, 1.0, 2.0, 3.0], -1, 1),
        ([0.0, 1.0, 2.0, 3.0], 0, 1),
        ([0.0, 1.0, 2.0, 3.0], 0.5, math.sqrt(2)),
        ([0.0, 1.0, 2.0, 3.0], 3, 8),
        ([0.0, 1.0, 2.0, 3.0], 3.01, math.inf),
        ([0.0, 1.0, 1.0, 1.0], 1, 2),  # the fewest where more are no better
        ([0.0, 2.0, 2.0, 3.0], 2.5, 2**2.5),  # a line begins at the last N of a flat part
    ],
)
def test_matched_cost_is_interpolated_over_its_logarithm(
    rewards: list[float], target: float, n: float
) -> None:
    ns, targets = (1, 2, 4, 8), np.array([float(target)] * 2)
    assert matched_cost(ns, np.array([rewards] * 2), targets) == pytest.approx([n, n])
    # Costs of each draw.
    costs = np.array([ns, [10 * n for n in ns]])
    assert matched_cost(costs, np.array([rewards] * 2), targets) == pytest.approx([n, 10 * n])


def test_run_without_rejection_matches_best_of_n() -> None:
    """At the same cost in tokens and FLOPs; a reward that reads at every cut would cost more."""
    prompts = collection(5, 32, stop_share=0.3)
    measured = [measure(prompts, Plan(32, 0.0, DOUBLING), NO_REWARD)]
    (result,) = matched.study(prompts, WALK, measured, full_flops(prompts, NO_REWARD)).matches
    for ratio in (result.ratio, result.flops_ratio):
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1, 1, 1))
    assert result.matched_n.value == pytest.approx(32)
    assert (result.saving, result.kept) == pytest.approx((1, 1))


def test_ratio_is_the_product_of_saving_and_kept() -> None:
    prompts = collection(6, 64)
    measured = [measure(prompts, Plan(64, alpha, EIGHTS)) for alpha in (0.5, 0.7, 0.9)]
    result = matched.study(prompts, WALK, measured, full_flops(prompts))
    for match in result.matches:
        assert match.ratio.value == pytest.approx(match.saving * match.kept)
        assert match.ratio.low <= match.ratio.value <= match.ratio.high
        # With answers of one length the expected saving is exact, but for rounding of counts.
        assert match.saving == pytest.approx(match.expected, rel=0.1)
        assert match.expected == pytest.approx(match.bound_full)
    assert result.default.alpha == 0.5


def half_by_chance(seed: int) -> tuple[list[Trajectories], Measured]:
    """A run with the best of the first 16 of 32 answers, for a quarter of Best-of-32's tokens.

    Best-of-16 is as good for twice the run's tokens. 20 prompts on different scales.
    """
    random = np.random.default_rng(seed)
    finals = np.exp(0.5 * random.standard_normal((20, 1))) * random.standard_exponential((20, 32))
    prompts = [
        from_scores(row[:, None] * np.ones(8), np.full(32, 8), positions=(8,), prompt_id=str(i))
        for i, row in enumerate(finals)
    ]
    rewards, ones = finals[:, :16].max(axis=1), np.ones(20)
    regrets = finals.max(axis=1) - rewards
    tokens = (64 * ones, 256 * ones, 64 * ones)
    arrays = (rewards, regrets, regrets, *tokens, rewards, 0 * ones, 0 * ones)
    return prompts, Measured(Plan(32, 0.5, DOUBLING), rewards, *arrays)


def test_interval_of_the_ratio_covers_the_truth() -> None:
    """The true ratio is 2, in 60 data sets. 95 % of them is 57 +- 1.7."""
    ratios = [match(*half_by_chance(seed)).ratio for seed in range(60)]
    assert sum(ratio.low <= 2 <= ratio.high for ratio in ratios) >= 51
    assert np.median([ratio.value for ratio in ratios]) == pytest.approx(2, rel=0.1)


def test_matched_n_outside_the_measured_range_is_noted() -> None:
    """Below a single answer, above all, and outside in some of the draws only."""
    prompts, measured = half_by_chance(1)
    notes = []
    for rewards in (measured.rewards * 0, measured.rewards + 100, measured.rewards):
        result = match(prompts, dataclasses.replace(measured, rewards=rewards))
        notes.append((result.range_note, result.censored))
    assert notes[:2] == [("below 1", 1), ("beyond", 1)]
    assert notes[2][1] < 0.5


@pytest.mark.parametrize(("max_tokens", "expected"), [(128, 3.2), (512, 512 / 56), (2048, 28.44)])
def test_expected_saving_of_doublings(max_tokens: int, expected: float) -> None:
    """16 (1 + log2(T / 16) / 2) tokens per answer instead of T."""
    tokens = [16 * 2**i for i in range(20) if 16 * 2**i < max_tokens]
    saving = expected_saving(np.full(3, max_tokens), 0.5, tokens)
    assert saving == pytest.approx(expected, rel=1e-3)
    short = np.array([10, 20, max_tokens, max_tokens])
    assert 1 < expected_saving(short, 0.5, tokens) < saving
    assert expected_saving(np.full(4, 12), 0.5, tokens) == 1


def test_rejection_of_long_answers_saves_more_than_expected() -> None:
    """Guards against calling the expected saving a bound.

    Half of the answers have 20 tokens and score high, the others 128. A cut at 16 keeps the short.
    """
    lengths = np.where(np.arange(64) % 2, 128, 20)
    scores = np.where(lengths == 20, 1.0, 0.0)[:, None] * np.ones((64, 128))
    prompts = [from_scores(scores, lengths, positions=(16, 32, 64, 128)) for _ in range(4)]
    result = match(prompts, measure(prompts, Plan(64, 0.5, DOUBLING)))
    assert result.saving > 1.5 * result.expected
    assert result.saving == pytest.approx((20 + 128) / 2 / (16 + 4 / 2), rel=0.1)


def test_flops_include_a_reward_model_and_are_nan_if_unknown() -> None:
    """They are linear in N beyond the prompt. Guards against FLOPs of another model."""
    ragged = [trajectories(n=16, stop_share=0.5)]
    ((reading, answer),) = full_flops(ragged)
    whole = measure(ragged, Plan(16, 0.0, Schedule("tokens", tokens=())))
    assert reading + 16 * answer == pytest.approx(whole.flops[0])
    assert 0 < reading < answer
    prompts, plan = collection(5, 32), Plan(32, 0.5, DOUBLING)
    assert (measure(prompts, plan).flops > measure(prompts, plan, NO_REWARD).flops).all()
    unknown = [measure(prompts, plan, UNKNOWN)]
    (result,) = matched.study(prompts, WALK, unknown, full_flops(prompts, UNKNOWN)).matches
    assert math.isnan(result.flops_ratio.value)
    assert math.isnan(result.flops_ratio.low)
    assert result.ratio.value > 1


def improved(
    prompts: list[Trajectories], measured: list[Measured], live: list[LiveRun]
) -> improvement.Improvement:
    return improvement.study(prompts, WALK, measured, 8, full_flops(prompts), "m", live)


def test_improvement_has_the_base_at_one_and_100() -> None:
    prompts = collection(5, 32)
    result = improved(prompts, [measure(prompts, Plan(32, 0.5, DOUBLING))], [])
    base = next(point for point in result.points if (point.method, point.n) == ("Best-of-N", 8))
    assert (base.tokens, base.flops, base.score.value) == pytest.approx((1, 1, 100))
    assert [point.n for point in result.points] == [2, 4, 8, 16, 32, 32]
    assert len(result.tables()) == 1


def timed(
    prompt_id: str, seconds: float, score: float, alpha: float = 0.0, as_replayed: bool = True
) -> LiveRun:
    """Best-of-8, or with alpha Speculative Rejection of 32."""
    algorithm, n = ("speculative-rejection", 32) if alpha else ("best-of-n", 8)
    fields = (prompt_id, WALK, 64, algorithm, n, seconds, score, alpha)
    return LiveRun(*fields, as_replayed=as_replayed)


def test_live_runs_are_compared_on_shared_prompts() -> None:
    """Scores are relative to the base's live answer, not to the highest reward of all answers.

    Runs of other prompts, rewards, limits and objectives are left out. Guards against differences
    of arithmetic that look like an effect of rejection: runs unlike their replays are only counted.
    """
    prompts = collection(3, 32)
    base = base_of(prompts, WALK, 8)
    scale = float(base.best[0] - base.worst[0])
    live = [
        timed("p0", 4.0, -7.0),
        timed("p1", 99.0, 0.0),
        timed("p0", 1.0, -7.0, alpha=0.5),
        timed("p0", 3.0, -7.0 + scale / 2, alpha=0.5),
        timed("elsewhere", 1.0, 0.0, alpha=0.5),
        dataclasses.replace(timed("p0", 1.0, 0.0), max_tokens=128),
        dataclasses.replace(timed("p0", 1.0, 0.0), reward="other"),
        dataclasses.replace(timed("p0", 1.0, 0.0), prefer_complete=False),
    ]
    result = improved(prompts, [], live)
    full, fast = result.timed
    assert (full.seconds, fast.seconds) == (1, 0.5)
    assert (full.score.value, fast.score.value) == pytest.approx((100, 125))
    assert fast.num_runs == 2
    assert result.left_out == ""
    assert len(result.tables()) == 2
    live += [
        timed("p1", 4.0, 1.0, as_replayed=False),
        timed("p0", 99.0, 9.0, alpha=0.5, as_replayed=False),
        timed("elsewhere", 1.0, 0.0, as_replayed=False),
    ]
    result = improved(prompts, [], live)
    assert [run.seconds for run in result.timed] == [1, 0.5]
    assert result.left_out == "2 not as replayed left out"
    assert result.tables()[1].caption.endswith(result.left_out)
    (*_, picture) = charts.improvement(result, "x")
    assert result.left_out in picture.heading
    assert result.left_out in picture.title


def test_live_file_is_read_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    run = dataclasses.asdict(timed("p0", 2.5, 0.5))
    add_line(path, {"machine": "an abacus"})
    add_line(path, run | {"tokens": 7})
    live = read_live(path)
    assert (live.machine, live.runs) == ("an abacus", (timed("p0", 2.5, 0.5),))
    for text in ("torn", "[]", "{}", '{"machine": "x"}\n{"n": 1}'):
        path.write_text(text, "utf-8")
        with pytest.raises(ValueError, match=rf"{re.escape(str(path))} does not hold live runs: ."):
            read_live(path)


def test_perplexity() -> None:
    """With probability 1/4 per token the perplexity is 4."""
    logprobs = np.full((4, 16), math.log(0.25))
    logprobs[3] = math.log(0.5)
    prompt = from_scores(np.zeros((4, 16)), np.full(4, 16), logprobs, positions=(8, 16))
    measured = plans.measure([Replayer(prompt, "likelihood")], Plan(4, 0.5, EIGHTS), UNKNOWN)
    one, two, full, fast = perplexity.study([prompt], [measured], [2, 4]).rows
    # Guards against the exponential of the mean log-probability, which is too low.
    assert one.perplexity.value == pytest.approx((4 + 4 + 4 + 2) / 4)
    assert two.perplexity.value == pytest.approx((4 + 2) / 2)
    assert full.perplexity.value == fast.perplexity.value == pytest.approx(2)
    assert fast.speed_up.value == pytest.approx(64 / 48)
    assert fast.best_found.value == 1
    assert all(math.isnan(method.best_found.value) for method in (one, two, full))


def test_plans_cut_where_prefixes_were_scored() -> None:
    prompts = collection(2, 64)
    chosen = plans.plans(prompts, WALK)
    assert {plan.alpha for plan in chosen} == {round(i / 10, 1) for i in range(1, 10)}
    assert {plan.n for plan in chosen} == {16, 32, 64}
    assert chosen[0].n == 64
    assert len({plan.name for plan in chosen}) == 6
    coarse = [trajectories(n=16, positions=(32, 64))]
    assert {plan.name for plan in plans.plans(coarse, WALK)} == {"geometric:32,2", "tokens:32"}
    assert len({plan.name for plan in plans.plans(coarse, "likelihood")}) == 6
    single = Plan(8, 0.5, Schedule("tokens", tokens=(4, 9)))
    assert (single.name, single.decision_tokens(64)) == ("tokens:4,9", (4, 9))


def test_plans_have_the_memory_of_their_name() -> None:
    """Guards against a floor of one whole answer, which made "slots for 16 each" 20 each."""
    prompts = [trajectories(n=64, max_tokens=320, positions=(16, 32, 320))]
    by_memory = [plan for plan in plans.plans(prompts, WALK) if plan.memory_tokens]
    assert {plan.n for plan in by_memory} == {64, 32}  # 16 x 16 is less than an answer
    assert {plan.name for plan in by_memory} == {"memory:16, slots for 16 each"}
    for plan in by_memory:
        assert plan.setting(WALK, 10).slots == 10 + plan.n * 16
