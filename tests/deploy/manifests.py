"""The chart as Helm renders it for presets and variants, with accessors for its objects."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.values_schema import CHART, SETTINGS
from specrej.settings import ProcessSettings, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HELM = ROOT / ".tools" / "helm"  # make helm
PRESETS = ("embedded", "gpu", "production", "endpoint")
RELEASE = NAMESPACE = "specrej"
# Presets with more values, as an operator gives them.
VARIANTS: dict[str, tuple[str, str]] = {
    "production by operators": (
        "production",
        "{gatewayApi: {enabled: true, create: true}, models: {source: hub, reward: org/reward,"
        " generator: org/generator@0123abc, volume: {existingClaim: ''}}}",
    ),
    "production by ingress": (
        "production",
        "{ingress: {enabled: true}, gatewayApi: {enabled: false}}",
    ),
    "plaintext by a shared gateway": ("embedded", "{gatewayApi: {enabled: true}}"),
}
GRPC = ("orchestrator", "generator", "reward")
SERVICES = (*GRPC, "gateway")
DOWNLOAD = "model-download"
MARGIN_S = 10  # between the end of the last request and SIGKILL

Object = Mapping[str, Any]


@cache
def rendered(name: str) -> Manifests:
    """All objects of a preset or a variant, as a cluster would receive them."""
    return templated(*VARIANTS.get(name, (name, "{}")))


@cache
def templated(preset: str, values: str = "{}") -> Manifests:
    """The chart with a preset's values, and these in YAML; empty: without a preset.

    Raises:
        subprocess.CalledProcessError: Helm refuses the values; its reason is `stderr`.
    """
    if not HELM.exists():
        pytest.skip("no Helm: make helm fetches it")
    files = ["-f", str(CHART / f"values-{preset}.yaml")] if preset else []
    command = [str(HELM), "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", "1.35", *files, "-f", "-"]
    result = subprocess.run(command, input=values, capture_output=True, text=True, check=True)
    # 8 times as fast as the loader in Python.
    documents = yaml.load_all(result.stdout, yaml.CSafeLoader)
    return Manifests(tuple(document for document in documents if document))


def short(name: str) -> str:
    """The name of an object without that of its release."""
    return name.removeprefix(f"{RELEASE}-")


@dataclass(frozen=True)
class Manifests:
    """The objects of a release; names are without its own."""

    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        """Return all objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def named(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind, by name."""
        return {short(item["metadata"]["name"]): item for item in self.of(kind)}

    @property
    def workloads(self) -> dict[str, Object]:
        """Deployments, StatefulSets and Jobs, by the component of their pods."""
        return {
            item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: item
            for item in self.of("Deployment", "StatefulSet", "Job")
        }

    def pod(self, name: str) -> Object:
        """Return the pod spec of a workload."""
        spec: Object = self.workloads[name]["spec"]["template"]["spec"]
        return spec

    def pod_labels(self, name: str) -> dict[str, str]:
        """Return the labels of a workload's pods."""
        return dict(self.workloads[name]["spec"]["template"]["metadata"]["labels"])

    def container(self, name: str) -> Object:
        """Return the container that has its workload's name."""
        container: Object
        (container,) = (c for c in self.pod(name)["containers"] if c["name"] == name)
        return container

    def containers(self) -> Iterator[tuple[str, Object]]:
        """Yield all containers, init containers included, with their workload's name."""
        for name in self.workloads:
            pod = self.pod(name)
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                yield name, container

    def variables(self, name: str) -> dict[str, str]:
        """Return the environment variables of a service's container."""
        variables: dict[str, str] = {}
        for source in self.container(name).get("envFrom", ()):
            variables |= self.named("ConfigMap")[short(source["configMapRef"]["name"])]["data"]
        for variable in self.container(name).get("env", ()):
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
        return variables

    def settings(self, name: str) -> dict[str, str]:
        """Return the settings of a service, by names without the service's prefix."""
        prefix = f"SPECREJ_{name.upper()}_"
        variables = self.variables(name).items()
        return {key.removeprefix(prefix): v for key, v in variables if key.startswith(prefix)}


def accepted(
    name: str, variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> ProcessSettings:
    """Return a service's settings of these variables; AssertionError for an unknown variable."""
    known = {f"SPECREJ_{name}_{field}".upper() for field in SETTINGS[name].model_fields}
    assert variables.keys() - {"HF_HOME"} <= known
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    return load(SETTINGS[name], [])


# Packages with the types and schemas of custom resources, by API group.
_PACKAGES = {
    "cert-manager.io": "cert-manager",
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}


def package_of(item: Object) -> str:
    """The module that declares the kind of a custom resource; empty: Kubernetes' own kind."""
    group, _, _ = item["apiVersion"].partition("/")
    package = _PACKAGES.get(group)
    return f"@kubernetes-models/{package}/{item['apiVersion']}/{item['kind']}" if package else ""


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches; only the operator In is supported."""
    if selector is None:
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
