"""`make rules`: writes deploy/alerts as the PrometheusRule of deploy/components/monitoring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ALERTS = Path(__file__).with_name("alerts")
RULES = Path(__file__).parent / "components" / "monitoring" / "rules.yaml"


def groups() -> list[Any]:
    """The groups of all files that Prometheus reads."""
    contents = (yaml.safe_load(path.read_text()) for path in sorted(ALERTS.glob("*.yaml")))
    return [group for content in contents for group in content["groups"]]


def main() -> None:
    """Write the file."""
    rules = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "specrej"},
        "spec": {"groups": groups()},
    }
    content = yaml.safe_dump(rules, sort_keys=False, width=110)
    RULES.write_text(f"# Written by make rules from deploy/alerts; never edited.\n{content}")


if __name__ == "__main__":
    main()
