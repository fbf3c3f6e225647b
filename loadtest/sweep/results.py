"""A journal, put together: cells, comparisons of the two algorithms, one request's slots over time.

Writes JSON and CSV; the page is page.py's.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loadtest.sweep import figures
from loadtest.sweep.driving import SLOTS
from loadtest.sweep.figures import Cell, Estimate
from loadtest.sweep.journal import Kept, Line, Request
from loadtest.sweep.plan import Block, Condition
from loadtest.sweep.settings import ALGORITHMS, Settings
from specrej.contracts import Algorithm

FAST, FULL = Algorithm.SPECULATIVE_REJECTION.value, Algorithm.BEST_OF_N.value


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculative Rejection at one N over Best-of-N at another, in one condition.

    `latency` is the ratio of the medians, over what both were asked; differences of reward are ours
    less Best-of-N's.
    """

    condition: str
    n: int  # Speculative Rejection's
    best_of_n: int
    latency: Estimate
    tokens: float
    reward: float

    @property
    def verdict(self) -> str:
        """What the interval of the ratio allows to say."""
        if self.latency.high < 1:
            return "below"
        return "above" if self.latency.low > 1 else "not told apart"


@dataclass(frozen=True, slots=True)
class Results:
    """All there is to show. `is_whole`: nothing of the plan is missing."""

    settings: Settings
    head: Line
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]
    examples: tuple[Request, ...]  # watched for their slots: one per algorithm, or none
    num_requests: int
    num_blocks: int
    is_whole: bool

    def cell(self, condition: Condition, algorithm: str, n: int) -> Cell | None:
        """None where nothing was measured."""
        for each in self.cells:
            if (each.condition, each.algorithm, each.n) == (condition.value, algorithm, n):
                return each
        return None


def collate(kept: Kept, blocks: Iterable[Block]) -> Results:
    """`blocks` are the plan's."""
    settings = Settings.from_json(kept.head["settings"])
    planned = list(blocks)
    done = [block for block in planned if block.key in kept.blocks]
    by_cell: dict[tuple[Condition, Algorithm, int], list[Block]] = {}
    for block in done:
        by_cell.setdefault((block.condition, block.algorithm, block.n), []).append(block)
    cells = {key: _cell(settings, kept, together) for key, together in sorted_cells(by_cell)}
    samples = {
        key: [each for block in together for each in kept.requests[block.key]]
        for key, together in by_cell.items()
    }
    return Results(
        settings=settings,
        head=kept.head,
        cells=tuple(cells.values()),
        comparisons=tuple(_comparisons(settings, samples)),
        examples=tuple(kept.requests.get(SLOTS, ())),
        num_requests=sum(len(each) for each in samples.values()),
        num_blocks=len(done),
        is_whole=len(done) == len(planned),
    )


def sorted_cells(by_cell: dict[Any, list[Block]]) -> list[tuple[Any, list[Block]]]:
    """By condition, algorithm and N, as they are declared."""
    conditions, algorithms = list(Condition), list(ALGORITHMS)

    def place(item: tuple[Any, list[Block]]) -> tuple[int, int, int]:
        condition, algorithm, n = item[0]
        return conditions.index(condition), algorithms.index(algorithm), n

    return sorted(by_cell.items(), key=place)


def _cell(settings: Settings, kept: Kept, blocks: list[Block]) -> Cell:
    condition, n = blocks[0].condition, blocks[0].n
    users = {
        Condition.ALONE: 1,
        Condition.STEADY: 0,
        Condition.SATURATED: settings.users(n),
    }
    return figures.cell(
        condition.value,
        blocks[0].algorithm.value,
        n,
        [each for block in blocks for each in kept.requests[block.key]],
        [kept.blocks[block.key]["wall_s"] for block in blocks],
        users[condition],
        settings.slo_s,
        sum(kept.blocks[block.key]["late"] for block in blocks),
    )


def _comparisons(settings: Settings, samples: dict[Any, list[Request]]) -> list[Comparison]:
    fast, full = ALGORITHMS
    return [
        _comparison(condition, n, base, samples[condition, fast, n], samples[condition, full, base])
        for condition in Condition
        for base in settings.ns
        for n in (base, 2 * base)
        if (condition, fast, n) in samples and (condition, full, base) in samples
    ]


def _comparison(
    condition: Condition, n: int, base: int, ours: list[Request], theirs: list[Request]
) -> Comparison:
    return Comparison(
        condition=condition.value,
        n=n,
        best_of_n=base,
        latency=figures.ratio(_pairs(ours, theirs)),
        tokens=_mean(ours, "tokens") / _mean(theirs, "tokens"),
        reward=_mean(ours, "reward") - _mean(theirs, "reward"),
    )


def _pairs(ours: list[Request], theirs: list[Request]) -> list[tuple[float, float]]:
    """Latencies of what both were asked: the same prompt with the same seed."""
    twins = {(each.seed, each.prompt): each for each in theirs}
    asked = [each for each in ours if (each.seed, each.prompt) in twins]
    both = (asked, [twins[each.seed, each.prompt] for each in asked])
    return list(zip(*map(figures.latencies, both), strict=True))


def _mean(requests: list[Request], name: str) -> float:
    values = [getattr(each, name) for each in requests if each.answered]
    return sum(values) / len(values) if values else math.nan


def to_json(results: Results) -> dict[str, Any]:
    """Infinite figures (an unanswered request decides them) and NaN (of nothing) become null."""
    whole = {
        **results.head,
        "requests": results.num_requests,
        "blocks": results.num_blocks,
        "whole": results.is_whole,
        "cells": [asdict(each) for each in results.cells],
        "comparisons": [{**asdict(each), "verdict": each.verdict} for each in results.comparisons],
        "examples": [asdict(each) for each in results.examples],
    }
    cleaned: dict[str, Any] = _finite(whole)
    return cleaned


def write_json(results: Results, path: Path) -> None:
    """All of it."""
    path.write_text(json.dumps(to_json(results), indent=1, allow_nan=False) + "\n", "utf-8")


def write_csv(results: Results, path: Path) -> None:
    """A row per cell; of each estimate its value and interval."""
    rows = [_flat(each) for each in results.cells]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _flat(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in (field.name for field in fields(cell)):
        value = getattr(cell, name)
        if isinstance(value, Estimate):
            row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        elif isinstance(value, dict):
            row[name] = " ".join(f"{key}={count}" for key, count in value.items())
        else:
            row[name] = value
    return {key: _rounded(value) for key, value in row.items()}


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 6) if math.isfinite(value) else ""


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float():
            return round(value, 6) if math.isfinite(value) else None
    return value
