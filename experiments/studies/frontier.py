"""Reward against tokens: the best settings by budget, and whether rejection pays at all.

Every setting is compared with Best-of-N at equal tokens: with as many whole answers as its tokens
are worth, a fraction being the chance of one more. It is *ahead* by the difference of values
(`Trajectories.values`); below 0, Best-of-N is the better use of the tokens. Both objectives are
studied: complete answers preferred, as in the service, and the reward alone, as in the paper.

The best of many settings is partly luck. So settings are chosen on one half of the prompts and
judged on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.flops import UNKNOWN
from experiments.replay import Replayer
from experiments.studies.best_of_n import doublings, expected_answer, ranked
from experiments.studies.plans import Measured, default_of, is_scored, measure
from experiments.studies.prefixes import Correlation
from experiments.studies.statistics import MIN_PROMPTS, Estimate, bounded_mean, mean
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, IntArray, Trajectories
from specrej.contracts import Schedule

COMPLETE, ALONE = "complete answers preferred", "reward alone"
BEST_OF_N = "Best-of-N"


@dataclass(frozen=True, slots=True)
class Point:
    """A setting; `value` is the mean of what the objective compares.

    regret: of the value, against Best-of-N with the same N. complete: NaN by the reward alone.
    """

    n: int
    alpha: float
    schedule: str
    tokens: float
    value: float
    reward: Estimate
    complete: Estimate
    regret: Estimate
    ahead: Estimate


@dataclass(frozen=True, slots=True)
class Choice:
    """The best setting within a budget on each half, both judged on the other half."""

    budget: str
    chosen: tuple[str, str]
    tokens: float
    reward: Estimate
    complete: Estimate
    ahead: Estimate


@dataclass(frozen=True, slots=True)
class ObjectiveFrontier:
    """The frontier under one objective.

    best_of_n: by rising N. recommended: a setting, or Best-of-N; reason: why it is.
    """

    objective: str
    points: tuple[Point, ...]
    best_of_n: tuple[Point, ...]
    choices: tuple[Choice, ...]
    default: Point
    recommended: str
    reason: str

    @property
    def undominated(self) -> tuple[Point, ...]:
        """The settings with a higher value than all that generate fewer tokens."""
        best: list[Point] = []
        for point in sorted(self.points, key=lambda point: (point.tokens, -point.value)):
            if not best or point.value > best[-1].value:
                best.append(point)
        return tuple(best)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The default schedule beginning at a decision token, compared with Best-of-N by objective."""

    position: int
    kendall: Estimate
    tokens: float
    ahead: tuple[Estimate, Estimate]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Both objectives, that of the service first."""

    reward: str
    max_tokens: int
    sides: tuple[ObjectiveFrontier, ObjectiveFrontier]
    first_tokens: tuple[FirstToken, ...]

    @property
    def pays_from(self) -> tuple[int | None, int | None]:
        """By objective, the first decision token with which the default is ahead beyond chance.

        With every later one the default is not behind.
        """
        return self._pays_from(0), self._pays_from(1)

    def _pays_from(self, side: int) -> int | None:
        first = None
        for token in reversed(self.first_tokens):
            if token.ahead[side].value < 0:
                break
            first = token.position if token.ahead[side].low > 0 else first
        return first

    def tables(self) -> tuple[Table, ...]:
        """The decision tokens; then choices and all settings, by objective."""
        at_equal_tokens = "ahead of Best-of-N at equal tokens"
        first = {
            "first decision token": "position",
            "Kendall tau there (95 %)": "kendall",
            "tokens": "tokens",
            f"{at_equal_tokens}, {COMPLETE} (95 %)": lambda row: row.ahead[0],
            f"{at_equal_tokens}, {ALONE} (95 %)": lambda row: row.ahead[1],
        }
        caption = f"The first decision token from which rejection pays, by {self.reward}"
        tables = [Table.of("first_tokens", caption, self.first_tokens, first)]
        for side, name in zip(self.sides, ("complete", "alone"), strict=True):
            of = f"{self.reward}, {side.objective}"
            judged = {
                "tokens": "tokens",
                "reward (95 %)": "reward",
                "complete, share (95 %)": "complete",
                f"{at_equal_tokens} (95 %)": "ahead",
            }
            chosen = {
                "tokens of": "budget",
                "chosen on even prompts": lambda row: row.chosen[0],
                "chosen on odd prompts": lambda row: row.chosen[1],
            }
            caption = f"The best settings by budget, judged on the other half: {of}"
            tables.append(Table.of(f"choices_{name}", caption, side.choices, chosen | judged))
            setting = {"N": "n", "alpha": "alpha", "schedule": "schedule"}
            rows, regret = (*side.best_of_n, *side.points), {"regret (95 %)": "regret"}
            caption = f"All settings: {of}"
            tables.append(Table.of(f"frontier_{name}", caption, rows, setting | judged | regret))
        return tuple(tables)


def study(
    replayers: Sequence[Replayer], measured: Sequence[Measured], correlation: Correlation
) -> Frontier:
    """Of all settings that were measured; the default also with other first decision tokens."""
    prompts, reward = [replayer.trajectories for replayer in replayers], replayers[0].reward
    judges = [_Objective(prompts, reward, prefer_complete=preferred) for preferred in (True, False)]
    default = default_of(measured)
    first_tokens = []
    for token in correlation.decision_tokens:
        plan = replace(default.plan, schedule=Schedule(first=token.position), memory_tokens=0)
        if not is_scored(prompts, reward, plan):  # it also cuts at tokens that the grid lacks
            continue
        run = measure(replayers, plan, UNKNOWN)
        complete, alone = (mean(judge.ahead(run, judge.all)) for judge in judges)
        row = (token.position, token.kendall, float(run.tokens.mean()), (complete, alone))
        first_tokens.append(FirstToken(*row))
    sides = (judges[0].side(measured, default), judges[1].side(measured, default))
    max_tokens = max(prompt.max_tokens for prompt in prompts)
    return Frontier(reward, max_tokens, sides, tuple(first_tokens))


class _Objective:
    """One objective over all prompts."""

    def __init__(
        self, prompts: Sequence[Trajectories], reward: str, *, prefer_complete: bool
    ) -> None:
        self.all = np.arange(len(prompts))
        self._prefers_complete = prefer_complete
        self._answers = [ranked(p, reward, prefer_complete=prefer_complete) for p in prompts]
        self._single = np.array([prompt.num_tokens.mean() for prompt in prompts])
        self._ns = doublings(min(prompt.n for prompt in prompts))

    def side(self, measured: Sequence[Measured], default: Measured) -> ObjectiveFrontier:
        choices = []
        for n in self._ns[-2:-6:-1]:
            chosen = self._held_out(measured, n * self._single)
            if chosen:
                _, ahead, tokens, rewards, complete = chosen[1].T
                row = (mean(rewards), bounded_mean(complete, 1.0), mean(ahead))
                choices.append(Choice(f"Best-of-{n}", chosen[0], float(tokens.mean()), *row))
        return ObjectiveFrontier(
            COMPLETE if self._prefers_complete else ALONE,
            tuple(self._point(run) for run in measured),
            tuple(self._best_of_n_point(n) for n in self._ns),
            tuple(choices),
            self._point(default),
            *self._recommended(measured, default),
        )

    def ahead(self, run: Measured, rows: IntArray) -> FloatArray:
        """[rows] the value of a setting less that of Best-of-N at equal tokens."""
        n = float(run.tokens[rows].mean() / self._single[rows].mean())
        full = np.array([expected_answer(self._answers[row], n)[0] for row in rows])
        lead: FloatArray = self._values(run)[rows] - full
        return lead

    def _values(self, run: Measured) -> FloatArray:
        return run.values if self._prefers_complete else run.rewards

    def _best_of_n_point(self, n: int) -> Point:
        values, rewards, complete = np.array([expected_answer(a, n) for a in self._answers]).T
        figures = (float(values.mean()), mean(rewards), bounded_mean(complete, 1.0))
        tokens = float(n * self._single.mean())
        return Point(n, 0.0, "no cuts", tokens, *figures, Estimate(0.0), Estimate(0.0))

    def _point(self, run: Measured) -> Point:
        many, one = (self._best_of_n_point(n).value for n in (run.plan.n, 1))
        _, ahead, tokens, rewards, complete = self._figures(run, self.all).T
        return Point(
            run.plan.n,
            run.plan.alpha,
            run.plan.name,
            float(tokens.mean()),
            float(self._values(run).mean()),
            mean(rewards),
            bounded_mean(complete, 1.0),
            # A loss is on average at most the gain over one answer: survivors are not worse.
            bounded_mean(run.value_regrets if self._prefers_complete else run.regrets, many - one),
            mean(ahead),
        )

    def _figures(self, run: Measured, rows: IntArray) -> FloatArray:
        """[rows, 5] value, its lead over Best-of-N, tokens, reward and completeness."""
        figures = [run.values, run.tokens, run.scores, run.complete]
        if not self._prefers_complete:
            figures = [run.rewards, run.tokens, run.rewards, np.full(len(self.all), np.nan)]
        value, tokens, reward, complete = (figure[rows] for figure in figures)
        return np.stack([value, self.ahead(run, rows), tokens, reward, complete], axis=1)

    def _held_out(
        self, measured: Sequence[Measured], budgets: FloatArray
    ) -> tuple[tuple[str, str], FloatArray] | None:
        """The best settings of both halves, and [prompts, 5] their figures on the other half.

        None if no setting is within the budget, [prompts] tokens, or if there are few prompts.
        """
        halves, names = (self.all[::2], self.all[1::2]), []
        figures = np.empty((len(self.all), 5))
        for rows, others in (halves, halves[::-1]):
            best = self._best(measured, rows, budgets)
            if best is None or len(self.all) < 2 * MIN_PROMPTS:
                return None
            names.append(_name(best))
            figures[others] = self._figures(best, others)
        return (names[0], names[1]), figures

    def _best(
        self, measured: Sequence[Measured], rows: IntArray, budgets: FloatArray
    ) -> Measured | None:
        most = budgets[rows].mean() * (1 + 1e-9)
        fitting = [run for run in measured if run.tokens[rows].mean() <= most]
        return max(fitting, key=lambda run: float(self._values(run)[rows].mean()), default=None)

    def _recommended(self, measured: Sequence[Measured], default: Measured) -> tuple[str, str]:
        """A setting for the default's tokens, and why; Best-of-N unless one is ahead of it."""
        best = self._best(measured, self.all, default.tokens)
        chosen = self._held_out(measured, default.tokens)
        if best is None or chosen is None:
            return BEST_OF_N, f"fewer than {2 * MIN_PROMPTS} prompts show nothing else"
        gain = mean(chosen[1][:, 0] - self._values(default))
        is_ahead, best_is_ahead, default_is_ahead = (
            mean(lead).low > 0
            for lead in (chosen[1][:, 1], self.ahead(best, self.all), self.ahead(default, self.all))
        )
        is_ahead = is_ahead and best_is_ahead
        if is_ahead and gain.low > 0:
            return _name(best), "better than the default on prompts it was not chosen on"
        if default_is_ahead:
            return _name(default), "no setting chosen on one half is better on the other"
        if is_ahead:
            return _name(best), "the default is not ahead of Best-of-N at equal tokens"
        return BEST_OF_N, "no setting is ahead of it at equal tokens beyond chance"


def _name(run: Measured) -> str:
    return f"N = {run.plan.n}, alpha {run.plan.alpha:g}, {run.plan.name}"
