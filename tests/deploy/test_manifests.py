"""Every overlay is valid, holds together, and says what the code says. Nothing here is applied."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from kubernetes_validate import utils as schemas

from deploy.images.build import name_of
from specrej.prometheus import prometheus_name
from specrej.serving import LIVENESS
from specrej.settings import load
from specrej.telemetry import names
from specrej.telemetry.names import Metric
from specrej.v1 import generator_pb2, orchestrator_pb2, reward_pb2
from tests.certificates import Authority
from tests.deploy.expressions import of_dashboards, selected
from tests.deploy.manifests import (
    DEPLOY,
    MARGIN_S,
    OVERLAYS,
    ROOT,
    SERVICES,
    SETTINGS,
    Manifests,
    Object,
    rendered,
    renderer,
    selects,
)
from tests.deploy.policies import NAMESPACE, Peer, edges

pytestmark = pytest.mark.skipif(
    renderer() is None, reason="no kustomize: make kustomize fetches it"
)

HEALTH_NAMES = {
    "orchestrator": orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
    "generator": generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"].full_name,
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
MINORS = sorted({schemas.major_minor(each) for each in schemas.all_versions()})[-5:]
SCALED = json.loads(Path(__file__).with_name("scaledobject.schema.json").read_text())
# What `specrej health` and other clients read: no service's own settings.
CLIENT = {"SPECREJ_TLS_CA", "SPECREJ_TLS_CERT", "SPECREJ_TLS_KEY"}


@pytest.fixture(params=OVERLAYS)
def made(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)


# Schemas


def test_the_overlays_are_there() -> None:
    """Guards against tests that pass since they find nothing to look at."""
    assert OVERLAYS == ["cpu-embedded", "gpu", "production"]
    assert len(MINORS) == 5
    for overlay in OVERLAYS:
        assert set(rendered(overlay).workloads) >= set(SERVICES)


@pytest.mark.parametrize("minor", MINORS)
def test_objects_are_valid(made: Manifests, minor: str) -> None:
    """Guards against a field that a cluster would refuse, or drop without a word."""
    for each in made.objects:
        if each["kind"] != "ScaledObject":
            kubernetes_validate.validate(dict(each), minor, strict=True)


def test_scaled_objects_are_valid(made: Manifests) -> None:
    for each in made.of("ScaledObject"):
        jsonschema.validate(each, SCALED)


@pytest.mark.parametrize("minor", MINORS)
def test_a_wrong_field_is_found(minor: str) -> None:
    """Guards against schemas that let everything pass."""
    wrong: dict[str, Any] = deepcopy(dict(rendered("cpu-embedded").workloads["generator"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, minor, strict=True)


# What belongs together


def test_everything_is_in_the_namespace(made: Manifests) -> None:
    for each in made.objects:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == NAMESPACE
    levels = made.named("Namespace")[NAMESPACE]["metadata"]["labels"]
    assert levels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_nothing_is_there_twice(made: Manifests) -> None:
    seen = Counter((each["kind"], each["metadata"]["name"]) for each in made.objects)
    assert max(seen.values()) == 1


def test_selectors_match_pods(made: Manifests) -> None:
    """Guards against a Service without endpoints, and one that reaches somebody else's pods."""
    for name, workload in made.workloads.items():
        labels = made.pod_labels(name)
        assert selects(workload["spec"]["selector"], labels)
        for kind in ("Service", "PodDisruptionBudget"):
            selector = _selector(made.named(kind)[name])
            hit = [each for each in made.workloads if selects(selector, made.pod_labels(each))]
            assert hit == [name]
        for spread in made.pod(name).get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"], labels)
    assert set(made.named("Service")) == set(made.workloads)


def _selector(found: Object) -> Object:
    selector: Object = found["spec"]["selector"]
    return {"matchLabels": selector} if found["kind"] == "Service" else selector


def test_services_are_headless(made: Manifests) -> None:
    """Guards against one connection, and so one backend, for all of a client's calls."""
    for service in made.of("Service"):
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is False
    generator = made.workloads["generator"]
    assert generator["kind"] == "StatefulSet"
    assert generator["spec"]["serviceName"] in made.named("Service")


def test_what_pods_refer_to_is_there(made: Manifests) -> None:
    for name in made.workloads:
        pod = made.pod(name)
        assert pod["serviceAccountName"] in made.named("ServiceAccount")
        volumes = {each["name"]: each for each in pod["volumes"]}
        for each in volumes.values():
            if claim := each.get("persistentVolumeClaim"):
                assert claim["claimName"] in made.named("PersistentVolumeClaim")
        mounted = {
            mount["name"]
            for owner, container in made.containers()
            if owner == name
            for mount in container["volumeMounts"]
        }
        assert mounted == set(volumes)


def test_pods_get_no_token_and_no_service_links(made: Manifests) -> None:
    """Guards against a token nobody needs, and REDIS_PORT=tcp://... among the variables."""
    for account in made.of("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for name in made.workloads:
        assert made.pod(name)["automountServiceAccountToken"] is False
        assert made.pod(name)["enableServiceLinks"] is False


def test_budgets_let_nodes_be_drained(made: Manifests) -> None:
    """Guards against a drain that takes both of two, and one that waits for what is broken."""
    for budget in made.of("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("name", SERVICES)
def test_pods_are_spread(made: Manifests, name: str) -> None:
    """Guards against two of a kind that one zone or one node takes along."""
    hash_label = {"StatefulSet": "controller-revision-hash", "Deployment": "pod-template-hash"}
    spread = made.pod(name)["topologySpreadConstraints"]
    assert {each["topologyKey"] for each in spread} == {
        "topology.kubernetes.io/zone", "kubernetes.io/hostname"
    }  # fmt: skip
    for each in spread:
        assert each["matchLabelKeys"] == [hash_label[made.workloads[name]["kind"]]]


# More than one of each


def _least(made: Manifests, name: str) -> int:
    """How many there are at least."""
    for scaler in made.of("HorizontalPodAutoscaler", "ScaledObject"):
        if scaler["spec"]["scaleTargetRef"]["name"] == name:
            spec = scaler["spec"]
            return int(spec.get("minReplicas") or spec["minReplicaCount"])
    return int(made.workloads[name]["spec"]["replicas"])


@pytest.mark.parametrize("overlay", ["gpu", "production"])
@pytest.mark.parametrize("name", SERVICES)
def test_there_are_two_of_each_where_it_matters(overlay: str, name: str) -> None:
    """Guards against a service that an upgrade, a node or a crash takes away."""
    assert _least(rendered(overlay), name) >= 2


@pytest.mark.parametrize("name", SERVICES)
def test_upgrades_keep_what_the_rest_can_do_without(made: Manifests, name: str) -> None:
    """Guards against an upgrade that waits for a GPU nobody has, or that leaves nobody."""
    spec = made.workloads[name]["spec"]
    if made.workloads[name]["kind"] == "StatefulSet":
        return  # one after the other, by its nature
    rolling = spec["strategy"]["rollingUpdate"]
    needs_gpu = "nvidia.com/gpu" in made.container(name)["resources"]["limits"]
    assert rolling == {"maxUnavailable": int(needs_gpu), "maxSurge": int(not needs_gpu)}
    assert rolling["maxUnavailable"] < _least(made, name)


# Ports and probes


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_those_of_the_settings(made: Manifests, name: str) -> None:
    """Guards against a Service, a probe or a scrape that asks at another port."""
    ports = {each["name"]: each["containerPort"] for each in made.container(name)["ports"]}
    variables = made.variables(name)
    prefix = f"SPECREJ_{name.upper()}_"
    assert ports == {
        "grpc": int(variables[f"{prefix}PORT"]),
        "metrics": int(variables[f"{prefix}METRICS_PORT"]),
    }
    assert ports["grpc"] == SETTINGS[name].model_fields["port"].default
    service = made.named("Service")[name]["spec"]["ports"]
    assert {each["name"]: each["port"] for each in service} == ports
    assert {each["targetPort"] for each in service} == set(ports)
    notes = made.workloads[name]["spec"]["template"]["metadata"].get("annotations", {})
    assert notes.get("prometheus.io/port", str(ports["metrics"])) == str(ports["metrics"])


@pytest.mark.parametrize("name", SERVICES)
def test_probes_ask_by_names_that_answer(made: Manifests, name: str) -> None:
    """Guards against a probe that is NOT_FOUND, or that speaks plaintext to a TLS port."""
    container, variables = made.container(name), made.variables(name)
    asked = {kind: _asked(container[kind], variables) for kind in PROBES}
    port = int(variables[f"SPECREJ_{name.upper()}_PORT"])
    assert {each for each, _ in asked.values()} == {port}
    assert asked["livenessProbe"][1] == LIVENESS
    assert asked["readinessProbe"][1] == HEALTH_NAMES[name]
    # The orchestrator waits for its backends, which is no reason to restart it.
    begins = LIVENESS if name == "orchestrator" else HEALTH_NAMES[name]
    assert asked["startupProbe"][1] == begins


def _asked(probe: Object, variables: dict[str, str]) -> tuple[int, str]:
    """Port and name."""
    if not any(each.endswith("_TLS_CERT") for each in variables):
        return probe["grpc"]["port"], probe["grpc"]["service"]
    assert "grpc" not in probe
    assert variables.keys() >= CLIENT
    program, command, address, flag, name = probe["exec"]["command"]
    assert (program, command, flag) == ("specrej", "health", "--service")
    host, _, port = address.partition(":")
    assert host == "localhost"
    return int(port), name


@pytest.mark.parametrize("name", SERVICES)
def test_models_have_time_to_load(made: Manifests, name: str) -> None:
    probe = made.container(name)["startupProbe"]
    least = 60 if name == "orchestrator" else 1800
    assert probe["periodSeconds"] * probe["failureThreshold"] >= least
    deadline = made.workloads[name]["spec"].get("progressDeadlineSeconds", least)
    assert deadline >= least


@pytest.mark.parametrize("name", SERVICES)
def test_grace_is_as_long_as_the_longest_request(made: Manifests, name: str) -> None:
    """Guards against SIGKILL for whoever still writes an answer."""
    settings = _settings_values(made, name)
    longest = float(_settings_values(made, "orchestrator")["DEADLINE_S"])
    (before,) = made.container(name)["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert float(settings["GRACE_S"]) >= longest
    ends = float(before) + float(settings["DRAIN_S"]) + float(settings["GRACE_S"])
    assert made.pod(name)["terminationGracePeriodSeconds"] >= ends + MARGIN_S


def _settings_values(made: Manifests, name: str) -> dict[str, str]:
    prefix = f"SPECREJ_{name.upper()}_"
    variables = made.variables(name).items()
    return {key.removeprefix(prefix): value for key, value in variables if key.startswith(prefix)}


# Settings


@pytest.fixture
def mounted(tmp_path: Path) -> dict[str, str]:
    """What secrets are mounted as, with real certificates, by where they are mounted."""
    pair = Authority(tmp_path, "ca").issue()
    (tmp_path / "ca.pem").rename(tmp_path / "ca.crt")
    pair.cert.rename(tmp_path / "tls.crt")
    pair.key.rename(tmp_path / "tls.key")
    (tmp_path / "password").write_text("secret")
    line = {"tenant": "acme", "sha256": "0" * 64, "roles": ["generate"]}
    (tmp_path / "tokens.jsonl").write_text(json.dumps(line))
    return dict.fromkeys(("/tls/", "/tokens/", "/redis/"), f"{tmp_path}/")


@pytest.mark.parametrize("name", SERVICES)
def test_settings_are_accepted(
    made: Manifests, name: str, mounted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a variable nobody reads, and a value that stops the service."""
    known = {f"SPECREJ_{name}_{field}".upper() for field in SETTINGS[name].model_fields}
    variables = made.variables(name)
    assert variables.keys() - CLIENT <= known
    for key, value in variables.items():
        for place, there in mounted.items():
            value = re.sub(f"^{place}", there, value)
        monkeypatch.setenv(key, value)
    settings = load(SETTINGS[name], [])
    assert settings.host == "0.0.0.0"
    assert settings.log_format == "json"


@pytest.mark.parametrize("name", SERVICES)
def test_files_of_settings_are_mounted(made: Manifests, name: str) -> None:
    """Guards against a path that is not there in the container, or cannot be written to."""
    mounts = [each["mountPath"] for each in made.container(name)["volumeMounts"]]
    for key, value in made.variables(name).items():
        if value.startswith("/"):
            assert any(value.startswith(f"{mount}/") for mount in mounts), key


def test_production_lets_in_nobody_unknown() -> None:
    """Guards against an open port where it matters."""
    made = rendered("production")
    for name in SERVICES:
        values = _settings_values(made, name)
        assert "ALLOW_ANONYMOUS" not in values
        assert values["REFLECTION"] == "false"
        assert values["TLS_CERT"] and values["TLS_KEY"]
        assert values.get("TOKENS_FILE") or values.get("TLS_CLIENT_CA")
    assert _settings_values(made, "orchestrator")["REDIS_URL"].startswith("rediss://")
    assert "redis" not in made.workloads


def test_addresses_are_services(made: Manifests) -> None:
    """Guards against a name that no Service has."""
    values = _settings_values(made, "orchestrator")
    services = made.named("Service")
    for name in ("generator", "reward"):
        for address in values[f"{name.upper()}_ADDRESS"].split(","):
            host, _, port = address.partition(":")
            assert int(port) in [each["port"] for each in services[host]["spec"]["ports"]]
    if values["REDIS_URL"].startswith("redis://"):
        assert "redis" in services


def test_threads_are_as_many_as_cpus(made: Manifests) -> None:
    """Guards against a thread for each core of the node in a container that has four."""
    for name in ("generator", "reward"):
        limit = made.container(name)["resources"]["limits"]["cpu"]
        assert _settings_values(made, name)["THREADS"] == limit


# Network policies


def _peers(made: Manifests) -> Iterator[Peer]:
    for name in made.workloads:
        yield Peer(name, NAMESPACE, tuple(made.pod_labels(name).items()))
    yield Peer("neighbour", NAMESPACE)
    yield Peer("client", "somewhere", (("specrej.io/client", "true"),))
    yield Peer("stranger", "somewhere")
    yield Peer("monitoring", "monitoring")
    yield Peer("dns", "kube-system", (("k8s-app", "kube-dns"),))
    yield Peer("node-dns", "kube-system", (("k8s-app", "node-local-dns"),))
    yield Peer("node-dns address", "", address="169.254.20.10")
    yield Peer("metadata address", "", address="169.254.169.254")
    yield Peer("outside", "", address="10.1.2.3")


def test_policies_let_the_codes_edges_through_and_no_others(made: Manifests) -> None:
    redis = "redis" if "redis" in made.workloads else "outside"
    expected = {
        ("client", "orchestrator", ("TCP", 50050)),
        ("orchestrator", "generator", ("TCP", 50051)),
        ("orchestrator", "reward", ("TCP", 50052)),
        ("orchestrator", redis, ("TCP", 6379)),
        *(("monitoring", name, ("TCP", 9464)) for name in SERVICES),
        *((name, "monitoring", ("TCP", 4317)) for name in SERVICES),
        *(
            (name, dns, (protocol, 53))
            for name in SERVICES
            for dns in ("dns", "node-dns", "node-dns address")
            for protocol in ("UDP", "TCP")
        ),
    }
    numbers = (50050, 50051, 50052, 6379, 9464, 4317, 53, 443)
    ports = [(protocol, number) for protocol in ("UDP", "TCP") for number in numbers]
    assert edges(made.of("NetworkPolicy"), _peers(made), ports) == expected


def test_policies_are_what_denies(made: Manifests) -> None:
    """Guards against a reckoning that denies by itself."""
    asked = ("TCP", 50051)
    assert ("stranger", "generator", asked) in edges((), _peers(made), [asked])


def test_collector_is_where_policies_let_traces_go(made: Manifests) -> None:
    for name in SERVICES:
        if endpoint := _settings_values(made, name).get("OTLP_ENDPOINT"):
            assert endpoint.endswith(".monitoring.svc:4317")


# Autoscaling


def test_each_workload_has_one_autoscaler() -> None:
    """Guards against two that pull at one workload, and manifests that set replicas back."""
    made = rendered("production")
    scalers = made.of("HorizontalPodAutoscaler", "ScaledObject")
    targets = [each["spec"]["scaleTargetRef"] for each in scalers]
    assert sorted(each["name"] for each in targets) == sorted(SERVICES)
    for each in targets:
        workload = made.workloads[each["name"]]
        assert (each["kind"], each["apiVersion"]) == (workload["kind"], workload["apiVersion"])
        assert "replicas" not in workload["spec"]


def test_autoscalers_ask_for_what_services_tell(made: Manifests) -> None:
    """Guards against a trigger that never moves. Dashboards are held against a real run."""
    metrics = (each for each in vars(names).values() if isinstance(each, Metric))
    told = {prometheus_name(each): set(each.labels) for each in metrics}
    shown = {
        (each.name, matcher)
        for expression in of_dashboards()
        for each in selected(expression.text)
        for matcher in each.matchers
    }
    for query in _queries(made):
        for each in selected(query):
            assert {name for name, _, _ in each.matchers} <= told[each.name]
            assert {(each.name, matcher) for matcher in each.matchers} <= shown


def _queries(made: Manifests) -> list[str]:
    return [
        trigger["metadata"]["query"]
        for scaler in made.of("ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    ]


def test_queues_and_slots_scale_generators() -> None:
    asked = {each.name for query in _queries(rendered("production")) for each in selected(query)}
    assert asked == {
        prometheus_name(each)
        for each in (names.REQUESTS_QUEUED, names.SESSIONS, names.SLOTS, names.REWARD_QUEUED)
    }


# Containers


def test_images_are_pinned(made: Manifests) -> None:
    """Guards against what changes by itself, and against names that an overlay forgot."""
    for _, container in made.containers():
        name, _, tag = container["image"].partition("@")[0].rpartition(":")
        assert "/" in name and tag and tag != "latest", container["image"]


@pytest.mark.parametrize("overlay", ["cpu-embedded", "gpu"])
def test_images_are_those_that_are_built(overlay: str) -> None:
    """Guards against a quick start whose pods wait for images that nobody makes by these names."""
    suffix = "-cuda" if overlay == "gpu" else ""
    asked = {
        container["name"]: container["image"]
        for _, container in rendered(overlay).containers()
        if container["name"] != "redis"
    }
    made = {"orchestrator": name_of("orchestrator")}
    made |= {name: name_of(f"{name}{suffix}") for name in ("generator", "reward")}
    assert asked == made | ({} if suffix else {"models": name_of("models")})


def test_containers_have_resources(made: Manifests) -> None:
    for name, container in made.containers():
        resources = container["resources"]
        for kind in ("requests", "limits"):
            assert resources[kind].keys() >= {"cpu", "memory", "ephemeral-storage"}, name


def test_containers_are_restricted(made: Manifests) -> None:
    """Guards against what Kubernetes' restricted profile refuses, and a root to write to."""
    for name, container in made.containers():
        own, of_pod = container["securityContext"], made.pod(name)["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert of_pod["runAsNonRoot"] is True and of_pod["runAsUser"] > 0
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        pod = made.pod(name)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_services_run_as_the_images_user(made: Manifests) -> None:
    dockerfile = (DEPLOY / "images" / "Dockerfile").read_text()
    for name in SERVICES:
        user = made.pod(name)["securityContext"]
        assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile


def test_models_are_there_before_they_are_read(made: Manifests) -> None:
    """Guards against pods that mount an empty directory and find no model in it."""
    for name in ("generator", "reward"):
        pod = made.pod(name)
        (models,) = (each for each in pod["volumes"] if each["name"] == "models")
        fills = [
            mount["name"]
            for container in pod.get("initContainers", ())
            for mount in container["volumeMounts"]
        ]
        assert "persistentVolumeClaim" in models or "models" in fills


# Secrets


def _secrets(made: Manifests) -> set[str]:
    volumes = (volume for name in made.workloads for volume in made.pod(name)["volumes"])
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def test_secrets_are_referred_to_and_not_here(made: Manifests) -> None:
    """Guards against a password in the repository, and a secret that nobody is told to make."""
    assert made.of("Secret") == []
    assert not any("secretGenerator" in path.read_text() for path in DEPLOY.rglob("*ustomization*"))
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert {name for name in _secrets(made) if f" {name} " not in page} == set()


@pytest.mark.parametrize("name", ["generator", "reward"])
def test_certificates_are_of_the_name_that_is_asked_for(name: str) -> None:
    """Guards against a page that leads to certificates which orchestrators refuse: they check the
    name that they were given, whichever of its addresses they call."""
    values = _settings_values(rendered("production"), "orchestrator")
    assert values["BACKEND_TLS_CA"]
    asked = {each.partition(":")[0] for each in values[f"{name.upper()}_ADDRESS"].split(",")}
    page = (ROOT / "docs" / "deploy.md").read_text()
    (row,) = re.findall(rf"^\| {name}-tls \|(.*)\|$", page, re.MULTILINE)
    assert asked | {"localhost"} <= set(re.findall(r"`([\w.-]+)`", row))


def test_production_needs_the_secrets_that_the_page_makes() -> None:
    assert _secrets(rendered("production")) == {
        "orchestrator-tls", "generator-tls", "reward-tls", "orchestrator-tokens", "redis"
    }  # fmt: skip
    assert _secrets(rendered("cpu-embedded")) == set()
