"""Does rejection pay? Every setting against Best-of-N at equal tokens, and a recommendation.

At equal tokens, Best-of-N has fewer answers and none of them is rejected: as many whole answers as
the setting's tokens are worth, a fraction being the chance of one more. A setting is *ahead* by the
difference of rewards; below 0, Best-of-N is the better use of the tokens.

The best of many settings is partly luck. So settings are chosen on one half of the prompts and
judged on the other.
"""

from __future__ import annotations

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

BEST_OF_N = "Best-of-N"
AHEAD = "ahead of Best-of-N at equal tokens (95 %)"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`chosen`: a setting, or Best-of-N; `why`; figures of the default."""

    chosen: str
    why: str
    reward: Estimate
    regret: Estimate
    ahead: Estimate


class Comparison:
    """All settings against Best-of-N. Prompts are numbered as in the frames."""

    def __init__(self, runs: pd.DataFrame, full: pd.DataFrame) -> None:
        self.settings = [
            of.set_index("prompt", drop=False) for _, of in runs.groupby(SETTING, sort=False)
        ]
        self._full = full
        self._rewards = pivot(full, "reward")
        self._single = pivot(full, "tokens", [1])[:, 0]
        self.prompts = np.arange(len(self._rewards))

    def ahead(self, runs: pd.DataFrame, prompts: IntArray) -> FloatArray:
        """[prompts] the reward of a setting less that of Best-of-N with its mean tokens there."""
        own = runs.reward.to_numpy()[prompts]
        tokens = runs.tokens.to_numpy()[prompts]
        n = float(tokens.mean() / self._single[prompts].mean())
        at, last = min(max(n, 1.0), self._rewards.shape[1]) - 1, self._rewards.shape[1] - 1
        below, part = int(at), at % 1
        first, more = (self._rewards[prompts, min(row, last)] for row in (below, below + 1))
        lead: FloatArray = own - (1 - part) * first - part * more
        return lead

    def best(self, prompts: IntArray, budgets: FloatArray) -> pd.DataFrame | None:
        """The setting of the highest mean reward on these prompts within their budget of tokens."""
        most = budgets[prompts].mean() * (1 + 1e-9)
        fitting = [runs for runs in self.settings if runs.tokens.to_numpy()[prompts].mean() <= most]
        rewards = [runs.reward.to_numpy()[prompts].mean() for runs in fitting]
        return fitting[int(np.argmax(rewards))] if fitting else None

    def held_out(self, budgets: FloatArray) -> tuple[list[str], pd.DataFrame] | None:
        """The names of the best settings of both halves, and their figures on the other half.

        Figures are by prompt: reward and ahead. None if no setting is within the budget, or if
        there are fewer than eight prompts.
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
            rewards = best.reward.to_numpy()[judged_on]
            figures = {"reward": rewards, "ahead": self.ahead(best, judged_on)}
            parts.append(pd.DataFrame(figures, index=judged_on))
        return names, pd.concat(parts).sort_index()

    def recommend(self, default: pd.DataFrame) -> Recommendation:
        """A setting for the default's tokens; Best-of-N unless one is ahead of it."""
        default = default.set_index("prompt", drop=False)
        lead = mean(self.ahead(default, self.prompts))
        chosen, why = self._choose(default, lead)
        return Recommendation(chosen, why, mean(default.reward), self._regret(default), lead)

    def _regret(self, runs: pd.DataFrame) -> Estimate:
        """A loss is on average at most the gain over one answer: survivors are not worse."""
        one, most = (self._full[self._full.n == n].reward.mean() for n in (1, runs.n.iloc[0]))
        return bounded_mean(runs.regret, most - one)

    def _choose(self, default: pd.DataFrame, lead: Estimate) -> tuple[str, str]:
        budgets = default.tokens.to_numpy()
        best, held_out = self.best(self.prompts, budgets), self.held_out(budgets)
        if best is None or held_out is None:
            return BEST_OF_N, f"fewer than {2 * MIN_PROMPTS} prompts show nothing else"
        judged = held_out[1]
        gain = mean(judged.reward.to_numpy() - default.reward.to_numpy())
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
        for n in doublings(self._rewards.shape[1]):
            of_n = self._full[self._full.n == n].assign(alpha=0.0, schedule="no cuts")
            rows.append(self._row(of_n, Estimate(0.0), Estimate(0.0)))
        rows += [
            self._row(runs, mean(self.ahead(runs, self.prompts)), self._regret(runs))
            for runs in self.settings
        ]
        return pd.DataFrame(rows)

    def _row(self, of: pd.DataFrame, ahead: Estimate, regret: Estimate) -> dict[str, Any]:
        return {
            "N": of.n.iloc[0],
            **of.iloc[0][["alpha", "schedule"]],
            "tokens": of.tokens.mean(),
            "reward (95 %)": mean(of.reward),
            AHEAD: ahead,
            "regret (95 %)": regret,
        }


def name_of(runs: pd.DataFrame) -> str:
    """A setting as text."""
    first = runs.iloc[0]
    return f"N = {first.n}, alpha {first.alpha:g}, {first.schedule}"


def frontier(frames: Frames) -> Study:
    """All settings, with a chart of reward against tokens: Best-of-N, the settings that no other
    beats, and the default."""
    table = Comparison(frames.runs, frames.full).table()
    points = table.assign(mean=[one.value for one in table["reward (95 %)"]])

    def draw(axes: Axes) -> None:
        full = points[points.schedule == "no cuts"]
        fast = points[points.schedule != "no cuts"].sort_values(["tokens", "mean"])
        best = fast[fast["mean"] > fast["mean"].shift(fill_value=-np.inf).cummax()]
        lines = ((full, charts.ORANGE, BEST_OF_N), (best, charts.BLUE, "Speculative Rejection"))
        for part, color, label in lines:
            axes.plot(part.tokens, part["mean"], "o-", color=color, markersize=3, label=label)
        n, alpha, schedule = frames.default.iloc[0][SETTING]
        at = (points["N"] == n) & (points.alpha == alpha) & (points.schedule == schedule)
        default = points[at]
        axes.plot(default.tokens, default["mean"], "D", color=charts.PURPLE, label="the default")
        charts.log2_axis(axes, "tokens per prompt")
        axes.set_ylabel(frames.reward)

    chart = Chart("frontier", f"Mean {frames.reward}, against tokens", draw)
    return Study("frontier", f"All settings: {frames.reward}", table, (chart,))


def first_tokens(frames: Frames) -> Study:
    """The default's schedule beginning at each decision token, against Best-of-N."""
    comparison = Comparison(frames.runs, frames.full)
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
            AHEAD: mean(comparison.ahead(runs, comparison.prompts)),
        }
        rows.append(row)
    table = pd.DataFrame(rows)

    def draw(axes: Axes) -> None:
        positions = table["first decision token"]
        charts.band(axes, positions, table[AHEAD], "the default, moved", charts.BLUE)
        axes.axhline(0, color=charts.GREY, linewidth=0.8)
        charts.log2_axis(axes, "first decision token", positions)
        axes.set_ylabel(f"{frames.reward}, ahead of Best-of-N")

    title = f"Lead of the default over Best-of-N at equal tokens in {frames.reward}, by first cut"
    drawn = (Chart("first-tokens", title, draw),) if rows else ()
    caption = f"The first decision token from which rejection pays, by {frames.reward}"
    return Study("first_tokens", caption, table, drawn)


def pays_from(table: pd.DataFrame) -> int | None:
    """The first decision token with which the default is ahead beyond chance, of `first_tokens`.

    With every later one the default is not behind.
    """
    first = None
    rows: Sequence[Any] = [] if table.empty else table[["first decision token", AHEAD]].to_numpy()
    for position, ahead in rows[::-1]:
        if ahead.value < 0:
            break
        first = int(position) if ahead.low > 0 else first
    return first
