"""Small plots as SVG text: lines with bands, on linear or logarithmic axes. Knows no figures."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 420, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 48
_MARGIN = 0.04  # between the outermost points and the frame, in parts of the axis


@dataclass(frozen=True, slots=True)
class Point:
    """`y` may be infinite: it is drawn as an arrow at the top. `note` shows on pointing at it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    label: str = ""  # written beside it


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together; without marks where there are too many to tell apart."""

    name: str
    color: str
    points: tuple[Point, ...]
    dashed: bool = False
    marks: bool = True
    labels_above: bool = False  # of their points; below them otherwise


@dataclass(frozen=True, slots=True)
class Axis:
    """A label with its unit; `ticks` where they are known."""

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A level to compare with."""

    y: float
    label: str


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series], rules: Sequence[Rule] = ()) -> str:
    """One figure; `title` is for those who hear it read."""
    across = _Scale(x, [point.x for each in series for point in each.points])
    up = _Scale(y, [*_heights(series), *(rule.y for rule in rules)])
    place = _Place(across, up)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="plot">',
        f"<title>{html.escape(title)}</title>",
        *_grid(place, x, y),
        *(_rule(place, rule) for rule in rules),
        *(_band(place, each) for each in series),
        *(_line(place, each) for each in series),
        *(_mark(place, each, point) for each in series if each.marks for point in each.points),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def legend(series: Iterable[Series]) -> str:
    """A line of samples and names, in HTML."""
    return '<p class="legend">' + " ".join(map(_sample, series)) + "</p>"


def _sample(series: Series) -> str:
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    return (
        '<span><svg width="26" height="10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'stroke="{series.color}" stroke-width="2.5"{dash}/></svg> '
        f"{html.escape(series.name)}</span>"
    )


def _heights(series: Sequence[Series]) -> list[float]:
    values = [
        value
        for each in series
        for point in each.points
        for value in (point.y, point.low, point.high)
    ]
    return [value for value in values if value is not None and math.isfinite(value)]


class _Scale:
    """From values to parts of an axis, 0 to 1."""

    def __init__(self, axis: Axis, values: Sequence[float]) -> None:
        self._to: Callable[[float], float] = math.log10 if axis.log else float
        known = [value for value in (*values, *axis.ticks) if not axis.log or value > 0] or [1.0]
        low, high = min(known), max(known)
        if axis.from_zero:
            low = 0.0
        self.ticks = axis.ticks or (_decades(low, high) if axis.log else _even(low, high))
        low, high = min(low, *self.ticks), max(high, *self.ticks)
        self._low, self._span = self._to(low), (self._to(high) - self._to(low)) or 1.0
        self._starts_at_edge = axis.from_zero

    def part(self, value: float) -> float:
        """Infinite: the end."""
        if math.isinf(value):
            return 1.0
        share = (self._to(value) - self._low) / self._span
        margin = 0.0 if self._starts_at_edge else _MARGIN
        return margin + share * (1 - margin - _MARGIN)


def _decades(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 of every power of ten, or powers alone where these are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [base * 10.0**power for power in powers for base in (1, 2, 5)]
    ticks = _around(fine, low, high)
    return ticks if len(ticks) <= 10 else _around([10.0**power for power in powers], low, high)


def _around(ticks: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    inside = [tick for tick in ticks if low <= tick <= high]
    below = [tick for tick in ticks if tick < low][-1:]
    return tuple(below + inside) or tuple(ticks[:1])


def _even(low: float, high: float) -> tuple[float, ...]:
    """Four to nine round numbers."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step = next(step * by for by in (1, 2, 5, 10) if span / (step * by) <= 8)
    first = math.floor(low / step)
    return tuple(step * number for number in range(first, math.ceil(high / step) + 1))


@dataclass(frozen=True, slots=True)
class _Place:
    """From values to the picture's own units."""

    across: _Scale
    up: _Scale

    def x(self, value: float) -> float:
        return round(_LEFT + self.across.part(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.up.part(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(place: _Place, x: Axis, y: Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in place.up.ticks:
        at = place.y(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4}" text-anchor="end">{_number(tick)}</text>')
    for tick in place.across.ticks:
        at = place.x(tick)
        parts.append(f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}" class="grid"/>')
        parts.append(
            f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{_number(tick)}</text>'
        )
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(
        f'<text x="{middle_x}" y="{_HEIGHT - 8}" text-anchor="middle" class="axis">'
        f"{html.escape(x.label)}</text>"
    )
    parts.append(
        f'<text x="14" y="{middle_y}" text-anchor="middle" class="axis" '
        f'transform="rotate(-90 14 {middle_y})">{html.escape(y.label)}</text>'
    )
    return parts


def _rule(place: _Place, rule: Rule) -> str:
    at, right = place.y(rule.y), _WIDTH - _RIGHT
    return (
        f'<line x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}" class="rule"/>'
        f'<text x="{_LEFT + 6}" y="{at - 5}" class="note">{html.escape(rule.label)}</text>'
    )


def _band(place: _Place, series: Series) -> str:
    known = [
        (place.x(point.x), place.y(point.low), place.y(point.high))
        for point in series.points
        if point.low is not None and point.high is not None and not math.isnan(point.low)
    ]
    if len(known) < 2:
        return ""
    upper = [f"{x},{high}" for x, _, high in known]
    lower = [f"{x},{low}" for x, low, _ in reversed(known)]
    points = " ".join(upper + lower)
    return f'<polygon points="{points}" fill="{series.color}" fill-opacity="0.15"/>'


def _line(place: _Place, series: Series) -> str:
    points = " ".join(
        f"{place.x(point.x)},{place.y(point.y)}"
        for point in series.points
        if not math.isnan(point.y)
    )
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{series.color}" stroke-width="2"{dash}/>'
    )


def _mark(place: _Place, series: Series, point: Point) -> str:
    if math.isnan(point.y):
        return ""
    x, y = place.x(point.x), place.y(point.y)
    note = f"<title>{html.escape(point.note)}</title>" if point.note else ""
    if math.isinf(point.y):
        shape = f'<path d="M {x - 6} {y + 9} L {x} {y - 2} L {x + 6} {y + 9} Z" '
    else:
        shape = f'<circle cx="{x}" cy="{y}" r="{3 if series.dashed else 4}" '
    fill = "#fff" if series.dashed else series.color
    mark = f'{shape}fill="{fill}" stroke="{series.color}" stroke-width="1.5">{note}'
    mark += "</path>" if math.isinf(point.y) else "</circle>"
    if point.label:
        mark += _label(series, point.label, x, y)
    return mark


def _label(series: Series, text: str, x: float, y: float) -> str:
    """Above to the left, or below to the right if there is room."""
    if series.labels_above:
        at, up, anchor = x - 6, y - 6, "end"
    elif x < _WIDTH - _RIGHT - 30:
        at, up, anchor = x + 6, y + 15, "start"
    else:
        at, up, anchor = x - 6, y + 15, "end"
    place = f'x="{at:.1f}" y="{up:.1f}" text-anchor="{anchor}"'
    style = f'class="note" style="fill: {series.color}"'
    return f"<text {place} {style}>{html.escape(text)}</text>"


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"
