"""`make chart`: the chart's values.schema.json, from its values.yaml and the services' settings.

Every key of values.yaml is known, with the type of its default, and no other one; `settings` of a
service are those of its settings class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from gateway.settings import GatewaySettings
from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings
from specrej.settings import ProcessSettings

CHART = Path(__file__).parent / "chart"
SETTINGS: Mapping[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "orchestrator": OrchestratorSettings,
    "generator": GeneratorSettings,
    "reward": RewardSettings,
}
# Objects of Kubernetes, whose own schemas the API server checks, and maps of any names.
_OPEN = {
    *("nodeSelector", "affinity", "annotations", "podAnnotations", "podLabels", "issuer"),
    *("resources", "requests", "limits"),
}
_ENUMS = {
    "models.source": ["image", "oci", "claim", "hub"],
    "models.volume.accessMode": ["ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce"],
    "image.pullPolicy": ["IfNotPresent", "Always", "Never"],
    "edge.service.type": ["ClusterIP", "LoadBalancer", "NodePort"],
}
_SCALARS = {"boolean", "integer", "number", "string"}
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "enum")


def schema() -> dict[str, Any]:
    """The schema, of draft 7, which Helm reads."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    made = _of(values, "")
    made["properties"]["global"] = {"type": "object"}  # Helm's
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}


def _of(value: Any, path: str) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    match value:
        case dict() if name == "settings":
            return _settings(SETTINGS[path.partition(".")[0]])
        case dict() if path == "tls.existingSecrets":
            services = {service: {"type": "string"} for service in (*SETTINGS, "edge")}
            return _closed(services)
        case dict() if name in _OPEN:
            return {"type": "object"}
        case dict():
            return _closed(
                {key: _of(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
            )
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case list():
            return {"type": "array"}
    return {"enum": _ENUMS[path]} if path in _ENUMS else {"type": "string"}


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _settings(service: type[ProcessSettings]) -> dict[str, Any]:
    """Names, and types and ranges of those that are scalars; the service checks the others."""
    described = service.model_json_schema()["properties"]
    return _closed({name: _scalar(item) for name, item in described.items()})


def _scalar(described: Mapping[str, Any]) -> dict[str, Any]:
    kind = {key: described[key] for key in ("type", *_RANGES) if key in described}
    return kind if kind.get("type") in _SCALARS else {}


def main() -> None:
    """Write the schema."""
    text = json.dumps(schema(), indent=1, sort_keys=True)
    (CHART / "values.schema.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
