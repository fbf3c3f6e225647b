"""Does rejection pay? Every setting against Best-of-N at equal tokens, and a recommendation.

At equal tokens, Best-of-N has fewer answers and none of them is rejected: as many whole answers as
the setting's tokens are worth, a fraction being the chance of one more. A setting is *ahead* by the
difference of values; below 0, Best-of-N is the better use of the tokens. Both objectives are
studied: complete answers preferred, as in the service, and the reward alone, as in the paper.

The best of many settings is partly luck. So settings are chosen on one half of the prompts and
judged on the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments import charts
from experiments.frames import SETTING, Frames
from experiments.statistics import MIN_PROMPTS, Estimate, bounded_mean, kendall, mean
from experiments.studies import Chart, Study, doublings, pivot
from experiments.trajectories import FloatArray, IntArray
from specrej.client.options import parse_schedule

COMPLETE, ALONE = "complete answers preferred", "reward alone"
BEST_OF_N = "Best-of-N"
AHEAD = "ahead of Best-of-N at equal tokens"


@dataclass(frozen=True, slots=True)
class Objective:
    """What is compared.

    value, score, regret: columns of `Frames.runs`; score is the reward of the chosen answer.
    """

    name: str
    value: str
    score: str
    regret: str


OBJECTIVES = (
    Objective(COMPLETE, "value", "score", "value_regret"),
    Objective(ALONE, "reward", "reward", "regret"),
)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`chosen`: a setting, or Best-of-N; `why`; figures of the default."""

    objective: str
    chosen: str
    why: str
    reward: Estimate
    regret: Estimate
    ahead: Estimate


class Side:
    """All settings under one objective. Prompts are numbered as in the frames."""

    def __init__(self, runs: pd.DataFrame, full: pd.DataFrame, objective: Objective) -> None:
        self.objective = objective
        self.full = full
        self.settings = [
            of.set_index("prompt", drop=False) for _, of in runs.groupby(SETTING, sort=False)
        ]
        self._values = pivot(full, objective.value)
        self._single = pivot(full, "tokens", [1])[:, 0]

    @property
    def prompts(self) -> IntArray:
        return np.arange(len(self._values))

    def ahead(self, runs: pd.DataFrame, prompts: IntArray) -> FloatArray:
        """[prompts] the value of a setting less that of Best-of-N with its mean tokens there."""
        own = runs[self.objective.value].to_numpy()[prompts]
        tokens = runs.tokens.to_numpy()[prompts]
        n = float(tokens.mean() / self._single[prompts].mean())
        at, last = min(max(n, 1.0), self._values.shape[1]) - 1, self._values.shape[1] - 1
        below, part = int(at), at % 1
        first, more = (self._values[prompts, min(row, last)] for row in (below, below + 1))
        lead: FloatArray = own - (1 - part) * first - part * more
        return lead

    def best(self, prompts: IntArray, budgets: FloatArray) -> pd.DataFrame | None:
        """The setting of the highest mean value on these prompts within their budget, in tokens."""
        most = budgets[prompts].mean() * (1 + 1e-9)
        fitting = [runs for runs in self.settings if runs.tokens.to_numpy()[prompts].mean() <= most]
        values = [runs[self.objective.value].to_numpy()[prompts].mean() for runs in fitting]
        return fitting[int(np.argmax(values))] if fitting else None

    def held_out(self, budgets: FloatArray) -> tuple[list[str], pd.DataFrame] | None:
        """The names of the best settings of both halves, and their figures on the other half.

        Figures are by prompt: value and ahead. None if no setting is within
        the budget, or if there are fewer than eight prompts.
        """
        if len(self.prompts) < 2 * MIN_PROMPTS:
            return None
        names, parts = [], []
        even, odd = self.prompts[::2], self.prompts[1::2]
        for chosen_on, judged_on in ((even, odd), (odd, even)):
            best = self.best(chosen_on, budgets)
            if best is None:
                return None
            names.append(name_of(best))
            values = best[self.objective.value].to_numpy()[judged_on]
            figures = {"value": values, "ahead": self.ahead(best, judged_on)}
            parts.append(pd.DataFrame(figures, index=judged_on))
        return names, pd.concat(parts).sort_index()

    def recommend(self, default: pd.DataFrame) -> Recommendation:
        """A setting for the default's tokens; Best-of-N unless one is ahead of it."""
        default = default.set_index("prompt", drop=False)
        lead = mean(self.ahead(default, self.prompts))
        figures = (mean(default[self.objective.score]), self._regret(default), lead)
        return Recommendation(self.objective.name, *self._choose(default, lead), *figures)

    def _regret(self, runs: pd.DataFrame) -> Estimate:
        """A loss is on average at most the gain over one answer: survivors are not worse."""
        one, most = (
            self.full[self.full.n == n][self.objective.value].mean() for n in (1, runs.n.iloc[0])
        )
        return bounded_mean(runs[self.objective.regret], most - one)

    def _choose(self, default: pd.DataFrame, lead: Estimate) -> tuple[str, str]:
        budgets = default.tokens.to_numpy()
        best, held_out = self.best(self.prompts, budgets), self.held_out(budgets)
        if best is None or held_out is None:
            return BEST_OF_N, f"fewer than {2 * MIN_PROMPTS} prompts show nothing else"
        judged = held_out[1]
        gain = mean(judged.value.to_numpy() - default[self.objective.value].to_numpy())
        is_ahead = mean(judged.ahead).low > 0 and mean(self.ahead(best, self.prompts)).low > 0
        if is_ahead and gain.low > 0:
            return name_of(best), "better than the default on prompts it was not chosen on"
        if lead.low > 0:
            return name_of(default), "no setting chosen on one half is better on the other"
        if is_ahead:
            return name_of(best), "the default is not ahead of Best-of-N at equal tokens"
        return BEST_OF_N, "no setting is ahead of it at equal tokens beyond chance"

    def table(self) -> pd.DataFrame:
        """Best-of-N by N, then all settings."""
        rows = []
        for n in doublings(int(self.full.groupby("prompt").n.max().min())):
            of_n = self.full[self.full.n == n]
            row = {"N": n, "alpha": 0.0, "schedule": "no cuts"}
            rows.append(row | self._figures(of_n, Estimate(0.0), Estimate(0.0)))
        for runs in self.settings:
            row = {"N": runs.n.iloc[0], **runs.iloc[0][["alpha", "schedule"]]}
            ahead = mean(self.ahead(runs, self.prompts))
            rows.append(row | self._figures(runs, ahead, self._regret(runs)))
        return pd.DataFrame(rows)

    def _figures(self, of: pd.DataFrame, ahead: Estimate, regret: Estimate) -> dict[str, Any]:
        complete: Any = bounded_mean(of.complete, 1.0)
        return {
            "tokens": of.tokens.mean(),
            "reward (95 %)": mean(of[self.objective.score]),
            "complete, share (95 %)": complete if self.objective.name == COMPLETE else math.nan,
            f"{AHEAD} (95 %)": ahead,
            "regret (95 %)": regret,
        }


def name_of(runs: pd.DataFrame) -> str:
    """A setting as text."""
    first = runs.iloc[0]
    return f"N = {first.n}, alpha {first.alpha:g}, {first.schedule}"


def sides(frames: Frames) -> tuple[Side, ...]:
    """Both objectives, that of the service first."""
    return tuple(Side(frames.runs, frames.full, objective) for objective in OBJECTIVES)


def frontier(frames: Frames) -> list[Study]:
    """All settings by objective, with a chart of reward against tokens."""
    studies = []
    for side in sides(frames):
        of, slug = f"{frames.reward}, {side.objective.name}", side.objective.name.split()[0]
        table = side.table()
        chart = Chart(f"frontier-{slug}", f"Mean {of}, against tokens", _Rewards(table, frames))
        studies.append(Study(f"frontier-{slug}", f"All settings: {of}", table, (chart,)))
    return studies


@dataclass(frozen=True, slots=True)
class _Rewards:
    """Reward against tokens: Best-of-N, the settings that no other beats, and the default."""

    table: pd.DataFrame
    frames: Frames

    def __call__(self, axes: Axes) -> None:
        rewards = self.table.assign(mean=[one.value for one in self.table["reward (95 %)"]])
        full = rewards[rewards.schedule == "no cuts"]
        fast = rewards[rewards.schedule != "no cuts"].sort_values(["tokens", "mean"])
        best = fast[fast["mean"] > fast["mean"].shift(fill_value=-np.inf).cummax()]
        lines = ((full, charts.ORANGE, BEST_OF_N), (best, charts.BLUE, "Speculative Rejection"))
        for part, color, label in lines:
            axes.plot(part.tokens, part["mean"], "o-", color=color, markersize=3, label=label)
        default = self.frames.default.iloc[0]
        of = rewards[default.n == rewards.N]
        of = of[(of.alpha == default.alpha) & (of.schedule == default.schedule)]
        axes.plot(of.tokens, of["mean"], "D", color=charts.PURPLE, label="the default")
        charts.log2_axis(axes, "tokens per prompt")
        axes.set_ylabel(self.frames.reward)


def first_tokens(frames: Frames) -> Study:
    """The default's schedule beginning at each decision token, against Best-of-N."""
    columns = {side: f"{AHEAD}, {side.objective.name} (95 %)" for side in sides(frames)}
    rows = []
    for position, part in frames.prefixes.groupby("position"):
        runs = frames.moved(parse_schedule(f"geometric:{int(position)},2"))
        if runs.empty:  # it also cuts at tokens that the grid lacks
            continue
        growing = part[part.live.astype(bool)]
        taus = [kendall(prompt.score, prompt.final) for _, prompt in growing.groupby("prompt")]
        row = {
            "first decision token": int(position),
            "Kendall tau there (95 %)": mean(taus),
            "tokens": runs.tokens.mean(),
        }
        leads = {name: mean(side.ahead(runs, side.prompts)) for side, name in columns.items()}
        rows.append(row | leads)
    table = pd.DataFrame(rows)

    def draw(axes: Axes) -> None:
        positions = table["first decision token"]
        for (side, column), color in zip(columns.items(), charts.PALETTE, strict=False):
            charts.band(axes, positions, table[column], side.objective.name, color)
        axes.axhline(0, color=charts.GREY, linewidth=0.8)
        charts.log2_axis(axes, "first decision token", positions)
        axes.set_ylabel(f"{frames.reward}, ahead of Best-of-N")

    title = f"Lead of the default over Best-of-N at equal tokens in {frames.reward}, by first cut"
    drawn = (Chart("first-tokens", title, draw),) if rows else ()
    caption = f"The first decision token from which rejection pays, by {frames.reward}"
    return Study("first_tokens", caption, table, drawn)


def pays_from(table: pd.DataFrame, objective: Objective) -> int | None:
    """The first decision token with which the default is ahead beyond chance, of `first_tokens`.

    With every later one the default is not behind.
    """
    first = None
    column = f"{AHEAD}, {objective.name} (95 %)"
    rows: Sequence[Any] = [] if table.empty else table[["first decision token", column]].to_numpy()
    for position, ahead in rows[::-1]:
        if ahead.value < 0:
            break
        first = int(position) if ahead.low > 0 else first
    return first
