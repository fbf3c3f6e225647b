"""Every overlay is valid, consistent, and agrees with the code. No cluster is involved."""

from __future__ import annotations

import json
import re
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from kubernetes_validate import utils as schemas

from deploy.images.build import name_of
from generator_service.settings import GeneratorSettings
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.server.serving import LIVENESS
from specrej.settings import load
from specrej.v1 import orchestrator_pb2
from tests.deploy.manifests import (
    DEPLOY,
    DOWNLOAD,
    GRPC,
    MARGIN_S,
    SERVICES,
    SETTINGS,
    WORKER,
    Manifests,
    Object,
    package_of,
    rendered,
    selects,
)
from tests.deploy.policies import NAMESPACE

HEALTH_NAMES = {
    "orchestrator": orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
    "generator": generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"].full_name,
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
# It reads the schemas, of some MB, for each object.
schemas.schema_contents = cache(schemas.schema_contents)
OLDEST, *_, NEWEST = sorted({schemas.major_minor(item) for item in schemas.all_versions()})[-5:]
SCHEMA = json.loads(Path(__file__).with_name("leaderworkerset.schema.json").read_text())


# Schemas


@pytest.mark.parametrize("minor", [OLDEST, NEWEST])
def test_objects_are_valid(manifests: Manifests, minor: str) -> None:
    """Guards against a field that a cluster would reject or drop, and schemas without effect."""
    for item in manifests.objects:
        if item["kind"] == "LeaderWorkerSet":
            jsonschema.validate(item, SCHEMA)
        elif not package_of(item):  # else see test_components.py
            kubernetes_validate.validate(dict(item), minor, strict=True)
    for name in manifests.workloads:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        kubernetes_validate.validate({**pod, "spec": manifests.pod(name)}, minor, strict=True)
    wrong: dict[str, Any] = deepcopy(dict(manifests.workloads["orchestrator"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, minor, strict=True)


# Consistency


def test_objects_are_unique_and_in_the_namespace(manifests: Manifests) -> None:
    for item in manifests.objects:
        assert item["kind"] == "Namespace" or item["metadata"]["namespace"] == NAMESPACE
    levels = manifests.named("Namespace")[NAMESPACE]["metadata"]["labels"]
    assert levels["pod-security.kubernetes.io/enforce"] == "restricted"
    numbers = Counter((item["kind"], item["metadata"]["name"]) for item in manifests.objects)
    assert max(numbers.values()) == 1


def test_selectors_match_pods(manifests: Manifests) -> None:
    """Guards against a Service without endpoints, and one that selects another service's pods."""
    for name, workload in manifests.workloads.items():
        if name == DOWNLOAD:
            continue
        labels = manifests.pod_labels(name)
        assert selects(workload["spec"]["selector"], labels)
        if name == WORKER:
            continue
        for kind in ("Service", "PodDisruptionBudget"):
            selector = _selector(manifests.named(kind)[name])
            selected_names = [
                n for n in manifests.workloads if selects(selector, manifests.pod_labels(n))
            ]
            assert selected_names == [name]
        for spread in manifests.pod(name).get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"], labels)
    assert set(manifests.named("Service")) == set(manifests.workloads) - {WORKER, DOWNLOAD}


def _selector(item: Object) -> Object:
    selector: Object = item["spec"]["selector"]
    return {"matchLabels": selector} if item["kind"] == "Service" else selector


def test_services_are_headless(manifests: Manifests) -> None:
    """Guards against a single connection, and thus a single backend, for all calls of a client."""
    for name, service in manifests.named("Service").items():
        # Clients of the gateway connect for few requests: the cluster balances them. The edge
        # balances calls.
        assert service["spec"].get("clusterIP") == (None if name in ("edge", "gateway") else "None")
        assert service["spec"]["publishNotReadyAddresses"] is False
    generator, names = manifests.workloads["generator"], manifests.named("Service")
    if generator["kind"] == "LeaderWorkerSet":
        # Its controller creates a Service of its name, which has pods that are not ready.
        assert generator["metadata"]["name"] not in names
    else:
        assert generator["kind"] == "StatefulSet" and generator["spec"]["serviceName"] in names


def test_references_of_pods_exist(manifests: Manifests) -> None:
    """Also guards against unneeded API tokens, and REDIS_PORT=tcp://... among the variables."""
    for name in manifests.workloads:
        pod = manifests.pod(name)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        account = manifests.named("ServiceAccount")[pod["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in manifests.named("PersistentVolumeClaim")
        mounted = {
            mount["name"]
            for owner, container in manifests.containers()
            if owner == name
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}


# Replicas


def test_pods_of_a_group_are_nodes_of_one_generator() -> None:
    """Guards against nodes with other arguments, and GPUs that are left out."""
    manifests = rendered("gpu-nodes")
    (group,) = manifests.of("LeaderWorkerSet")
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    leader = manifests.container("generator")
    (worker,) = manifests.pod(WORKER)["containers"]
    assert not worker.keys() & {"ports", *PROBES}
    for index, container in enumerate((leader, worker)):
        variables = {"LEADER_ADDRESS": "leader.nodes", "GROUP_SIZE": size, "WORKER_INDEX": index}
        words = [*container["args"]]
        for name, value in variables.items():
            words = [word.replace(f"$(LWS_{name})", str(value)) for word in words]
        settings = load(GeneratorSettings, words)
        assert settings.node_rank == index
        options = settings.vllm_options
        assert (options["nnodes"], options["master_addr"]) == (size, "leader.nodes")
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert options["tensor_parallel_size"] == size * gpus
        assert container["envFrom"] == leader["envFrom"]


# Ports and probes


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_those_of_the_settings(manifests: Manifests, name: str) -> None:
    """Guards against a Service, a probe or a scrape with another port than the container's."""
    ports = {item["name"]: item["containerPort"] for item in manifests.container(name)["ports"]}
    main = "grpc" if name in GRPC else "http"
    variables = manifests.variables(name)
    prefix = f"SPECREJ_{name.upper()}_"
    named = {main: "PORT", "metrics": "METRICS_PORT", "health": "HEALTH_PORT"}
    assert ports == {port: int(variables[f"{prefix}{key}"]) for port, key in named.items()}
    assert ports[main] == SETTINGS[name].model_fields["port"].default
    service = manifests.named("Service")[name]["spec"]["ports"]
    ports.pop("health")  # kubelet connects to the pod
    assert {item["name"]: item["port"] for item in service} == ports
    assert {item["targetPort"] for item in service} == set(ports)
    notes = manifests.workloads[name]["spec"]["template"]["metadata"].get("annotations", {})
    assert notes.get("prometheus.io/port", str(ports["metrics"])) == str(ports["metrics"])


def test_probes_of_the_gateway(manifests: Manifests) -> None:
    """Guards against a probe of a route that does not exist, or through the public port."""
    container = manifests.container("gateway")
    for kind in PROBES:
        path = "/readyz" if kind == "readinessProbe" else "/healthz"
        assert container[kind]["httpGet"] == {"path": path, "port": "health"}


@pytest.mark.parametrize("name", GRPC)
def test_probes_use_names_that_exist(manifests: Manifests, name: str) -> None:
    """Guards against a probe that is NOT_FOUND, or one in plaintext to a TLS port."""
    container = manifests.container(name)
    probes = {kind: container[kind]["grpc"] for kind in PROBES}
    health = int(manifests.settings(name)["HEALTH_PORT"])
    assert {probe["port"] for probe in probes.values()} == {health}
    assert probes["livenessProbe"]["service"] == LIVENESS
    assert probes["readinessProbe"]["service"] == HEALTH_NAMES[name]
    # The orchestrator waits for its backends; a restart would not help.
    startup = LIVENESS if name == "orchestrator" else HEALTH_NAMES[name]
    assert probes["startupProbe"]["service"] == startup


@pytest.mark.parametrize("name", SERVICES)
def test_grace_is_as_long_as_the_longest_request(manifests: Manifests, name: str) -> None:
    """Guards against SIGKILL during an answer."""
    settings = manifests.settings(name)
    longest = float(manifests.settings("orchestrator")["DEADLINE_S"])
    (before,) = manifests.container(name)["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert float(settings["GRACE_S"]) >= longest
    ends = float(before) + float(settings["DRAIN_S"]) + float(settings["GRACE_S"])
    assert manifests.pod(name)["terminationGracePeriodSeconds"] >= ends + MARGIN_S


# Containers


@pytest.mark.parametrize("overlay", ["cpu-embedded", "gpu", "gpu-nodes"])
def test_images_have_the_names_that_are_built(overlay: str) -> None:
    """Guards against a quick start with images that are never built."""
    suffix = "" if overlay == "cpu-embedded" else "-cuda"
    named = {
        container["name"]: container["image"]
        for _, container in rendered(overlay).containers()
        if container["name"] not in ("redis", "edge")
    }
    built = dict.fromkeys(("orchestrator", "gateway"), name_of("orchestrator"))
    built |= {name: name_of(f"{name}{suffix}") for name in ("generator", "reward")}
    assert named == built | ({} if suffix else {"models": name_of("models")})


def test_containers_are_pinned_limited_and_restricted(manifests: Manifests) -> None:
    """Guards against floating tags, foreign images without a digest, violations of Kubernetes'
    restricted profile, and a writable root."""
    dockerfile = (DEPLOY / "images" / "Dockerfile").read_text()
    for name, container in manifests.containers():
        tagged, _, digest = container["image"].partition("@")
        image, _, tag = tagged.rpartition(":")
        assert "/" in image and tag and tag != "latest", container["image"]
        # The edge's digest is the operator's.
        is_pinned = re.fullmatch("sha256:[0-9a-f]{64}", digest) or name == "edge"
        assert "/specrej/" in image or is_pinned, image
        for kind in ("requests", "limits"):
            assert container["resources"][kind].keys() >= {"cpu", "memory", "ephemeral-storage"}
        own, pod = container["securityContext"], manifests.pod(name)
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        user = pod["securityContext"]
        assert user["runAsNonRoot"] is True and user["runAsUser"] > 0
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        if name in SERVICES:
            assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
