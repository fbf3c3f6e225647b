"""Dashboards and rules are valid, and query only series that a real run emits."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.collector import Collector, labels_of, points
from tests.deploy import expressions as e
from tests.deploy.busy import METRICS, busy_scrape
from tests.endpoints import Scrape, prometheus_label, prometheus_name

ALERTS_TEST = Path(__file__).with_name("alerts_test.yaml")
EXPRESSIONS = [*e.of_dashboards(), *e.of_rules()]
TOOLS = Path(__file__).parents[2] / ".tools"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scrape, Collector]:
    directory = tmp_path_factory.mktemp("busy")
    try:
        return asyncio.run(busy_scrape(directory))
    except Exception as error:
        for log in directory.glob("orchestrator.log"):
            error.add_note(log.read_text()[-8000:])
        raise


@pytest.fixture
def busy(recorded: tuple[Scrape, Collector]) -> Scrape:
    """The metrics of a real run."""
    return recorded[0]


def label_sets(now: Scrape, name: str) -> list[dict[str, str]]:
    return [dict(series.labels) for series in now.values.get(name, {})]


# Compared with a real run

# Toys have no prompt cache.
_OF_MODELS = ("kind", "=", "reused")


def test_probes_are_in_no_metric(busy: Scrape) -> None:
    """Guards against dashboards of requests that nobody sent; the stack waits for /readyz."""
    requests = label_sets(busy, "http_server_request_duration_seconds_count")
    assert {labels["http_route"] for labels in requests} == {"unknown"}


def test_every_metric_is_emitted(busy: Scrape) -> None:
    """Guards against a metric that is never recorded, or exported under another name."""
    suffix = {"histogram": "_bucket"}
    missing = [
        metric.name
        for metric in METRICS
        if prometheus_name(metric) + suffix.get(metric.kind, "") not in busy.values
    ]
    assert missing == []


def test_metrics_have_the_labels_they_declare(recorded: tuple[Scrape, Collector]) -> None:
    """Guards against labels that `names` does not declare, at the endpoint and the collector."""
    busy, collector = recorded
    for metric in METRICS:
        name = prometheus_name(metric) + ("_count" if metric.kind == "histogram" else "")
        declared = {prometheus_label(label) for label in metric.labels}
        for labels in label_sets(busy, name):
            # `error.type` is on failures only.
            assert declared - {"error_type"} <= set(labels) <= declared, name
    labels_by_name = {metric.name: set(metric.labels) for metric in METRICS}
    for (_, name), exported in collector.metrics.items():
        for point in points(exported):
            assert labels_by_name[name] - {"error.type"} <= labels_of(point).keys()
            assert labels_of(point).keys() <= labels_by_name[name], name


def test_every_queried_series_is_emitted(busy: Scrape) -> None:
    """Guards against panels that stay empty and alerts that can never fire."""
    assert len(EXPRESSIONS) > 50
    missing = [
        (expression.where, series)
        for expression in EXPRESSIONS
        for series in e.selected(expression.text)
        if not any(_matches(series, labels) for labels in label_sets(busy, series.name))
        and _OF_MODELS not in series.matchers
    ]
    assert missing == []


def _matches(series: e.Selected, labels: dict[str, str]) -> bool:
    return all(
        name in e.TARGET_LABELS or (name in labels and _agrees(operator, labels[name], value))
        for name, operator, value in series.matchers
    )


def _agrees(operator: str, value: str, pattern: str) -> bool:
    equal = value == pattern if operator in ("=", "!=") else re.fullmatch(pattern, value)
    return bool(equal) == (operator[0] == "=")


# Dashboards


@pytest.mark.parametrize("path", e.DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_formed(path: Path) -> None:
    """Guards against a dashboard that works with one data source only, and against panels that
    ignore the selected instance."""
    board = json.loads(path.read_text())
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables.items() >= {"datasource": "datasource", "job": "query"}.items()
    assert "instance" in variables
    for panel in board["panels"]:
        assert panel["title"]
        targets = panel.get("targets", ())
        for part in (panel, *targets) if panel["type"] != "row" else ():
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] not in ("row", "heatmap"):
            assert panel["fieldConfig"]["defaults"]["unit"]
        for target in targets:
            filtered = len(re.findall(r'job=~"\$job",instance=~"\$instance"', target["expr"]))
            assert filtered == target["expr"].count("{"), panel["title"]


def test_dashboards_show_zeros(busy: Scrape, tmp_path: Path) -> None:
    """Guards against "No data", and against NaN for a share or a quantile of nothing: before
    anything was counted, and while nothing is."""
    counted = []
    for name, values in busy.values.items():
        for one in values:
            labels = {**dict(one.labels), "instance": one.url}
            selector = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items())
            counted.append({"series": f"{name}{{{selector}}}", "values": "7x10"})
    queries = [
        expression.text
        for expression in e.of_dashboards()
        # Heatmaps are empty; without TLS there is no certificate, and none that expires.
        if expression.legend not in ("", "{{le}}") and "certificate" not in expression.where
    ]
    assert len(queries) > 60
    tests = [
        {
            "input_series": given,
            "promql_expr_test": [
                {"expr": wrong, "eval_time": "10m", "exp_samples": []}
                for query in queries
                for wrong in (f"vector(1) unless on() ({query})", f"({query}) != ({query})")
            ],
        }
        for given in ([], counted)
    ]
    file = tmp_path / "queries.json"  # which is YAML, too
    file.write_text(json.dumps({"tests": tests}))
    promtool("test", "rules", str(file))


# Rules


def test_every_alert_has_a_runbook_and_a_test() -> None:
    """Guards against an alert that alerts_test.yaml lacks."""
    alerts = {rule["alert"]: rule for rule in e.rules() if "alert" in rule}
    assert len(alerts) >= 12
    for name, alert in alerts.items():
        assert set(alert["annotations"]) == {"summary", "runbook"}, name
        assert alert["labels"]["severity"] in ("critical", "warning")
    samples = [
        sample["labels"]
        for case in yaml.safe_load(ALERTS_TEST.read_text())["tests"]
        for test in case["promql_expr_test"]
        for sample in test.get("exp_samples", ())
    ]
    assert set(re.findall(r'alertname="(\w+)"', " ".join(samples))) == alerts.keys()


def test_recorded_series_are_recorded() -> None:
    """Guards against an alert on a series that no rule records."""
    recorded = {rule["record"] for rule in e.rules() if "record" in rule}
    for expression in EXPRESSIONS:
        assert set(re.findall(r"specrej:[\w:]+", expression.text)) <= recorded, expression.where


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool", path=f"{TOOLS}") or shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: make promtool fetches it where there is apt-get")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_the_rules() -> None:
    """Guards against templates and durations that only Prometheus can check."""
    promtool("check", "rules", *(str(path) for path in e.RULES))


def test_alerts_fire_as_specified() -> None:
    """Guards against inverted thresholds, and alerts for a healthy service."""
    promtool("test", "rules", str(ALERTS_TEST))
