"""What PromQL expressions ask for: names of series, with the labels they match and group by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml  # type: ignore[import-untyped]

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "alerts").glob("*.yaml"))

# As Grafana fills them in.
_VARIABLES = {
    "$__rate_interval": "5m", "$job": ".*", "$instance": ".*", "$slo": "10", "${datasource}": "x"
}  # fmt: skip
# Prometheus's own: no service tells them.
_OWN = frozenset({"ALERTS", "up"})
TARGET_LABELS = frozenset({"job", "instance"})


@dataclass(frozen=True, slots=True)
class Selected:
    """A series that is asked for; `matchers` are of label, operator and value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """Where it is, and what it says."""

    where: str
    text: str


def filled_in(text: str) -> str:
    """Without Grafana's variables."""
    for variable, value in _VARIABLES.items():
        text = text.replace(variable, value)
    return text


def of_dashboards() -> Iterator[Expression]:
    """Of all panels, annotations and variables."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Expression(f"{path.name}: {panel['title']}", filled_in(target["expr"]))
        for variable in board["templating"]["list"]:
            if asked := re.match(r"label_values\((.+), \w+\)", variable.get("definition", "")):
                yield Expression(f"{path.name}: {variable['name']}", filled_in(asked[1]))


def rules() -> Iterator[dict[str, Any]]:
    """All recording and alerting rules."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def of_rules() -> Iterator[Expression]:
    for rule in rules():
        yield Expression(rule.get("alert") or rule["record"], rule["expr"])


def selected(text: str) -> list[Selected]:
    """The series that an expression asks for, without those of rules and Prometheus's own."""
    found: list[Selected] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            matchers = tuple(
                (matcher.name, _OPERATORS[str(matcher.op)], matcher.value)
                for matcher in node.matchers.matchers
            )
            found.append(Selected(node.name or "", matchers))
        return True

    promql_parser.walk(promql_parser.parse(text), visit)
    return [each for each in found if ":" not in each.name and each.name not in _OWN]


_OPERATORS = {
    "MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"
}  # fmt: skip


def grouping_labels(text: str) -> set[str]:
    """Labels in by (...), on (...) and legends."""
    lists = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", text)
    return {label.strip() for labels in lists for label in labels.split(",") if label.strip()}


def legend_labels() -> Iterator[tuple[str, str, set[str]]]:
    """Of every panel's target: where, the expression, and what its legend shows."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                yield f"{path.name}: {panel['title']}", filled_in(target["expr"]), shown
