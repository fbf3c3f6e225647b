"""The series and labels that PromQL expressions of dashboards and rules use."""

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
DASHBOARDS = sorted((DEPLOY / "chart" / "files" / "dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "chart" / "files").glob("[ar]*.yaml"))

# Values for Grafana's template variables.
_VARIABLES = {
    "$__rate_interval": "5m", "$job": ".*", "$instance": ".*", "$slo": "10", "${datasource}": "x"
}  # fmt: skip
# Series that Prometheus itself creates.
_OWN = frozenset({"ALERTS", "up"})
TARGET_LABELS = frozenset({"job", "instance"})


@dataclass(frozen=True, slots=True)
class Selected:
    """A selected series; `matchers` are triples of label, operator and value."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """A PromQL expression and its place: a panel, a variable, an alert or a recorded series."""

    where: str
    text: str
    legend: str = ""


def filled_in(text: str) -> str:
    """Replace Grafana's variables by values."""
    for variable, value in _VARIABLES.items():
        text = text.replace(variable, value)
    return text


def of_dashboards() -> Iterator[Expression]:
    """Yield the expressions of all panels and variables."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                where, legend = f"{path.name}: {panel['title']}", target["legendFormat"]
                yield Expression(where, filled_in(target["expr"]), legend)
        for variable in board["templating"]["list"]:
            if query := re.match(r"label_values\((.+), \w+\)", variable.get("definition", "")):
                yield Expression(f"{path.name}: {variable['name']}", filled_in(query[1]))


def rules() -> Iterator[dict[str, Any]]:
    """Yield all recording and alerting rules."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def of_rules() -> Iterator[Expression]:
    """Yield the expressions of all rules."""
    for rule in rules():
        yield Expression(rule.get("alert") or rule["record"], rule["expr"])


def selected(text: str) -> list[Selected]:
    """Return the series that an expression selects, except recorded ones and Prometheus's own."""
    selectors: list[Selected] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            matchers = tuple(
                (matcher.name, _OPERATORS[str(matcher.op)], matcher.value)
                for matcher in node.matchers.matchers
            )
            selectors.append(Selected(node.name or "", matchers))
        return True

    promql_parser.walk(promql_parser.parse(text), visit)
    return [s for s in selectors if ":" not in s.name and s.name not in _OWN]


_OPERATORS = {
    "MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"
}  # fmt: skip
