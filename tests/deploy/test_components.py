"""What components add to overlays: routes, certificates, monitoring, models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.rules import ALERTS, groups
from specrej.v1 import orchestrator_pb2
from specrej_models.hub import is_name
from tests.deploy.manifests import (
    DEPLOY,
    DOWNLOAD,
    OVERLAYS,
    ROOT,
    SERVICES,
    VARIANTS,
    Manifests,
    Object,
    package_of,
    rendered,
    selects,
)
from tests.deploy.policies import NAMESPACE

SCHEMAS = ROOT / ".tools" / "schemas"  # make crd-schemas
OPERATORS, INGRESS, SHARED, BALANCED = VARIANTS
ROUTED = (OPERATORS, SHARED)
COMPILER = ("--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")


def test_all_components_are_rendered() -> None:
    """Guards against a component that no test reads."""
    used = {component for _, components, _ in VARIANTS.values() for component in components}
    for overlay in OVERLAYS:
        content = yaml.safe_load((DEPLOY / "overlays" / overlay / "kustomization.yaml").read_text())
        used |= {path.removeprefix("../../components/") for path in content["components"]}
    files = (DEPLOY / "components").rglob("kustomization.yaml")
    existing = {str(file.parent.relative_to(DEPLOY / "components")) for file in files}
    assert existing - used == {"controller", "restricted", "several-nodes/pods"}  # parts of others


# Custom resources


def _program(objects: Iterable[Object]) -> str:
    """TypeScript that declares each object as its kind, which refuses unknown fields, and then
    compares it with the kind's schema."""
    items = [item for item in objects if package_of(item)]
    modules = {item["kind"]: package_of(item) for item in items}
    lines = [f'import {{ {kind}, type I{kind} }} from "{path}";' for kind, path in modules.items()]
    for number, item in enumerate(items):
        lines.append(f"const object{number}: I{item['kind']} = {json.dumps(item)};")
        lines.append(f"new {item['kind']}(object{number}).validate();")
    return "\n".join(lines)


def _errors(program: str, directory: Path) -> str:
    """What the compiler and the schemas reject; empty: nothing."""
    (directory / "objects.mts").write_text(program)
    (directory / "node_modules").symlink_to(SCHEMAS / "node_modules")
    compiler = str(SCHEMAS / "node_modules" / "typescript" / "bin" / "tsc")
    errors = ""
    # The compiler writes objects.mjs also if it rejects a type.
    for command in ((compiler, *COMPILER, "objects.mts"), ("objects.mjs",)):
        result = subprocess.run(
            ("node", *command), cwd=directory, capture_output=True, text=True, check=False
        )
        if result.returncode:
            errors += f"{result.stdout}{result.stderr}"
    return errors


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """A directory for a program; skips the test without Node or the schemas."""
    if not shutil.which("node") or not (SCHEMAS / "node_modules").exists():
        pytest.skip("no schemas of custom resources: make crd-schemas installs them")
    return tmp_path


@pytest.mark.long
def test_custom_resources_are_valid(checked: Path) -> None:
    """Guards against a field that a controller would reject or drop."""
    objects = [item for name in (*OVERLAYS, *VARIANTS) for item in rendered(name).objects]
    kinds = {item["kind"] for item in objects if package_of(item)}
    assert kinds == {
        *("GRPCRoute", "HTTPRoute", "Gateway", "BackendTLSPolicy", "Issuer", "Certificate"),
        *("PodMonitor", "PrometheusRule", "ScaledObject"),
    }
    assert _errors(_program(objects), checked) == ""


# The way in


def _seconds(duration: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


@pytest.mark.parametrize("name", ROUTED)
def test_routes_lead_to_services(name: str) -> None:
    """Guards against a route to a port or a method that does not exist, and an early timeout."""
    manifests, settings = rendered(name), VARIANTS[name][2]
    (grpc,), (http,) = manifests.of("GRPCRoute"), manifests.of("HTTPRoute")
    for route, service in ((grpc, "orchestrator"), (http, "gateway")):
        (rule,) = route["spec"]["rules"]
        (target,) = rule["backendRefs"]
        port = manifests.named("Service")[service]["spec"]["ports"][0]["port"]
        assert target == {"name": "edge", "port": port}
        assert port in [
            item["port"] for item in manifests.named("Service")["edge"]["spec"]["ports"]
        ]
        namespace, _, gateway = settings["gateway"].partition("/")
        assert route["spec"]["parentRefs"] == [{"namespace": namespace, "name": gateway}]
    assert [grpc["spec"]["hostnames"], http["spec"]["hostnames"]] == [
        [settings["grpc-host"]], [settings["http-host"]],
    ]  # fmt: skip
    public = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name
    methods = [match["method"] for match in grpc["spec"]["rules"][0]["matches"]]
    assert methods == [{"service": public}, {"service": "grpc.health.v1.Health"}]
    longest = int(manifests.settings("gateway")["DEADLINE_S"])
    assert _seconds(http["spec"]["rules"][0]["timeouts"]["request"]) > longest


@pytest.mark.parametrize("name", [*VARIANTS])
def test_the_edge_uses_the_protocol_of_the_services(name: str) -> None:
    """Guards against plaintext to a port with TLS, and a name that its certificate lacks."""
    manifests = rendered(name)
    secure = "TLS_CERT" in manifests.settings("orchestrator")
    for ingress in manifests.of("Ingress"):
        protocol = "GRPC" if ingress["metadata"]["name"] == "orchestrator" else "HTTP"
        notes = ingress["metadata"]["annotations"]
        key = "nginx.ingress.kubernetes.io/backend-protocol"
        assert notes[key] == protocol + ("S" if secure else "")
    policies = manifests.named("BackendTLSPolicy")
    assert set(policies) == ({"edge"} if name == OPERATORS else set())
    for service, policy in policies.items():
        (target,) = policy["spec"]["targetRefs"]
        assert (target["kind"], target["name"]) == ("Service", service)
        assert policy["spec"]["validation"]["hostname"] in _names(manifests)[f"{service}-tls"]


# Certificates


def _names(manifests: Manifests) -> dict[str, list[str]]:
    """Names of all server certificates, by their secrets."""
    return {
        item["spec"]["secretName"]: item["spec"]["dnsNames"]
        for item in manifests.of("Certificate")
        if not item["spec"].get("isCA")
    }


@pytest.mark.parametrize("name", [OPERATORS, INGRESS])
def test_certificates_fill_the_secrets(name: str) -> None:
    """Guards against a pod that waits for a secret, and a certificate that its peers reject."""
    manifests, settings = rendered(name), VARIANTS[name][2]
    certified = _names(manifests)
    mounted = {
        volume["secret"]["secretName"]
        for service in SERVICES
        for volume in manifests.pod(service)["volumes"]
        if "secret" in volume
    }
    assert set(certified) == {secret for secret in mounted if secret.endswith("-tls")} | {
        "edge-tls"
    }
    assert certified["edge-tls"] == [
        *(settings["grpc-host"], settings["http-host"]),
        *("edge", "edge.specrej.svc"),
    ]
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


# Monitoring


def test_rules_are_those_of_the_alerts() -> None:
    """Guards against a second set of rules: make rules writes them."""
    (rules,) = rendered(OPERATORS).of("PrometheusRule")
    assert rules["spec"] == {"groups": groups()}
    assert len(groups()) == len(list(ALERTS.glob("*.yaml"))) == 2


def test_the_monitor_scrapes_all_services() -> None:
    manifests = rendered(OPERATORS)
    (monitor,) = manifests.of("PodMonitor")
    assert monitor["metadata"]["namespace"] == NAMESPACE
    selected = [
        name
        for name in manifests.workloads
        if selects(monitor["spec"]["selector"], manifests.pod_labels(name))
    ]
    assert sorted(selected) == sorted((*SERVICES, "edge"))
    jobs = [manifests.pod_labels(name)[monitor["spec"]["jobLabel"]] for name in selected]
    assert jobs == selected
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in selected:
        assert endpoint["port"] in [port["name"] for port in manifests.container(name)["ports"]]


# Models


def test_models_are_fetched_to_where_the_services_look_for_them() -> None:
    """Guards against a download that no service reads, and services that fetch for themselves."""
    manifests, settings = rendered(OPERATORS), VARIANTS[OPERATORS][2]
    job = manifests.container(DOWNLOAD)
    assert job["command"] == ["specrej", "pull"]
    assert job["args"] == [settings["generator-model"], settings["reward-model"]]
    assert all(is_name(model) for model in job["args"])
    assert _models(manifests) == job["args"]
    variables = manifests.variables(DOWNLOAD)
    assert variables["HF_HUB_OFFLINE"] == "0"
    for name in ("generator", "reward"):
        assert manifests.variables(name)["HF_HOME"] == variables["HF_HOME"]


def _models(manifests: Manifests) -> list[str]:
    """What the generator and the one reward load."""
    (reward,) = json.loads(manifests.settings("reward")["REWARDS"])
    assert (reward["name"], reward["kind"]) == ("helpful", "classifier")
    return [manifests.settings("generator")["MODEL"], reward["directory"]]


# Servers behind a router


def test_the_router_knows_all_servers() -> None:
    """Guards against a server without requests, and generators that call one server, or another
    model than the servers have."""
    manifests = rendered(BALANCED)
    servers, router = manifests.workloads["vllm"]["spec"], manifests.container("vllm-router")
    hosts = [f"vllm-{i}.{servers['serviceName']}:8000" for i in range(servers["replicas"])]
    flags = router["args"]
    assert flags[flags.index("--worker-urls") + 1 :] == [f"http://{host}" for host in hosts]
    settings, (service, *_) = manifests.settings("generator"), router["ports"]
    assert settings["REMOTE_URL"] == f"http://vllm-router:{service['containerPort']}/v1"
    assert f"--model={settings['MODEL']}" in manifests.container("vllm")["args"]
    assert "nvidia.com/gpu" not in manifests.container("generator")["resources"]["limits"]
