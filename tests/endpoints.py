"""Prometheus endpoints of running services, read with prometheus_client's own parser."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from specrej.telemetry.names import Metric

TIMEOUT_S = 20.0


def prometheus_label(name: str) -> str:
    """The name of a label at an endpoint."""
    return name.replace(".", "_")


def prometheus_name(metric: Metric) -> str:
    """The name of a metric at an endpoint, without a histogram's `_bucket`, `_sum` and `_count`."""
    unit = "_seconds" if metric.unit == "s" else ""
    total = "_total" if metric.kind == "counter" else ""
    return f"{metric.name.replace('.', '_')}{unit}{total}"


@dataclass(frozen=True, slots=True)
class Series:
    """One value's endpoint and labels."""

    url: str
    labels: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The values of all endpoints at one moment, by name and series."""

    values: Mapping[str, Mapping[Series, float]]

    def matching(self, name: str, **labels: str) -> dict[Series, float]:
        """All series of a name with these labels; dots in labels become underscores."""
        pairs = {(prometheus_label(label), value) for label, value in labels.items()}
        values = self.values.get(name, {})
        return {series: value for series, value in values.items() if pairs <= series.labels}

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all matching series; 0 if there is none."""
        return sum(self.matching(name, **labels).values())


async def scrape(urls: Iterable[str]) -> Scrape:
    """Read all endpoints; raises OSError if one does not answer."""
    targets = list(dict.fromkeys(urls))
    texts = await asyncio.gather(*(asyncio.to_thread(_read, url) for url in targets))
    values: dict[str, dict[Series, float]] = defaultdict(dict)
    for url, text in zip(targets, texts, strict=True):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = Series(url, frozenset(sample.labels.items()))
                values[sample.name][series] = sample.value
    return Scrape(values)


def _read(url: str) -> str:
    with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())
