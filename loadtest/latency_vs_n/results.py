"""Percentiles, means and comparisons of what was measured; JSON and CSV files of them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.latency_vs_n.measure import Condition, Measured, Request, Settings
from loadtest.thresholds import percentile
from specrej.contracts import Algorithm

FAST, FULL = Algorithm.SPECULATIVE_REJECTION, Algorithm.BEST_OF_N
# The comparison that is reported in one sentence, if it was measured.
_CLAIM_N = 128


@dataclass(frozen=True, slots=True)
class Cell:
    """All requests of one condition, algorithm and N.

    Latencies are in seconds and count requests without an answer as infinite. Other figures are
    means over answered requests, NaN if there are none.
    """

    condition: str
    algorithm: str
    n: int
    num_requests: int
    errors: Mapping[str, int]  # requests without an answer, by status
    num_late: int  # sent more than 50 ms after they were due
    p50: float
    p90: float
    p95: float
    p99: float
    first_round: float  # seconds until the first round ended
    tokens: float  # generated, of all candidates
    reward: float
    answers_per_s: float
    in_time_share: float  # of all requests


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculative Rejection at `n` and Best-of-N at `best_of_n`, one request at a time.

    Compared are pairs of requests with equal prompts and seeds. Latency and tokens are ratios of
    medians and of means, reward is a difference of means, each of Speculative Rejection to
    Best-of-N. `num_faster` pairs were answered sooner by Speculative Rejection.
    """

    n: int
    best_of_n: int
    num_pairs: int
    num_faster: int
    latency: float
    tokens: float
    reward: float


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that is reported. `facts`: date, machine, service and settings."""

    settings: Settings
    facts: Mapping[str, str]
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def num_requests(self) -> int:
        return sum(cell.num_requests for cell in self.cells)

    @property
    def claim(self) -> Comparison | None:
        """Twice the candidates of Best-of-N: at 128 against 64, or at the largest N."""
        doubled = [pair for pair in self.comparisons if pair.n == 2 * pair.best_of_n]
        return max(doubled, key=lambda pair: (pair.n == _CLAIM_N, pair.n), default=None)


def collate(settings: Settings, facts: Mapping[str, str], measured: Sequence[Measured]) -> Results:
    by_cell: dict[tuple[Condition, Algorithm, int], list[Measured]] = {}
    for measurement in measured:
        block = measurement.block
        by_cell.setdefault((block.condition, block.algorithm, block.n), []).append(measurement)
    cells = tuple(
        _cell(by_cell[key], settings.slo_s)
        for condition in Condition
        for algorithm in Algorithm
        for n in settings.ns
        if (key := (condition, algorithm, n)) in by_cell
    )
    alone = {
        (algorithm, n): {r.number: r for block in blocks for r in block.requests}
        for (condition, algorithm, n), blocks in by_cell.items()
        if condition is Condition.ALONE
    }
    return Results(settings, facts, cells, tuple(_comparisons(settings.ns, alone)))


def _cell(blocks: Sequence[Measured], slo_s: float) -> Cell:
    first = blocks[0].block
    requests = [request for block in blocks for request in block.requests]
    answered = [request for request in requests if request.code == "OK"]
    latencies = Counter(request.latency_s for request in requests)
    return Cell(
        condition=first.condition.value,
        algorithm=first.algorithm.value,
        n=first.n,
        num_requests=len(requests),
        errors=dict(Counter(sorted(r.code for r in requests if r.code != "OK"))),
        num_late=sum(block.num_late for block in blocks),
        p50=percentile(latencies, 0.5),
        p90=percentile(latencies, 0.9),
        p95=percentile(latencies, 0.95),
        p99=percentile(latencies, 0.99),
        first_round=_mean(request.first_round_s for request in answered),
        tokens=_mean(request.tokens for request in answered),
        reward=_mean(request.reward for request in answered),
        answers_per_s=len(answered) / sum(block.wall_s for block in blocks),
        in_time_share=_mean(request.latency_s <= slo_s for request in requests),
    )


def _comparisons(
    ns: Iterable[int], alone: Mapping[tuple[Algorithm, int], Mapping[int, Request]]
) -> Iterator[Comparison]:
    for best_of_n in ns:
        for n in (best_of_n, 2 * best_of_n):
            fast, full = alone.get((FAST, n), {}), alone.get((FULL, best_of_n), {})
            pairs = [(fast[number], full[number]) for number in fast.keys() & full.keys()]
            answered = [(a, b) for a, b in pairs if a.code == b.code == "OK"]
            if answered:
                yield _comparison(n, best_of_n, answered)


def _comparison(n: int, best_of_n: int, pairs: Sequence[tuple[Request, Request]]) -> Comparison:
    fast, full = zip(*pairs, strict=True)
    medians = [statistics.median(r.seconds for r in side) for side in (fast, full)]
    return Comparison(
        n=n,
        best_of_n=best_of_n,
        num_pairs=len(pairs),
        num_faster=sum(a.seconds < b.seconds for a, b in pairs),
        latency=medians[0] / medians[1],
        tokens=_mean(r.tokens for r in fast) / _mean(r.tokens for r in full),
        reward=_mean(r.reward for r in fast) - _mean(r.reward for r in full),
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else math.nan


def write_json(results: Results, path: Path) -> None:
    """Everything; infinite figures and NaN become null."""
    path.write_text(json.dumps(_finite(asdict(results)), indent=1, allow_nan=False) + "\n", "utf-8")


def write_csv(results: Results, path: Path) -> None:
    """One row per cell; infinite figures and NaN become empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Cell.__dataclass_fields__))
        writer.writeheader()
        for cell in results.cells:
            errors = " ".join(f"{code}={count}" for code, count in cell.errors.items())
            writer.writerow(_finite(asdict(cell)) | {"errors": errors})


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float():
            return round(value, 6) if math.isfinite(value) else None
    return value
