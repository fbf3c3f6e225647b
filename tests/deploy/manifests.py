"""Overlays as kustomize renders them, and how to find one's way in what it prints."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings
from specrej.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
SERVICES = ("orchestrator", "generator", "reward")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "orchestrator": OrchestratorSettings,
    "generator": GeneratorSettings,
    "reward": RewardSettings,
}
MARGIN_S = 10  # between the end of what runs and SIGKILL

Object = Mapping[str, Any]


def renderer() -> list[str] | None:
    """What `make kustomize` fetches, or the one inside kubectl; None: neither is there."""
    fetched = ROOT / ".tools" / "kustomize"
    if fetched.exists():
        return [str(fetched), "build"]
    kubectl = shutil.which("kubectl")
    return [kubectl, "kustomize"] if kubectl else None


@cache
def rendered(overlay: str) -> Manifests:
    """All objects of an overlay, as a cluster would get them."""
    command = renderer()
    assert command, "there is one"
    result = subprocess.run(
        [*command, str(DEPLOY / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return Manifests(overlay, tuple(yaml.safe_load_all(result.stdout)))


@dataclass(frozen=True)
class Manifests:
    """What an overlay is made of."""

    overlay: str
    objects: tuple[Object, ...]

    def of(self, *kinds: str) -> list[Object]:
        """All of some kinds."""
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str) -> dict[str, Object]:
        """All of a kind, by name."""
        return {each["metadata"]["name"]: each for each in self.of(kind)}

    @property
    def workloads(self) -> dict[str, Object]:
        """Deployments and StatefulSets, by name."""
        return {each["metadata"]["name"]: each for each in self.of("Deployment", "StatefulSet")}

    def pod(self, name: str) -> Object:
        """What a workload's pods are."""
        spec: Object = self.workloads[name]["spec"]["template"]["spec"]
        return spec

    def pod_labels(self, name: str) -> dict[str, str]:
        """Of a workload's pods."""
        return dict(self.workloads[name]["spec"]["template"]["metadata"]["labels"])

    def container(self, name: str) -> Object:
        """The one of a workload that bears its name."""
        found: Object
        (found,) = (each for each in self.pod(name)["containers"] if each["name"] == name)
        return found

    def containers(self) -> Iterator[tuple[str, Object]]:
        """All there are, init containers too, with their workload's name."""
        for name in self.workloads:
            pod = self.pod(name)
            for each in (*pod.get("initContainers", ()), *pod["containers"]):
                yield name, each

    def variables(self, name: str) -> dict[str, str]:
        """What a service's container finds in its environment."""
        found: dict[str, str] = {}
        for source in self.container(name).get("envFrom", ()):
            found |= self.named("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for each in self.container(name).get("env", ()):
            found[each["name"]] = each["value"]
        return found


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; the operator In alone is used here."""
    if selector is None:
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
