"""Overlays and variants as rendered by kustomize, with accessors for objects, pods, containers."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from gateway.settings import GatewaySettings
from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings
from specrej.settings import ProcessSettings, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
_EDGE = {
    "grpc-host": "grpc.specrej.example.com",
    "http-host": "specrej.example.com",
    "controller-namespace": "controllers",
}
# Overlays with more components and settings, as an operator writes them.
VARIANTS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "production by operators": (
        "production",
        (
            *("gateway-api", "gateway-api/gateway", "gateway-api/tls"),
            *("cert-manager", "monitoring", "model-download"),
        ),
        _EDGE
        | {
            "gateway": "specrej/edge",
            "gateway-class": "envoy",
            "generator-model": "org/generator@0123abc",
            "reward-model": "org/reward",
        },
    ),
    "production by ingress": (
        "production",
        ("ingress", "ingress/tls", "cert-manager"),
        _EDGE | {"ingress-class": "nginx"},
    ),
    "plaintext by a shared gateway": (
        "cpu-embedded",
        ("gateway-api",),
        _EDGE | {"gateway": "infrastructure/shared"},
    ),
    "servers behind a router": ("gpu", ("vllm-router",), {}),
}
GRPC = ("orchestrator", "generator", "reward")
SERVICES = (*GRPC, "gateway")
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "orchestrator": OrchestratorSettings,
    "generator": GeneratorSettings,
    "reward": RewardSettings,
}
WORKER = "generator-worker"  # pods that compute for a generator of several nodes
DOWNLOAD = "model-download"
MARGIN_S = 10  # between the end of the last request and SIGKILL

Object = Mapping[str, Any]


@cache
def rendered(name: str) -> Manifests:
    """Return all objects of an overlay or a variant, as a cluster would receive them."""
    if name in OVERLAYS:
        return Manifests(parsed(kustomized(DEPLOY / "overlays" / name)))
    overlay, components, settings = VARIANTS[name]
    with tempfile.TemporaryDirectory() as copy:
        for part in ("alerts", "base", "components", "dashboards", "edge", "overlays"):
            shutil.copytree(DEPLOY / part, Path(copy) / part)
        _extend(Path(copy) / "overlays" / overlay, components, settings)
        return Manifests(parsed(kustomized(Path(copy) / "overlays" / overlay)))


def parsed(text: str) -> tuple[Object, ...]:
    """Return the objects of YAML documents; empty ones are left out."""
    documents = yaml.load_all(text, yaml.CSafeLoader)  # 8 times as fast as the loader in Python
    return tuple(document for document in documents if document)


def _extend(overlay: Path, components: Iterable[str], settings: dict[str, str]) -> None:
    """Add components and settings to a copy of an overlay."""
    file, values = overlay / "kustomization.yaml", overlay / "settings.yaml"
    content = yaml.safe_load(file.read_text())
    content["components"] += [f"../../components/{component}" for component in components]
    content["resources"] = list(dict.fromkeys([*content["resources"], values.name]))
    file.write_text(yaml.safe_dump(content))
    metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    given = yaml.safe_load(values.read_text())["data"] if values.exists() else {}
    values.write_text(yaml.safe_dump({**metadata, "data": given | settings}))


@cache
def kustomized(directory: Path) -> str:
    """Return what kustomize builds; skips the test where there is none."""
    fetched = ROOT / ".tools" / "kustomize"
    command = [str(fetched), "build"] if fetched.exists() else ["kubectl", "kustomize"]
    if not shutil.which(command[0]):
        pytest.skip("no kustomize: make kustomize fetches it")
    result = subprocess.run([*command, directory], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@dataclass(frozen=True)
class Manifests:
    """The objects of an overlay."""

    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        """Return all objects of these kinds."""
        return [item for item in self.objects if item["kind"] in kinds]

    def named(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind, by name."""
        return {item["metadata"]["name"]: item for item in self.of(kind)}

    @property
    def workloads(self) -> dict[str, Object]:
        """Deployments, StatefulSets, Jobs, and each kind of pods of LeaderWorkerSets, by name."""
        kinds = ("Deployment", "StatefulSet", "Job")
        workloads = {item["metadata"]["name"]: item for item in self.of(*kinds)}
        for group in self.of("LeaderWorkerSet"):
            for part in ("leaderTemplate", "workerTemplate"):
                template = group["spec"]["leaderWorkerTemplate"][part]
                name = {
                    "app.kubernetes.io/name": template["metadata"]["labels"][
                        "app.kubernetes.io/name"
                    ]
                }
                spec = {**group["spec"], "template": template, "selector": {"matchLabels": name}}
                workloads[name["app.kubernetes.io/name"]] = {**group, "spec": spec}
        return workloads

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
            variables |= self.named("ConfigMap")[source["configMapRef"]["name"]]["data"]
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
