"""The tables of all settings and all metrics, from the classes and constants that services use."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deploy.values_schema import SETTINGS
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


def _properties(owner: type[ProcessSettings]) -> dict[str, dict[str, object]]:
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


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [tuple(head), *(tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
