"""Dashboards and rules are valid, and ask for nothing that a real run does not tell."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from specrej.prometheus import Look, prometheus_label, prometheus_name
from specrej.telemetry import names
from specrej.telemetry.names import Metric
from tests.deploy.busy import busy_look
from tests.deploy.expressions import (
    DASHBOARDS,
    RULES,
    TARGET_LABELS,
    Selected,
    grouping_labels,
    legend_labels,
    of_dashboards,
    of_rules,
    rules,
    selected,
)

ALERTS_TEST = Path(__file__).with_name("alerts_test.yaml")
METRICS = [each for each in vars(names).values() if isinstance(each, Metric)]
EXPRESSIONS = [*of_dashboards(), *of_rules()]
TOOLS = Path(__file__).parents[2] / ".tools"


@pytest.fixture(scope="module")
def busy() -> Look:
    """What the endpoints of a real run tell."""
    return asyncio.run(busy_look())


def label_sets(now: Look, name: str) -> list[dict[str, str]]:
    return [dict(series.labels) for series in now.values.get(name, {})]


# Of real runs

# Toys read no prompt twice.
_OF_MODELS = ("kind", "=", "reused")


def test_every_metric_is_told(busy: Look) -> None:
    """Guards against a metric that nobody counts, and against names that endpoints do not use."""
    suffix = {"histogram": "_bucket"}
    missing = [
        metric.name
        for metric in METRICS
        if prometheus_name(metric) + suffix.get(metric.kind, "") not in busy.values
    ]
    assert missing == []


def test_metrics_have_the_labels_they_declare(busy: Look) -> None:
    """Guards against a label that `names` does not know: dashboards are written by it."""
    for metric in METRICS:
        name = prometheus_name(metric) + ("_count" if metric.kind == "histogram" else "")
        declared = {prometheus_label(label) for label in metric.labels}
        for labels in label_sets(busy, name):
            assert set(labels) == declared, name


def test_every_series_is_told(busy: Look) -> None:
    """Guards against panels that stay empty and alerts that can never fire."""
    untold = [
        (expression.where, each)
        for expression in EXPRESSIONS
        for each in selected(expression.text)
        if not any(_matches(each, labels) for labels in label_sets(busy, each.name))
        and _OF_MODELS not in each.matchers
    ]
    assert untold == []


def _matches(asked: Selected, labels: dict[str, str]) -> bool:
    return all(
        name in TARGET_LABELS or (name in labels and _agrees(operator, labels[name], value))
        for name, operator, value in asked.matchers
    )


def _agrees(operator: str, value: str, pattern: str) -> bool:
    equal = value == pattern if operator in ("=", "!=") else re.fullmatch(pattern, value)
    return bool(equal) == (operator[0] == "=")


def test_labels_are_there(busy: Look) -> None:
    """Guards against sums by a label that no series has: one nameless line instead of several."""
    for expression in EXPRESSIONS:
        if known := _labels_of(busy, expression.text):  # else it asks for what rules record
            assert grouping_labels(expression.text) <= known, expression


def test_legends_show_labels_that_are_there(busy: Look) -> None:
    """Guards against lines that are all named alike."""
    for where, text, shown in legend_labels():
        assert shown <= (grouping_labels(text) or _labels_of(busy, text)), where


def _labels_of(now: Look, text: str) -> set[str]:
    """Of all series that an expression asks for; none where it asks for what rules record."""
    sets = [labels for each in selected(text) for labels in label_sets(now, each.name)]
    return {label for labels in sets for label in labels} | TARGET_LABELS if sets else set()


# Dashboards


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> Any:
    return json.loads(request.param.read_text())


def test_there_are_dashboards() -> None:
    """Guards against tests that pass since they find nothing to look at."""
    assert {path.stem for path in DASHBOARDS} == {
        "overview", "algorithm", "generator", "reward", "cache"
    }  # fmt: skip
    assert len({json.loads(path.read_text())["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)


def test_panels_ask_the_chosen_data_source(board: Any) -> None:
    """Guards against a dashboard that works only where it was drawn."""
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    assert variables.items() >= {"datasource": "datasource", "job": "query"}.items()
    assert "instance" in variables
    for panel in board["panels"]:
        for part in (panel, *panel.get("targets", ())):
            if panel["type"] != "row":
                assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_can_be_narrowed_to_an_instance(board: Any) -> None:
    """Guards against a panel that shows all instances whatever is chosen."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            asked = len(re.findall(r'job=~"\$job",instance=~"\$instance"', target["expr"]))
            assert asked == target["expr"].count("{"), panel["title"]


def test_panels_lie_beside_each_other(board: Any) -> None:
    """Guards against panels that hide each other, and ids that Grafana would change."""
    cells = Counter(
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1 and max(x for x, _ in cells) < 24
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_every_panel_has_a_unit_and_a_name(board: Any) -> None:
    for panel in board["panels"]:
        assert panel["title"]
        if panel["type"] not in ("row", "heatmap"):
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_every_metric_is_on_a_dashboard() -> None:
    """Guards against telling what nobody can see."""
    asked = {each.name for expression in of_dashboards() for each in selected(expression.text)}
    bare = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    unseen = {prometheus_name(metric) for metric in METRICS} - bare
    assert unseen == set()


# Rules


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 12
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "runbook"}, alert["alert"]
        assert alert["labels"]["severity"] in ("critical", "warning")


def test_recorded_series_are_recorded() -> None:
    """Guards against an alert on a series that no rule makes."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in EXPRESSIONS:
        assert set(re.findall(r"specrej:[\w:]+", expression.text)) <= recorded, expression.where


def test_every_alert_is_seen_to_fire() -> None:
    """Guards against an alert that alerts_test.yaml forgets."""
    samples = [
        sample["labels"]
        for case in yaml.safe_load(ALERTS_TEST.read_text())["tests"]
        for test in case["promql_expr_test"]
        for sample in test.get("exp_samples", ())
    ]
    fired = set(re.findall(r'alertname="(\w+)"', " ".join(samples)))
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> None:
    found = shutil.which("promtool", path=f"{TOOLS}") or shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: make promtool fetches it where there is apt-get")
    ended = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_prometheus_takes_the_rules() -> None:
    """Guards against templates and durations that only Prometheus itself can judge."""
    promtool("check", "rules", *(str(path) for path in RULES))


def test_alerts_fire_where_they_should() -> None:
    """Guards against thresholds on the wrong side, and alerts for a healthy service."""
    promtool("test", "rules", str(ALERTS_TEST))
