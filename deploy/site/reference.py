"""Tables of the reference, from the classes, constants and files that the services use."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel

from deploy.values_schema import SETTINGS
from gateway.fields import Checked, Ignored, Maps, Refused, rules_of
from gateway.messages import MessagesRequest
from gateway.requests import ChatRequest, CompletionRequest
from gateway.responses import ResponsesRequest
from reward_service.specs import RewardSpec, Spec
from specrej.contracts import declared_options
from specrej.settings import ProcessSettings, ServiceSettings
from specrej.telemetry import names


def settings() -> str:
    """The settings of all services, of those with gRPC, and of each; a shared one again where its
    default differs."""
    parts = [
        _settings("Every service", ProcessSettings),
        _settings("Services with gRPC", ServiceSettings, ProcessSettings),
    ]
    for name, service in SETTINGS.items():
        base = ServiceSettings if issubclass(service, ServiceSettings) else ProcessSettings
        parts.append(_settings(f"The {name}", service, base))
    return "\n\n".join(parts)


def _settings(
    title: str, owner: type[ProcessSettings], base: type[ProcessSettings] | None = None
) -> str:
    known = _properties(base) if base else {}
    prefix = owner.model_config.get("env_prefix") or "SPECREJ_..._"
    rows = (
        (f"`{name.upper()}`", _default(value), _text(value["description"]))
        for name, value in _properties(owner).items()
        if name not in known or value.get("default") != known[name].get("default")
    )
    return f"## {title}\n\n`{prefix}`:\n\n" + _table(("setting", "default", "meaning"), rows)


def _properties(owner: type[BaseModel]) -> dict[str, dict[str, object]]:
    return dict(owner.model_json_schema()["properties"])


def _text(description: object) -> str:
    # Markdown reads {...} as attributes, and <...> as HTML.
    return str(description).replace("{", "&#123;").replace("<", "&lt;")


def _default(value: dict[str, object]) -> str:
    default = value.get("default")
    return "" if default in (None, "") else f"`{json.dumps(default, ensure_ascii=False)}`"


def metrics() -> str:
    """All metrics with unit, labels and meaning."""
    found = (value for value in vars(names).values() if isinstance(value, names.Metric))
    rows = (
        (f"`{m.name}`", m.kind.replace("_", "-"), m.unit, ", ".join(m.labels), m.description)
        for m in sorted(found, key=lambda metric: metric.name)
    )
    return _table(("metric", "kind", "unit", "labels", "meaning"), rows)


def alerts() -> str:
    """All alerts with what they say and what to do."""
    path = Path(__file__).parents[1] / "chart/files/alerts.yaml"
    groups = yaml.safe_load(path.read_text())["groups"]
    rules = (rule for group in groups for rule in group["rules"])
    rows = (
        (
            *(f"`{rule['alert']}`", rule["labels"]["severity"], rule.get("for", "")),
            # Without Prometheus' templates: {{ $labels.instance }}.
            re.sub(r"\{\{ \$(?:labels\.)?(\w+).*?\}\}", r"*\1*", rule["annotations"]["summary"]),
            _text(rule["annotations"]["runbook"]),
        )
        for rule in rules
    )
    return _table(("alert", "severity", "after", "says", "what to do"), rows)


def rewards() -> str:
    """Every kind of reward with its options; what several have in common is with each."""

    def kinds() -> Iterator[str]:
        for kind in get_args(get_args(RewardSpec)[0]):
            own = (one for one in kind.__mro__ if issubclass(one, Spec) and one is not Spec)
            about = (inspect.getdoc(owner) or "" for owner in own)
            options = _properties(kind)
            name, *_ = (options.pop(option).get("default") for option in ("kind", "name", "images"))
            rows = ((f"`{option}`", _default(value)) for option, value in options.items())
            named = "|".join(options)
            # The meaning of options in docstrings: "one, other: text; next: text".
            text = re.sub(rf"\b(({named})(, ({named}))*):", r"**\1**:", "\n\n".join(about))
            table = _table(("option", "default"), rows) if options else ""
            yield f"## {name}\n\n{_text(text)}\n\n{table}"

    return "\n\n".join(kinds())


def http() -> str:
    """The fields of each endpoint of the gateway."""
    endpoints: dict[str, type[Checked]] = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
    }

    def rows(model: type[Checked]) -> Iterator[tuple[str, str, str]]:
        order = (Maps, Refused, Ignored)
        fields = rules_of(model).items()
        for name, rule in sorted(fields, key=lambda field: order.index(type(field[1]))):
            match rule:
                case Maps(path):
                    option = declared_options().get(path.rpartition(".")[2])
                    yield f"`{name}`", f"`{path}`", _text(option.help_text if option else "")
                case Refused(why, harmless):
                    unless = f", unless {' or '.join(map(json.dumps, harmless))}" * bool(harmless)
                    yield f"`{name}`", f"refused{unless}", why
                case Ignored(why):
                    yield f"`{name}`", "ignored", why

    heads = ("field", "sets", "meaning")
    return "\n\n".join(f"## {e}\n\n" + _table(heads, rows(m)) for e, m in endpoints.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [tuple(head), *(tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
