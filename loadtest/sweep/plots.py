"""Which plots there are: from results to series."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.sweep import svg
from loadtest.sweep.figures import Cell, Estimate
from loadtest.sweep.journal import Request
from loadtest.sweep.plan import Condition
from loadtest.sweep.results import FAST, FULL, Results
from loadtest.sweep.svg import Axis, Point, Rule, Series

NAMES = {FAST: "Speculative Rejection", FULL: "Best-of-N"}
COLORS = {FAST: "#0b62a4", FULL: "#c2500c"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot and its legend, as HTML, under a short heading."""

    heading: str
    picture: str
    legend: str


def latency(results: Results, condition: Condition, heading: str) -> Drawn:
    """p50 and p95 against N."""
    series = [
        _against_n(results, condition, algorithm, name, percentile, dashed)
        for algorithm in NAMES
        for name, percentile, dashed in (
            ("p50", lambda cell: cell.p50, False),
            ("p95", lambda cell: cell.p95, True),
        )
    ]
    slo_s = results.settings.slo_s
    highest = max((point.y for each in series for point in each.points), default=0.0)
    # A level far above all lines would press them flat.
    rules = [Rule(slo_s, f"good: within {slo_s:g} s")] if highest > slo_s / 4 else []
    return _drawn(heading, _n_axis(results), Axis("seconds", log=True), series, rules)


def first_round(results: Results) -> Drawn:
    """Its median against N."""
    return _of_alone(
        results, "Time to the first round", Axis("seconds", log=True), lambda cell: cell.first_round
    )


def tokens(results: Results) -> Drawn:
    """Their mean against N."""
    axis = Axis("tokens generated per request", log=True)
    return _of_alone(results, "Tokens", axis, lambda cell: cell.tokens)


def reward(results: Results) -> Drawn:
    """Its mean against N."""
    return _of_alone(results, "Reward against N", Axis("reward"), lambda cell: cell.reward)


def reward_by_latency(results: Results) -> Drawn:
    """A point per N."""
    series = [
        Series(
            NAMES[algorithm],
            COLORS[algorithm],
            _priced(results, algorithm),
            labels_above=algorithm == FAST,
        )
        for algorithm in NAMES
    ]
    x = Axis("median seconds", log=True)
    return _drawn("Reward against latency", x, Axis("reward"), series)


def goodput(results: Results) -> Drawn:
    """Good answers per second at saturation."""
    series = [
        Series(
            NAMES[algorithm],
            COLORS[algorithm],
            tuple(
                Point(cell.n, cell.goodput_per_s, note=f"N={cell.n}: {cell.goodput_per_s:.3g}/s")
                for cell in _cells(results, Condition.SATURATED, algorithm)
            ),
        )
        for algorithm in NAMES
    ]
    y = Axis("good answers per second", from_zero=True)
    return _drawn("Goodput at saturation", _n_axis(results), y, series)


def good_share(results: Results) -> Drawn:
    """Good answers of all that were asked for, at a fixed rate."""
    series = [
        _against_n(
            results, Condition.STEADY, algorithm, "", lambda cell: _scaled(cell.good_share, 100)
        )
        for algorithm in NAMES
    ]
    y = Axis("% answered in time", ticks=(0, 20, 40, 60, 80, 100), from_zero=True)
    heading = f"In time at {results.settings.rate:g} requests per second"
    return _drawn(heading, _n_axis(results), y, series)


def slots(results: Results) -> Drawn | None:
    """Of one request of each algorithm, over time; None without one."""
    if not results.examples:
        return None
    series = [
        Series(NAMES[name], COLORS[name], _sawtooth(request), marks=False)
        for name, request in zip(NAMES, results.examples, strict=True)
    ]
    x, y = Axis("seconds", from_zero=True), Axis("slots of the request", from_zero=True)
    return _drawn(f"Slots over time, N = {results.examples[0].n}", x, y, series)


def _of_alone(results: Results, heading: str, y: Axis, figure: Callable[[Cell], Estimate]) -> Drawn:
    series = [_against_n(results, Condition.ALONE, name, "", figure) for name in NAMES]
    return _drawn(heading, _n_axis(results), y, series)


def _drawn(
    heading: str, x: Axis, y: Axis, series: list[Series], rules: list[Rule] | None = None
) -> Drawn:
    there = [each for each in series if each.points]
    title = f"{heading}: {y.label} against {x.label}"
    return Drawn(heading, svg.plot(title, x, y, there, rules or []), svg.legend(there))


def _n_axis(results: Results) -> Axis:
    return Axis("N, candidates per request", log=True, ticks=tuple(results.settings.ns))


def _cells(results: Results, condition: Condition, algorithm: str) -> list[Cell]:
    found = (results.cell(condition, algorithm, n) for n in results.settings.ns)
    return [cell for cell in found if cell]


def _against_n(
    results: Results,
    condition: Condition,
    algorithm: str,
    name: str,
    figure: Callable[[Cell], Estimate],
    dashed: bool = False,
) -> Series:
    points = tuple(
        _point(cell.n, figure(cell), name) for cell in _cells(results, condition, algorithm)
    )
    label = f"{NAMES[algorithm]} {name}".strip()
    return Series(label, COLORS[algorithm], points, dashed)


def _point(n: int, value: Estimate, name: str) -> Point:
    note = f"N={n} {name}: {value.value:.4g}"
    if not math.isnan(value.low):
        note += f" ({value.low:.4g} to {value.high:.4g})"
    return Point(n, value.value, value.low, value.high, note)


def _priced(results: Results, algorithm: str) -> tuple[Point, ...]:
    return tuple(
        Point(cell.p50.value, cell.reward.value, note=f"N={cell.n}", label=str(cell.n))
        for cell in _cells(results, Condition.ALONE, algorithm)
        if math.isfinite(cell.p50.value)
    )


def _scaled(value: Estimate, by: float) -> Estimate:
    return Estimate(value.value * by, value.low * by, value.high * by)


def _sawtooth(request: Request) -> tuple[Point, ...]:
    """Up while candidates grow, down where a round's cut frees slots; at the end all are free.

    Candidates that end hold nothing afterwards: the last round's height is what those that were
    left would hold at its end.
    """
    points = [Point(0.0, request.prompt_tokens)]
    live = request.n
    for seen in request.rounds:
        last = seen is request.rounds[-1]
        grown = request.prompt_tokens + live * seen.decision_token
        points.append(Point(seen.at_s, grown if last else seen.session_slots))
        points.append(Point(seen.at_s, 0.0 if last else seen.session_slots - seen.freed_slots))
        live = seen.num_live
    return tuple(points)
