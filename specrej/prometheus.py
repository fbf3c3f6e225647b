"""Reads Prometheus endpoints: values of the project's own metrics, and what became of them between
two looks. The only file that parses their text.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from specrej.telemetry.names import Metric

_UNITS = {"s": "_seconds"}
_MAX_BYTES = 16 * 1024 * 1024

Labels = Mapping[str, str]


def prometheus_name(metric: Metric) -> str:
    """What an endpoint calls a metric, without a histogram's `_bucket`, `_sum` and `_count`."""
    unit = _UNITS.get(metric.unit, "")
    total = "_total" if metric.kind == "counter" else ""
    return f"{metric.name.replace('.', '_')}{unit}{total}"


def prometheus_label(name: str) -> str:
    """What an endpoint calls a label."""
    return name.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Series:
    """Whose value it is: the endpoint's, and these labels'."""

    url: str
    labels: frozenset[tuple[str, str]]


# By the metric's name as an endpoint tells it.
Values = Mapping[str, Mapping[Series, float]]


@dataclass(frozen=True, slots=True)
class Look:
    """What all endpoints said at one moment, seconds of a monotonic clock.

    `failures`: why those that did not answer did not.
    """

    at_s: float
    values: Values
    answered: frozenset[str] = frozenset()
    failures: Mapping[str, str] = field(default_factory=dict)

    def value(self, metric: Metric, **labels: str) -> float | None:
        """The sum over all endpoints and all other labels; None: nobody tells it."""
        values = [value for _, value in self.matching(prometheus_name(metric), labels)]
        return sum(values) if values else None

    def highest(self, metric: Metric) -> float | None:
        """Of all endpoints and labels."""
        return max((value for _, value in self.matching(prometheus_name(metric), {})), default=None)

    def label_values(self, metric: Metric, label: str) -> list[str]:
        """What a label is set to, in order."""
        suffix = "_count" if metric.kind == "histogram" else ""
        series = self.values.get(prometheus_name(metric) + suffix, {})
        key = prometheus_label(label)
        return sorted({value for each in series for name, value in each.labels if name == key})

    def matching(self, name: str, labels: Labels) -> Iterator[tuple[Series, float]]:
        """Series of a name that have these labels among theirs."""
        wanted = {(prometheus_label(label), value) for label, value in labels.items()}
        series = self.values.get(name, {})
        return ((each, value) for each, value in series.items() if wanted <= each.labels)


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two looks."""

    before: Look
    after: Look

    @property
    def seconds(self) -> float:
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def rate(self, metric: Metric, **labels: str) -> float | None:
        """A counter's increase per second; None: nobody tells it."""
        return self._rate(prometheus_name(metric), labels)

    def mean(self, metric: Metric, **labels: str) -> float | None:
        """Of the values that a histogram got; None: it got none."""
        name = prometheus_name(metric)
        total, count = (self._rate(f"{name}_{part}", labels) for part in ("sum", "count"))
        return total / count if total is not None and count else None

    def busy(self, metric: Metric, **labels: str) -> float | None:
        """The seconds that a histogram of seconds got, per second."""
        return self._rate(f"{prometheus_name(metric)}_sum", labels)

    def events(self, metric: Metric, **labels: str) -> float | None:
        """The values that a histogram got, per second."""
        return self._rate(f"{prometheus_name(metric)}_count", labels)

    def quantile(self, share: float, metric: Metric, **labels: str) -> float | None:
        """Estimated as Prometheus does, by straight lines between a histogram's bounds.

        The highest bound stands for what is beyond it. None: the histogram got no value.
        """
        name = f"{prometheus_name(metric)}_bucket"
        buckets: dict[float, float] = {}
        for each, _ in self.after.matching(name, labels):
            bound = float(dict(each.labels)["le"])
            buckets[bound] = buckets.get(bound, 0.0) + self._increase(name, each)
        return _quantile(share, sorted(buckets.items()))

    def _rate(self, name: str, labels: Labels) -> float | None:
        found = [self._increase(name, each) for each, _ in self.after.matching(name, labels)]
        return sum(found) / self.seconds if found else None

    def _increase(self, name: str, series: Series) -> float:
        now = self.after.values[name][series]
        if series.url not in self.before.answered:
            return 0.0  # it may have counted for days before
        then = self.before.values.get(name, {}).get(series, 0.0)
        return now - then if now >= then else now  # it began anew


def _quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """`buckets`: upper bounds, ascending, and how many values are at or below each."""
    if not buckets or not buckets[-1][1]:
        return None
    rank = share * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return low
            inside = count - below
            return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
        low, below = bound, count
    return low


async def look(
    urls: Iterable[str], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> Look:
    """Ask all endpoints at once; whoever does not answer in time is among the failures."""
    asked = list(dict.fromkeys(urls))
    texts = await asyncio.gather(*(asyncio.to_thread(_read, url, timeout_s) for url in asked))
    values: dict[str, dict[Series, float]] = defaultdict(dict)
    failures: dict[str, str] = {}
    for url, text in zip(asked, texts, strict=True):
        try:
            if isinstance(text, OSError):
                raise text
            for name, series, value in _samples(url, text):
                values[name][series] = value
        except (OSError, ValueError) as error:
            failures[url] = _reason(error)
    return Look(clock(), values, frozenset(asked) - failures.keys(), failures)


def _read(url: str, timeout_s: float) -> str | OSError:
    """What an endpoint says, or why it says nothing."""
    if not url.startswith(("http://", "https://")):
        return OSError("must start with http:// or https://")
    try:
        # Not by way of a proxy: endpoints are on this machine, or in this cluster.
        with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as answer:
            return str(answer.read(_MAX_BYTES).decode())
    except HTTPError as error:
        error.close()  # it is an answer, too
        return error
    except (HTTPException, UnicodeDecodeError) as error:
        return OSError(f"no metrics there: {type(error).__name__}")
    except OSError as error:
        return error


def _reason(error: Exception) -> str:
    if isinstance(error, URLError) and isinstance(error.reason, OSError):
        error = error.reason
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def _samples(url: str, text: str) -> Iterator[tuple[str, Series, float]]:
    """Raises ValueError: that is no Prometheus text."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, Series(url, frozenset(sample.labels.items())), float(sample.value)
