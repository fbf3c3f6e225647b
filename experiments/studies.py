"""The studies of the paper: functions from data frames to a table and charts, without a model.

`frontier` has the study of whether rejection pays at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from experiments import charts
from experiments.frames import SETTING, Frames
from experiments.replay import Setting, decision_tokens, replay
from experiments.statistics import (
    Estimate,
    bootstrap,
    expected_first,
    expected_saving,
    kendall,
    matched_cost,
    mean,
    pearson,
    resampled,
    share,
)
from experiments.trajectories import FloatArray, IntArray
from orchestrator.loop.rejection import num_kept
from specrej.client.options import parse_schedule

EXPECTED = "expected if rejection ignores length"
BOUND = "bound, all answers as long as the limit"
RATIO = "tokens, ratio (95 %)"
SCORE = "improvement score (95 %)"
_SURVIVAL_ALPHAS = (0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Chart:
    """`name` is part of a file's name; `title` describes the chart for screen readers."""

    name: str
    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Study:
    """A table whose cells are numbers, texts and `Estimate`s, and charts of it."""

    name: str
    caption: str
    table: pd.DataFrame
    charts: tuple[Chart, ...] = ()


def doublings(n: int) -> list[int]:
    """1, 2, 4, ... and `n`."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def pivot(full: pd.DataFrame, column: str, ns: Any = slice(None)) -> FloatArray:
    """[prompts, n] of a column of `Frames.full`."""
    table = full.pivot(index="prompt", columns="n", values=column).dropna(axis=1)
    values: FloatArray = table.loc[:, ns].to_numpy()
    return values


def best_of_n(frames: Frames) -> Study:
    """Reward and tokens of Best-of-N by N, averaged exactly over all draws of N answers."""
    single = pivot(frames.full, "reward", [1])[:, 0]
    rows = []
    for n in doublings(frames.n):
        of_n = frames.full[frames.full.n == n]
        rows.append(
            {
                "N": n,
                "mean reward of the best (95 %)": mean(of_n.reward),
                "gain over one answer (95 %)": mean(of_n.reward.to_numpy() - single),
                "tokens": of_n.tokens.mean(),
            }
        )
    table = pd.DataFrame(rows)

    def draw(axes: Axes) -> None:
        charts.band(axes, table["N"], table.iloc[:, 1], "Best-of-N (shaded: 95 %)", charts.ORANGE)
        charts.log2_axis(axes, "N, answers per prompt", table["N"])
        axes.set_ylabel(frames.reward)

    title = f"Mean {frames.reward} of the best of N answers, by N"
    caption = f"Best-of-N by {frames.reward}"
    return Study("best_of_n", caption, table, (Chart("best-of-n", title, draw),))


def equal_reward(frames: Frames) -> Study:
    """The N that Best-of-N needs for the reward of each setting, and the ratio of the costs.

    The ratio of tokens has two factors: "tokens saved at equal N", which follows from lengths and
    schedule if rejection ignores length, and "part of N kept", which is 1 if no best answer was
    rejected. "outside what was measured": "beyond" where the largest N is not as good, "below 1"
    where one answer is, or the share of resampled prompts with either.
    """
    ns = doublings(frames.n)
    rewards = pivot(frames.full, "reward", ns)
    single = pivot(frames.full, "tokens", [1])[:, 0]
    rows = []
    for (n, alpha, schedule), runs in frames.runs.groupby(SETTING, sort=False):
        row = {"N": int(n), "alpha": alpha, "schedule": schedule}
        matched = _matched(runs, rewards, single, ns)
        rows.append(row | matched | _expected(alpha, schedule, frames))
    table = pd.DataFrame(rows)
    largest = table[table["N"] == table["N"].max()]

    def draw(axes: Axes) -> None:
        colors = zip(largest.groupby("schedule", sort=False), charts.PALETTE, strict=False)
        for (schedule, part), color in colors:
            finite = part[[math.isfinite(ratio.value) for ratio in part[RATIO]]]
            charts.band(axes, finite["alpha"], finite[RATIO], str(schedule), color)
            axes.plot(part["alpha"], part[EXPECTED], ":", color=color, linewidth=1)
        axes.axhline(1, color=charts.GREY, linewidth=0.8)
        axes.set_xlabel(f"alpha (dotted: {EXPECTED})")
        charts.log_axis_up(axes, "times fewer tokens")

    title = f"Tokens of Best-of-N for equal {frames.reward} over those of rejection, by alpha"
    caption = f"Compute for equal {frames.reward}: Best-of-N over Speculative Rejection"
    return Study("matched", caption, table, (Chart("matched", title, draw),))


def _matched(
    runs: pd.DataFrame, rewards: FloatArray, single: FloatArray, ns: list[int]
) -> dict[str, Any]:
    """rewards: [prompts, ns] of Best-of-N; single: [prompts] mean tokens of one answer."""
    reward, tokens = runs.reward.to_numpy(), runs.tokens.to_numpy()

    def matched_n(prompts: IntArray) -> FloatArray:
        drawn = np.atleast_2d(prompts)
        n = matched_cost(ns, rewards[drawn].mean(axis=1), reward[drawn].mean(axis=1))
        return n.reshape(prompts.shape[:-1])

    def ratio(prompts: IntArray) -> FloatArray:
        needed = matched_n(prompts) * single[prompts].mean(axis=-1)
        ratios: FloatArray = needed / tokens[prompts].mean(axis=-1)
        return ratios

    n = bootstrap(len(runs), matched_n)
    draws = resampled(len(runs), matched_n)
    share_outside = float(((draws <= 1) | np.isinf(draws)).mean())
    outside = f"{share_outside:.0%} of draws" if share_outside else ""
    if math.isinf(n.value):
        outside = "beyond"
    elif n.value <= 1:
        outside = "below 1"
    return {
        "as good as Best-of-N with N = (95 %)": n,
        "tokens saved at equal N": runs.full_tokens.sum() / runs.tokens.sum(),
        "part of N kept": n.value / runs.n.iloc[0] if math.isfinite(n.value) else math.nan,
        RATIO: bootstrap(len(runs), ratio),
        "outside what was measured": outside,
    }


def _expected(alpha: float, schedule: str, frames: Frames) -> dict[str, float]:
    """What lengths and planned decision tokens alone say; nothing for the memory schedule."""
    planned = parse_schedule(schedule)
    if planned.kind == "memory":
        return {EXPECTED: math.nan, BOUND: math.nan}
    ends = decision_tokens(planned, frames.max_tokens)
    return {
        EXPECTED: expected_saving(frames.lengths, alpha, ends),
        BOUND: expected_saving(np.full(1, frames.max_tokens), alpha, ends),
    }


def correlation(frames: Frames) -> Study:
    """How well the score of a beginning predicts that of the answer, by decision token.

    Correlations are within each prompt, over the answers that continue, averaged over prompts. The
    survival is of the prompt's best answer, at one cut; an answer that has ended cannot be lost.
    """
    rows = [
        {"decision token": int(position), **_predicts(part)}
        for position, part in frames.prefixes.groupby("position")
    ]
    table = pd.DataFrame(rows)

    def correlations(axes: Axes) -> None:
        lines = (("Pearson (95 %)", charts.BLUE), ("Kendall tau (95 %)", charts.ORANGE))
        for column, color in lines:
            charts.band(axes, table["decision token"], table[column], column[:-7], color)
        charts.log2_axis(axes, "decision token", table["decision token"])
        axes.set_ylabel("correlation with the final reward")
        axes.set_ylim(top=1)

    reward = frames.reward
    drawn = (
        Chart("scatter", f"Partial against final {reward}", partial(_scatter, frames.prefixes)),
        Chart("correlation", f"Correlation of partial with final {reward}", correlations),
    )
    return Study("correlation", f"Partial against final {reward}", table, drawn if rows else ())


def _predicts(part: pd.DataFrame) -> dict[str, Any]:
    """Columns of `correlation` at one decision token."""
    prompts = [prompt for _, prompt in part.groupby("prompt")]
    growing = [prompt[prompt.live.astype(bool)] for prompt in prompts]
    pairs = [(live.score.to_numpy(), live.final.to_numpy()) for live in growing]
    # Of an answer that has ended, the whole is in the ranking: no cut loses it for good.
    ranks = [
        _rank_of_best(prompt) if prompt.live[prompt.best.astype(bool)].any() else 0
        for prompt in prompts
    ]
    return {
        "share still growing": np.mean([prompt.live.mean() for prompt in prompts]),
        "Pearson (95 %)": mean([pearson(*pair) for pair in pairs]),
        "Kendall tau (95 %)": mean([kendall(*pair) for pair in pairs]),
        **{
            f"best survives alpha {alpha:g} (95 %)": share(
                rank < num_kept(len(prompt), alpha)
                for rank, prompt in zip(ranks, prompts, strict=True)
            )
            for alpha in _SURVIVAL_ALPHAS
        },
    }


def _rank_of_best(prompt: pd.DataFrame) -> int:
    """The rank of the best answer among the prompt's scores; of equal ones the first is ahead."""
    order = np.argsort(-prompt.score.to_numpy(dtype=float), kind="stable")
    return int(np.argmax(prompt.best.to_numpy(dtype=bool)[order]))


def _scatter(prefixes: pd.DataFrame, axes: Axes) -> None:
    """Partial and final scores less their prompt's means: prompts differ more than answers."""
    live = prefixes[prefixes.live.astype(bool)]
    centred = live[["score", "final"]] - live.groupby(["prompt", "position"])[
        ["score", "final"]
    ].transform("mean")
    positions = sorted(live.position.unique())
    for position, color in zip(
        positions[:: max(1, len(positions) // 3)], charts.PALETTE, strict=False
    ):
        points = centred[live.position == position]
        points = points.sample(min(len(points), 250), random_state=0)
        label = f"token {int(position)}"
        # As pixels: vector points would make up most of the file.
        style: dict[str, Any] = {"s": 5, "color": color, "alpha": 0.5, "rasterized": True}
        axes.scatter(points.score, points.final, label=label, **style)
    axes.set(xlabel="partial, less the prompt's mean", ylabel="final, less the prompt's mean")


def improvement(frames: Frames) -> Study:
    """The paper's score against relative compute.

    The score is 100 x (1 + mean over prompts of (reward - best of base) / (best of base - worst of
    base)), Sun et al., arXiv 2410.20290, section 5: 100 is as good as Best-of-N of a base N, here
    an eighth of the answers, 200 better by the base's whole range. Compute is in tokens, relative
    to the base's.
    """
    base_n = min(frames.n, max(2, frames.n // 8))
    base = frames.full[frames.full.n == base_n]
    ns = [n for n in doublings(frames.n) if n * 4 >= base_n]
    full = frames.full[frames.full.n.isin(ns)].assign(
        method="Best-of-N", alpha=0.0, schedule="no cuts"
    )
    fast = frames.runs.assign(method="Speculative Rejection")
    rows = [
        {
            **{"method": method, "N": int(n), "alpha": alpha, "schedule": schedule},
            SCORE: _improvement_score(of.reward.to_numpy(), base),
            "relative tokens": of.tokens.mean() / base.tokens.mean(),
        }
        for part in (full, fast)
        for (method, n, alpha, schedule), of in part.groupby(["method", *SETTING], sort=False)
    ]
    table = pd.DataFrame(rows)
    of = f"{frames.reward}, against Best-of-{base_n}"
    chart = Chart("improvement-tokens", f"Improvement score: {of}", partial(_scores, table))
    return Study("improvement", f"Improvement score and relative compute: {of}", table, (chart,))


def second_judge(frames: Frames) -> Study:
    """What other rewards, which no cut used, say of the answers that the default chooses.

    Gains are over one answer, averaged over prompts. Best-of-N chooses by the same reward; with
    equal tokens, and with equal N, it is averaged exactly over all draws.
    """
    n, alpha, schedule = frames.default.iloc[0][SETTING]
    setting = Setting(int(n), float(alpha), parse_schedule(schedule), frames.reward)
    rows = []
    for judge in (name for name in frames.prompts[0].reward_names if name != frames.reward):
        gains = []
        for prompt in frames.prompts if setting.schedule.kind != "memory" else ():
            judged = prompt.final(judge)
            order = np.argsort(-prompt.final(frames.reward), kind="stable")
            of_n = expected_first(judged[order])[1:] - judged.mean()
            run = replay(prompt, setting)
            equal = run.generated_tokens / prompt.num_tokens.mean()
            at_equal = np.interp(equal, np.arange(1, len(of_n) + 1), of_n)
            gains.append((judged[run.answer] - judged.mean(), at_equal, of_n[int(n) - 1]))
        if gains:
            of_default, at_equal, of_same = np.array(gains).T
            row = {"judge": judge, "gain of the default's answers (95 %)": mean(of_default)}
            row["of Best-of-N's, equal tokens (95 %)"] = mean(at_equal)
            row["of Best-of-N's, equal N (95 %)"] = mean(of_same)
            rows.append(row | {"default less equal tokens (95 %)": mean(of_default - at_equal)})
    caption = f"Answers chosen by {frames.reward}, judged by other rewards"
    return Study("second_judge", caption, pd.DataFrame(rows))


def _improvement_score(rewards: FloatArray, base: pd.DataFrame) -> Estimate:
    """Prompts with equal rewards of all base answers are left out."""
    best, worst = base.reward.to_numpy(), base.worst.to_numpy()
    varies = best - worst > 1e-9 * np.abs(best)  # equal ones may differ by rounding
    return mean(100 * (1 + (rewards - best)[varies] / (best - worst)[varies]))


def _scores(table: pd.DataFrame, axes: Axes) -> None:
    points = table.assign(score=[score.value for score in table[SCORE]])
    fast = points[points.method != "Best-of-N"]
    colors = (charts.BLUE, charts.GREEN, charts.PURPLE)
    for (n, part), color in zip(fast.groupby("N"), colors, strict=False):
        style: dict[str, Any] = {"color": color, "markersize": 3, "label": f"Rejection, N = {n}"}
        axes.plot(part["relative tokens"], part.score, "o", **style)
    full = points[points.method == "Best-of-N"]
    axes.plot(full["relative tokens"], full.score, "o-", color=charts.ORANGE, label="Best-of-N")
    charts.log2_axis(axes, "relative tokens")
    axes.set_ylabel("improvement score")
