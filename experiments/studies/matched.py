"""Equal reward: how many answers Best-of-N needs for it, and how much more that costs.

The ratio has two factors. `saving` is what Speculative Rejection spends less than Best-of-N of its
own N: what to expect of it follows from lengths and schedule if rejection ignores length, and it
is more where short answers are kept. `kept` is the part of N that is left when Best-of-N need not
be better than Speculative Rejection was: 1 if no best answer was ever rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.best_of_n import Curve, curve, doublings
from experiments.studies.plans import DOUBLING
from experiments.studies.runs import Plan
from experiments.studies.statistics import (
    FEWEST,
    Estimate,
    FloatArray,
    IntArray,
    drawn,
    interval,
)
from experiments.studies.sweep import Measured
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories

# Headings of what a saving is held against, here and in the summary.
EXPECTED = "expected if rejection ignores length"
BOUND = "bound, all answers as long as the limit"


@dataclass(frozen=True, slots=True)
class Match:
    """A setting against the Best-of-N that is as good.

    matched_n, ratio and flops_ratio are infinite ("beyond") where no Best-of-N that was measured is
    as good; where even a single answer is, matched_n is 1 and the ratio less than that. censored:
    the share of resampled prompts of which either holds: the interval ends where measuring did.
    expected: the saving of answers as long as these if rejection ignores length; one that keeps
    short answers saves more. bound_full: the most that any rejection saves of answers that all
    go on to the limit. NaN for schedules whose decision tokens are not known beforehand.
    complete, full_complete: the share of answers that are, of ours and of Best-of-N's, same N.
    """

    n: int
    alpha: float
    schedule: str
    matched_n: Estimate
    saving: float
    kept: float
    ratio: Estimate
    flops_ratio: Estimate
    expected: float
    bound_full: float
    censored: float
    complete: float
    full_complete: float

    @property
    def range_note(self) -> str:
        """Whether the N that was looked for lies outside of those that were measured."""
        if math.isinf(self.matched_n.value):
            return "beyond"
        if self.matched_n.value <= 1:
            return "below 1"
        return f"{self.censored:.0%} of draws" if self.censored > 0 else ""


@dataclass(frozen=True, slots=True)
class Matched:
    """The study's result; `max_n` is the largest Best-of-N there is.

    crossed: the ratio of the setting that is best on one half of the prompts, on the other half;
    NaN of too few prompts. What is best of many settings on the same prompts is partly luck.
    """

    reward: str
    max_n: int
    max_tokens: int
    mean_tokens: float
    ended_share: float
    matches: tuple[Match, ...]
    crossed: float

    @property
    def default(self) -> Match:
        """Alpha 0.5, doubling from 16, the largest N: settled before anything was seen."""
        usual = [each for each in self.matches if each.schedule == Plan(0, 0, DOUBLING).name]
        return min(usual or self.matches, key=lambda each: (abs(each.alpha - 0.5), -each.n))

    @property
    def best(self) -> Match:
        """The largest ratio among settings that are as good as a Best-of-N of a quarter of max_n.

        Of what is worse than that, a large ratio means nothing.
        """
        serious = [each for each in self.matches if each.matched_n.value >= self.max_n / 4]
        known = [each for each in serious or self.matches if math.isfinite(each.ratio.value)]
        return max(known or self.matches, key=lambda each: each.ratio.value)

    def tables(self) -> tuple[Table, ...]:
        """A row per setting."""
        headings = (
            *("N", "alpha", "schedule", "as good as Best-of-N with N = (95 %)"),
            *("tokens saved at equal N", "part of N kept", "tokens, ratio (95 %)"),
            *("FLOPs, ratio (95 %)", EXPECTED, BOUND),
            *("outside what was measured", "complete answers", "Best-of-N's, same N"),
        )
        rows = tuple(
            (
                *(m.n, m.alpha, m.schedule, m.matched_n, m.saving, m.kept),
                *(m.ratio, m.flops_ratio, m.expected, m.bound_full),
                *(m.range_note, m.complete, m.full_complete),
            )
            for m in self.matches
        )
        caption = f"Compute for equal {self.reward}: Best-of-N over Speculative Rejection"
        return (Table("matched", caption, headings, rows),)


def study(
    prompts: Sequence[Trajectories],
    reward: str,
    measured: Sequence[Measured],
    full_flops: FloatArray,
) -> Matched:
    """Of all settings that were measured; full_flops as in `improvement.study`."""
    max_n = min(each.n for each in prompts)
    known = curve(prompts, reward, doublings(max_n))
    lengths = np.concatenate([each.num_tokens for each in prompts])
    costs = [_Costs(each, known, full_flops) for each in measured]
    return Matched(
        reward,
        max_n,
        max(each.max_tokens for each in prompts),
        float(lengths.mean()),
        float(np.mean(np.concatenate([each.finished for each in prompts]))),
        tuple(_match(each, prompts, lengths) for each in costs),
        _crossed(costs, len(prompts), max_n),
    )


def matched_n(ns: Sequence[int], rewards: FloatArray, targets: FloatArray) -> FloatArray:
    """The least N whose reward is the target, on lines between the points over log N.

    rewards: [draws, len(ns)], rising with N. targets: [draws]. 1 if a single answer is as good;
    infinite if the largest N is not.
    """
    found = np.empty(len(targets))
    logs = np.log2(np.array(ns, dtype=np.float64))
    for i, (row, target) in enumerate(zip(rewards, targets, strict=True)):
        # Equal but for the last bits, which sums in another order can differ in.
        slack = 1e-9 * abs(row[-1] - row[0])
        is_as_good = row >= target - slack
        first = int(np.argmax(is_as_good))
        if not is_as_good[first]:
            found[i] = math.inf
        elif first == 0:
            found[i] = ns[0]
        else:
            part = (target - row[first - 1]) / (row[first] - row[first - 1])
            found[i] = 2 ** (logs[first - 1] + min(part, 1.0) * (logs[first] - logs[first - 1]))
    return found


def expected_saving(lengths: IntArray, alpha: float, decision_tokens: Sequence[int]) -> float:
    """Tokens of all answers over those of a run that keeps 1 - alpha at each decision token.

    A run writes min(L, d1) tokens of every answer of length L, of 1 - alpha of them those up to d2,
    and so on: with doublings from 16 at alpha 0.5 and answers of T tokens it is
    T / (16 (1 + log2(T / 16) / 2)). Who stays is taken not to depend on length: no bound, but for
    answers of one length.
    """
    ends = [*decision_tokens, int(lengths.max())]
    reached = [0.0, *(float(np.minimum(lengths, end).mean()) for end in ends)]
    spent = sum(
        (1 - alpha) ** i * (later - earlier)
        for i, (earlier, later) in enumerate(itertools.pairwise(reached))
    )
    return float(lengths.mean()) / spent


def _match(costs: _Costs, prompts: Sequence[Trajectories], lengths: IntArray) -> Match:
    measured, plan = costs.measured, costs.measured.plan
    everybody = np.arange(len(prompts))
    draws = _Draws(costs.ratios(everybody[None]), costs.ratios(drawn(len(prompts))))
    limit = np.full(1, max(each.max_tokens for each in prompts))
    n = draws.estimate(0, len(prompts))
    outside = (draws.again[0] <= 1) | np.isinf(draws.again[0])
    return Match(
        plan.n,
        plan.alpha,
        plan.name,
        n,
        float(measured.full_tokens.sum() / measured.tokens.sum()),
        n.value / plan.n if math.isfinite(n.value) else math.nan,
        draws.estimate(1, len(prompts)),
        draws.estimate(2, len(prompts)),
        _expected(lengths, plan, int(limit[0])),
        _expected(limit, plan, int(limit[0])),
        float(outside.mean()),
        float(measured.complete.mean()),
        float(measured.full_complete.mean()),
    )


def _expected(lengths: IntArray, plan: Plan, max_tokens: int) -> float:
    planned = plan.planned(max_tokens)
    return math.nan if planned is None else expected_saving(lengths, plan.alpha, planned)


def _crossed(all_costs: Sequence[_Costs], num_prompts: int, max_n: int) -> float:
    """The geometric mean over both halves, each with the setting that is best on the other."""
    if num_prompts < 2 * FEWEST:
        return math.nan
    halves = [np.arange(start, num_prompts, 2)[None] for start in (0, 1)]
    by_half = np.array([[each.ratios(half)[:, 0] for half in halves] for each in all_costs])
    found = []
    for chosen_on, measured_on in ((0, 1), (1, 0)):
        ratios = np.where(by_half[:, chosen_on, 0] >= max_n / 4, by_half[:, chosen_on, 1], 0.0)
        found.append(by_half[int(np.argmax(ratios)), measured_on, 1])
    return float(np.sqrt(found[0] * found[1]))


@dataclass(frozen=True, slots=True)
class _Draws:
    """Of all prompts, [3, 1], and of resampled ones, [3, draws]."""

    whole: FloatArray
    again: FloatArray

    def estimate(self, row: int, num_prompts: int) -> Estimate:
        return interval(float(self.whole[row, 0]), self.again[row], num_prompts)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Of one setting, on whatever prompts are drawn."""

    measured: Measured
    known: Curve
    full_flops: FloatArray

    def ratios(self, prompts: IntArray) -> FloatArray:
        """[3, draws]: the matched N, the ratios of tokens and of FLOPs; `prompts` [draws, any]."""
        rewards = self.known.rewards[prompts].mean(axis=1)
        n = matched_n(self.known.ns, rewards, self.measured.rewards[prompts].mean(axis=1))
        single = self.known.tokens[prompts, 0].mean(axis=1)
        read, write = self.full_flops[prompts].mean(axis=1).T
        tokens = n * single / self.measured.tokens[prompts].mean(axis=1)
        flops = (read + n * write) / self.measured.flops[prompts].mean(axis=1)
        return np.stack([n, tokens, flops])
