"""Equal reward: the N that Best-of-N needs for it, and the ratio of the costs.

By the reward alone, as in the paper; `frontier` has both objectives. The ratio has two factors.
`saving` is the tokens of Best-of-N over those of Speculative Rejection at equal N. It follows from
lengths and schedule if rejection ignores length, and is larger where short answers are kept. `kept`
is the share of N that Best-of-N needs for the reward of Speculative Rejection: 1 if no best answer
was rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from experiments.studies.best_of_n import Curve, curve, doublings
from experiments.studies.plans import DOUBLING, Measured
from experiments.studies.statistics import Estimate, bounded_mean, interval, resamples
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, IntArray, Trajectories

# Headings of this study's table and of the summary.
EXPECTED = "expected if rejection ignores length"
BOUND = "bound, all answers as long as the limit"


@dataclass(frozen=True, slots=True)
class Match:
    """A setting, and the Best-of-N of equal reward.

    matched_n, ratio, flops_ratio: infinite ("beyond") where no measured Best-of-N is as good. Where
        a single answer is as good, matched_n is 1 and the true ratio is less.
    censored: the share of resampled prompts in which either holds.
    expected: the saving for answers of these lengths if rejection ignores length. bound_full: the
        largest saving if all answers reach the limit. NaN where full slots end rounds.
    complete, full_complete: the share of complete answers, ours and Best-of-N's with the same N.
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
    complete: Estimate
    full_complete: Estimate

    @property
    def range_note(self) -> str:
        """Whether the matched N is outside the measured range."""
        if math.isinf(self.matched_n.value):
            return "beyond"
        if self.matched_n.value <= 1:
            return "below 1"
        return f"{self.censored:.0%} of draws" if self.censored > 0 else ""


@dataclass(frozen=True, slots=True)
class Matched:
    reward: str
    max_tokens: int
    matches: tuple[Match, ...]

    @property
    def default(self) -> Match:
        """The service's default with the largest N, which was fixed before any measurement."""
        usual = [match for match in self.matches if match.schedule == str(DOUBLING)]
        return min(usual or self.matches, key=lambda match: (abs(match.alpha - 0.5), -match.n))

    def tables(self) -> tuple[Table, ...]:
        """A row per setting."""
        columns = {
            "N": "n",
            "alpha": "alpha",
            "schedule": "schedule",
            "as good as Best-of-N with N = (95 %)": "matched_n",
            "tokens saved at equal N": "saving",
            "part of N kept": "kept",
            "tokens, ratio (95 %)": "ratio",
            "FLOPs, ratio (95 %)": "flops_ratio",
            EXPECTED: "expected",
            BOUND: "bound_full",
            "outside what was measured": "range_note",
            "complete answers (95 %)": "complete",
            "Best-of-N's, same N (95 %)": "full_complete",
        }
        caption = f"Compute for equal {self.reward}: Best-of-N over Speculative Rejection"
        return (Table.of("matched", caption, self.matches, columns),)


def study(
    prompts: Sequence[Trajectories],
    reward: str,
    measured: Sequence[Measured],
    full_flops: FloatArray,
) -> Matched:
    """Of all settings that were measured; full_flops as of `ComputeModel.best_of_n`."""
    known = curve(prompts, reward, doublings(min(prompt.n for prompt in prompts)))
    lengths = np.concatenate([prompt.num_tokens for prompt in prompts])
    max_tokens = max(prompt.max_tokens for prompt in prompts)
    costs = [_Costs(measurement, known, full_flops) for measurement in measured]
    return Matched(
        reward,
        max_tokens,
        tuple(_match(cost, len(prompts), lengths, max_tokens) for cost in costs),
    )


def matched_cost(costs: ArrayLike, rewards: FloatArray, targets: FloatArray) -> FloatArray:
    """[draws] the least cost with a reward of at least the target, such as N or tokens.

    Between two costs, rewards are interpolated linearly over the logarithm of the cost.

    costs: [any] or [draws, any], rising. rewards: [draws, any], rising with cost. targets: [draws].
    The first cost if it is as good; infinite if the last one is not.
    """
    matched = np.empty(len(targets))
    rows = zip(np.broadcast_to(costs, rewards.shape), rewards, targets, strict=True)
    for i, (known, row, target) in enumerate(rows):
        # Sums in another order may differ in the last bits.
        slack = 1e-9 * abs(row[-1] - row[0])
        is_as_good = row >= target - slack
        first = int(np.argmax(is_as_good))
        if not is_as_good[first]:
            matched[i] = math.inf
        elif first == 0:
            matched[i] = known[0]
        else:
            between = slice(first - 1, first + 1)
            matched[i] = np.exp(np.interp(target, row[between], np.log(known[between])))
    return matched


def expected_saving(lengths: IntArray, alpha: float, decision_tokens: Sequence[int]) -> float:
    """Tokens of all answers over those of a run that keeps 1 - alpha at each decision token.

    The run generates min(L, d1) tokens of every answer of length L, up to d2 tokens of a share
    1 - alpha of them, and so on. For doublings from 16, alpha 0.5 and answers of T tokens this is
    T / (16 (1 + log2(T / 16) / 2)). Survival is assumed independent of length; only for answers of
    equal length is the result a bound.
    """
    ends = [*decision_tokens, int(lengths.max())]
    reached = [0.0, *(float(np.minimum(lengths, end).mean()) for end in ends)]
    spent = sum(
        (1 - alpha) ** i * (later - earlier)
        for i, (earlier, later) in enumerate(itertools.pairwise(reached))
    )
    return float(lengths.mean()) / spent


@dataclass(frozen=True, slots=True)
class _Costs:
    """One setting, evaluated on any draw of prompts."""

    measured: Measured
    known: Curve
    full_flops: FloatArray

    def ratios(self, prompts: IntArray) -> FloatArray:
        """[3, draws]: the matched N, and the ratios of tokens and FLOPs; `prompts` [draws, any]."""
        rewards = self.known.rewards[prompts].mean(axis=1)
        n = matched_cost(self.known.ns, rewards, self.measured.rewards[prompts].mean(axis=1))
        single = self.known.tokens[prompts, 0].mean(axis=1)
        prompt_flops, answer_flops = self.full_flops[prompts].mean(axis=1).T
        tokens = n * single / self.measured.tokens[prompts].mean(axis=1)
        flops = (prompt_flops + n * answer_flops) / self.measured.flops[prompts].mean(axis=1)
        return np.stack([n, tokens, flops])


def _match(costs: _Costs, num_prompts: int, lengths: IntArray, max_tokens: int) -> Match:
    measured, plan = costs.measured, costs.measured.plan
    values = costs.ratios(np.arange(num_prompts)[None])[:, 0].tolist()
    resampled = costs.ratios(resamples(num_prompts))
    n, ratio, flops_ratio = (
        interval(value, draws, num_prompts) for value, draws in zip(values, resampled, strict=True)
    )
    cuts = plan.decision_tokens(max_tokens)
    expected, bound = (
        math.nan if cuts is None else expected_saving(limits, plan.alpha, cuts)
        for limits in (lengths, np.full(1, max_tokens))
    )
    return Match(
        plan.n,
        plan.alpha,
        plan.name,
        n,
        float(measured.full_tokens.sum() / measured.tokens.sum()),
        n.value / plan.n if math.isfinite(n.value) else math.nan,
        ratio,
        flops_ratio,
        expected,
        bound,
        float(((resampled[0] <= 1) | np.isinf(resampled[0])).mean()),
        bounded_mean(measured.complete, 1.0),
        bounded_mean(measured.full_complete, 1.0),
    )
