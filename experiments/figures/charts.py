"""The charts of each study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    Drawing,
    Picture,
)
from experiments.studies.analysis import Analysis
from experiments.studies.anatomy import Anatomy
from experiments.studies.best_of_n import BestOfN
from experiments.studies.frontier import Frontier, ObjectiveFrontier
from experiments.studies.improvement import FAST, FULL, Improvement
from experiments.studies.matched import EXPECTED, Match, Matched
from experiments.studies.perplexity import Perplexity
from experiments.studies.prefixes import ALPHAS, Correlation, DecisionToken, Failures

_CLOUDS = 4
_TIMED = "seconds"
_LEAST_SCORES = 10.0  # span of the score's axis, a tenth of the base's range

# By study, named as the fields of Analysis.
Pictures = dict[str, tuple[Picture, ...]]


def draw(analysis: Analysis) -> Pictures:
    """All charts of an analysis; a study that was not possible has none."""
    drawings: dict[str, Callable[[Any, str], tuple[Picture, ...]]] = {
        "matched": matched,
        "lengths": lambda result, name: (),
        "best_of_n": best_of_n,
        "frontier": frontier,
        "correlation": correlation,
        "perplexity": perplexity,
        "improvement": improvement,
        "anatomy": anatomy,
        "failures": failures,
    }
    results = {study: getattr(analysis, study) for study in drawings}
    return {
        study: drawings[study](result, analysis.slug) if result else ()
        for study, result in results.items()
    }


def matched(result: Matched, name: str) -> tuple[Picture, ...]:
    """The ratio at equal reward by alpha, for the largest N; dotted: the expected saving.

    Of the first schedules, as many as there are colours.
    """
    n = max(match.n for match in result.matches)
    matches = [match for match in result.matches if match.n == n]

    def chart(axes: Axes) -> None:
        schedules = list(dict.fromkeys(match.schedule for match in matches))
        for i, schedule in enumerate(schedules[: len(PALETTE)]):
            _ratios(axes, [match for match in matches if match.schedule == schedule], i)
        plotting.log_axis_up(axes, "times fewer tokens")
        axes.set_xlabel(f"alpha (dotted: {EXPECTED})")
        axes.axhline(1, color=GREY, linewidth=0.8)

    title = (
        f"Tokens that Best-of-N needs for equal {result.reward}, over those of Speculative "
        f"Rejection with N = {n}, by alpha; answers of at most {result.max_tokens:,} tokens"
    )
    heading = f"Equal {result.reward}, fewer tokens: N = {n}"
    return (plotting.picture(f"{name}-matched", heading, title, chart),)


def _ratios(axes: Axes, matches: Sequence[Match], index: int) -> None:
    color = PALETTE[index % len(PALETTE)]
    finite = [match for match in matches if math.isfinite(match.ratio.value)]
    # Shifted sideways, so that intervals of different schedules do not overlap.
    x = [match.alpha + 0.012 * (index - 2) for match in finite]
    y = [match.ratio.value for match in finite]
    axes.plot(x, y, "o-", color=color, markersize=3, label=matches[0].schedule)
    for at, match in zip(x, finite, strict=True):
        if math.isfinite(match.ratio.low) and math.isfinite(match.ratio.high):
            axes.plot([at, at], [match.ratio.low, match.ratio.high], color=color, linewidth=0.8)
    expected = [(match.alpha, match.expected) for match in matches if match.expected > 0]
    if expected:
        axes.plot(*zip(*expected, strict=True), ":", color=color, linewidth=1)


def best_of_n(result: BestOfN, name: str) -> tuple[Picture, ...]:
    """Reward against N."""
    ns = [point.n for point in result.points]

    def chart(axes: Axes) -> None:
        rewards = [point.reward for point in result.points]
        plotting.band(axes, ns, rewards, "Best-of-N (shaded: 95 %)", ORANGE)
        plotting.log2_axis(axes, "N, answers per prompt", ns)
        axes.set_ylabel(result.reward)

    heading = f"The gain of doubling N: {result.reward}"
    title = f"Mean {result.reward} of the best of N answers, by N"
    return (plotting.picture(f"{name}-best-of-n", heading, title, chart),)


def frontier(result: Frontier, name: str) -> tuple[Picture, ...]:
    """Reward against tokens by objective, and the lead by the first decision token."""
    firsts = result.first_tokens

    def lead(axes: Axes) -> None:
        positions = [first.position for first in firsts]
        for side, color in enumerate((BLUE, GREEN)):
            ahead = [first.ahead[side] for first in firsts]
            plotting.band(axes, positions, ahead, result.sides[side].objective, color)
        axes.axhline(0, color=GREY, linewidth=0.8)
        plotting.log2_axis(axes, "first decision token", positions)
        axes.set_ylabel(f"{result.reward}, ahead of Best-of-N")

    heading = f"From which token rejection pays: {result.reward}"
    title = (
        f"Lead of the default over Best-of-N at equal tokens in {result.reward}, by its first cut"
    )
    pictures = [_frontier(result.reward, side, name) for side in result.sides]
    if firsts:
        pictures.append(plotting.picture(f"{name}-first-tokens", heading, title, lead))
    return tuple(pictures)


def _frontier(reward: str, side: ObjectiveFrontier, name: str) -> Picture:
    def chart(axes: Axes) -> None:
        lines = ((side.best_of_n, ORANGE, FULL), (side.undominated, BLUE, FAST))
        for points, color, label in lines:
            x, y = ([getattr(point, field) for point in points] for field in ("tokens", "value"))
            axes.plot(x, y, "o-", color=color, markersize=3, label=label)
        default = (side.default.tokens, side.default.value)
        axes.plot(*default, "D", color=PURPLE, label="the default")
        plotting.log2_axis(axes, "tokens per prompt")
        axes.set_ylabel(reward)

    heading = f"Reward against tokens: {reward}, {side.objective}"
    title = f"Mean {reward} against tokens, {side.objective}, of settings that no other beats"
    slug = side.objective.split()[0]
    return plotting.picture(f"{name}-frontier-{slug}", heading, title, chart)


def correlation(result: Correlation, name: str) -> tuple[Picture, ...]:
    """Scatters at four decision tokens; correlations and survival at all of them."""
    tokens = result.decision_tokens
    if not tokens:
        return ()
    positions = [token.position for token in tokens]

    def correlations(axes: Axes) -> None:
        plotting.band(axes, positions, [token.pearson for token in tokens], "Pearson", BLUE)
        plotting.band(axes, positions, [token.kendall for token in tokens], "Kendall tau", ORANGE)
        plotting.log2_axis(axes, "decision token", positions)
        axes.set_ylabel("correlation with the final reward")
        axes.set_ylim(top=1)

    def survival(axes: Axes) -> None:
        for i, (alpha, color) in enumerate(zip(ALPHAS, (GREEN, PURPLE), strict=True)):
            shares = [token.survival[i] for token in tokens]
            plotting.band(axes, positions, shares, f"alpha {alpha:g}", color)
            chances = [token.survival_by_chance(alpha) for token in tokens]
            label = f"alpha {alpha:g}, by chance"
            axes.plot(positions, chances, color=color, linestyle=":", label=label)
        plotting.log2_axis(axes, "decision token", positions)
        axes.set_ylabel("share of prompts")
        axes.set_ylim(0, 1.03)

    steps = {round(i * (len(tokens) - 1) / (_CLOUDS - 1)) for i in range(_CLOUDS)}
    clouds = [_cloud(tokens[step]) for step in sorted(steps)]
    heading = f"Partial against final {result.reward}"
    title = f"Correlation of partial with final {result.reward}, by decision token"
    share = f"Share of prompts in which the best answer by {result.reward} survives one cut"
    return (
        plotting.picture(
            f"{name}-clouds", heading, f"{heading} at {_CLOUDS} decision tokens", clouds, height=3.6
        ),
        plotting.picture(f"{name}-correlation", "How well a prefix predicts", title, correlations),
        plotting.picture(
            f"{name}-survival", "Does the best answer survive?", f"{share}, by token", survival
        ),
    )


def _cloud(token: DecisionToken) -> Drawing:
    def chart(axes: Axes) -> None:
        # As pixels: vector points would make up most of the file.
        axes.scatter(token.partial, token.final, s=5, color=BLUE, alpha=0.5, rasterized=True)
        axes.set_title(f"token {token.position}: r = {token.pearson.value:.2f}", fontsize=9)
        axes.set_xlabel("partial", fontsize=9)
        axes.set_ylabel("final", fontsize=9)
        axes.tick_params(labelsize=8.5)

    return chart


def perplexity(result: Perplexity, name: str) -> tuple[Picture, ...]:
    """Perplexity against speed-up: a point per alpha, and lines for Best-of-N."""
    fast = [row for row in result.rows if not math.isnan(row.alpha)]
    full = [row for row in result.rows if math.isnan(row.alpha) and row.n > 1]
    label = f"Speculative Rejection, N = {max((row.n for row in fast), default=0)}, by alpha"

    def chart(axes: Axes) -> None:
        points = [(row.speed_up.value, row.perplexity.value) for row in fast]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=BLUE, label=label)
        axes.margins(y=0.15)  # room for the line's name above the first points
        small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5}
        for row, point in zip(fast, points, strict=True):
            axes.annotate(f"{row.alpha:g}", point, (0, -11), ha="center", **small)
        for row in full:
            level = row.perplexity.value
            axes.axhline(level, color=GREY, linestyle=":")
            place = ("axes fraction", "data")
            axes.annotate(f"Best-of-{row.n}", (0, level), (3, 3), xycoords=place, **small)
        plotting.log2_axis(axes, "times fewer tokens than Best-of-N, same N")
        axes.set_ylabel("perplexity (lower is better)")

    title = "Perplexity of the best answer against speed-up, a point per alpha"
    return (plotting.picture(f"{name}-perplexity", "Probable answers, sooner", title, chart),)


def improvement(result: Improvement, name: str) -> tuple[Picture, ...]:
    """A chart per unit of compute; without FLOPs or seconds where they are unknown."""
    pictures = [_scores(result, name, "tokens", result.points, "tokens")]
    if result.model:
        pictures.append(_scores(result, name, "FLOPs", result.points, "flops"))
    if result.timed:
        pictures.append(_scores(result, name, _TIMED, result.timed, "seconds"))
    return tuple(pictures)


def _scores(
    result: Improvement, name: str, unit: str, points: Sequence[Any], field: str
) -> Picture:
    def plot(axes: Axes, marks: str, subset: Sequence[Any], **style: Any) -> None:
        compute = [getattr(point, field) for point in subset]
        axes.plot(compute, [point.score.value for point in subset], marks, **style)

    def chart(axes: Axes) -> None:
        fast = [point for point in points if point.method == FAST]
        ns = sorted({point.n for point in fast}, reverse=True)
        for n, color in zip(ns, (BLUE, GREEN, PURPLE), strict=False):
            style = {"color": color, "markersize": 3, "alpha": 0.75, "label": f"Rejection, N = {n}"}
            plot(axes, "o", [point for point in fast if point.n == n], **style)
        full = [point for point in points if point.method == FULL]
        plot(axes, "o-", full, color=ORANGE, label=FULL)
        plotting.log2_axis(axes, f"relative {unit}; Best-of-{result.base_n} is 1")
        plotting.least_span_up(axes, _LEAST_SCORES)
        axes.set_ylabel("improvement score")

    left_out = f"; {result.left_out}" if unit == _TIMED and result.left_out else ""
    heading = f"Score against {unit}: {result.reward}{left_out}"
    title = f"Improvement score against relative {unit}, by {result.reward}{left_out}"
    return plotting.picture(f"{name}-improvement-{unit.lower()}", heading, title, chart)


def anatomy(result: Anatomy, name: str) -> tuple[Picture, ...]:
    """Slots, live answers and rewards against length: the paper's first figure as three."""
    moments = result.moments

    def both(axes: Axes, field: str) -> None:
        lengths = [moment.length for moment in moments]
        full = [getattr(moment, f"full_{field}") for moment in moments]
        axes.plot(lengths, full, color=ORANGE, label=FULL)
        axes.plot(lengths, [getattr(moment, field) for moment in moments], color=BLUE, label=FAST)
        axes.set_xlabel("tokens generated of each answer")

    def slots(axes: Axes) -> None:
        both(axes, "slots")
        axes.axhline(result.slots, color=GREY, linestyle=":", label="capacity")
        plotting.log_axis_up(axes, "slots held")

    def live(axes: Axes) -> None:
        both(axes, "live")
        axes.set_ylabel("answers growing")
        axes.set_ylim(bottom=0)

    def rewards(axes: Axes) -> None:
        x = [point.length for point in result.rounds]
        low, quarter, middle, upper, high = zip(*(r.quantiles for r in result.rounds), strict=True)
        shade: dict[str, Any] = {"color": BLUE, "linewidth": 0}
        axes.fill_between(x, low, high, alpha=0.12, label="all ranked", **shade)
        axes.fill_between(x, quarter, upper, alpha=0.25, label="middle half", **shade)
        axes.plot(x, middle, "o-", color=BLUE, label="median")
        kept = [
            (point.length, point.kept_median) for point in result.rounds if point.kept_quantiles
        ]
        if kept:
            axes.plot(*zip(*kept, strict=True), "o--", color=ORANGE, label="median of the kept")
        plotting.log2_axis(axes, "tokens generated of each answer")
        axes.set_ylabel(result.reward)

    of = f"prompt {result.prompt_id}, N = {result.n}, alpha {result.alpha:g}"
    heading = f"Rewards at the cuts: {result.reward}"
    quantiles = f"Quantiles of partial rewards at each cut, {of}"
    return (
        plotting.picture(f"{name}-slots", "Memory", f"Slots held against length, {of}", slots),
        plotting.picture(f"{name}-live", "Batch size", f"Growing against length, {of}", live),
        plotting.picture(f"{name}-rewards", heading, quantiles, rewards),
    )


def failures(result: Failures, name: str) -> tuple[Picture, ...]:
    """Lines over decision tokens."""
    positions = [point.position for point in result.early]

    def early(axes: Axes) -> None:
        lines = (
            ("ended_share", "answers over by then", ORANGE),
            ("best_share", "best one over by then", GREEN),
            ("misled_share", "best one in lower half", BLUE),
        )
        for field, label, color in lines:
            shares = [getattr(point, field) for point in result.early]
            plotting.band(axes, positions, shares, label, color)
        plotting.log2_axis(axes, "decision token", positions)
        axes.set_ylabel("share")
        axes.set_ylim(0, 1.03)

    title = f"Answers over, and best answers misjudged by {result.reward}, by decision token"
    heading = "Early ends and misleading prefixes"
    return (plotting.picture(f"{name}-early", heading, title, early),)
