"""Overlays as rendered by kustomize, with accessors for objects, pods and containers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
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
GRPC = ("orchestrator", "generator", "reward")
SERVICES = (*GRPC, "gateway")
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "orchestrator": OrchestratorSettings,
    "generator": GeneratorSettings,
    "reward": RewardSettings,
}
WORKER = "generator-worker"  # pods that compute for a generator of several nodes
MARGIN_S = 10  # between the end of the last request and SIGKILL

Object = Mapping[str, Any]


@cache
def rendered(overlay: str) -> Manifests:
    """Return all objects of an overlay, as a cluster would receive them."""
    fetched = ROOT / ".tools" / "kustomize"
    command = [str(fetched), "build"] if fetched.exists() else ["kubectl", "kustomize"]
    if not shutil.which(command[0]):
        pytest.skip("no kustomize: make kustomize fetches it")
    result = subprocess.run(
        [*command, DEPLOY / "overlays" / overlay], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return Manifests(tuple(yaml.safe_load_all(result.stdout)))


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
        """Deployments, StatefulSets, and each kind of pods of LeaderWorkerSets, by name."""
        workloads = {
            item["metadata"]["name"]: item for item in self.of("Deployment", "StatefulSet")
        }
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
            variables[variable["name"]] = variable["value"]
        return variables

    def settings(self, name: str) -> dict[str, str]:
        """Return the settings of a service, by names without the service's prefix."""
        prefix = f"SPECREJ_{name.upper()}_"
        variables = self.variables(name).items()
        return {key.removeprefix(prefix): v for key, v in variables if key.startswith(prefix)}


_UNITS = {"m": 1e-3, "": 1.0, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}


def quantity(text: str) -> float:
    """The value of a Kubernetes quantity: cores or bytes."""
    number = text.rstrip("mKMGi")
    return float(number) * _UNITS[text.removeprefix(number)]


def needed(manifests: Manifests, name: str, kind: str, resource: str) -> float:
    """The requests or limits of all pods of a workload; init containers run before the others."""
    pod = manifests.pod(name)
    before, together = (
        [quantity(container["resources"][kind][resource]) for container in pod.get(group, ())]
        for group in ("initContainers", "containers")
    )
    of_pod = max([sum(together), *before])
    return of_pod * int(manifests.workloads[name]["spec"]["replicas"])


def accepted(
    name: str, variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> ProcessSettings:
    """Return a service's settings of these variables; AssertionError for an unknown variable."""
    known = {f"SPECREJ_{name}_{field}".upper() for field in SETTINGS[name].model_fields}
    assert variables.keys() <= known
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    return load(SETTINGS[name], [])


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches; only the operator In is supported."""
    if selector is None:
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
