"""What the images are made of. Nothing here is built: that takes a registry and minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images import install
from specrej.settings import load
from tests.deploy.manifests import DEPLOY, MARGIN_S, ROOT, SERVICES, SETTINGS

DOCKERFILE = DEPLOY / "images" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
TARGETS = ("orchestrator", "generator", "reward", "generator-cuda", "reward-cuda", "models")
COMPOSE = DEPLOY / "compose.yaml"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run(
        [hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


def test_every_target_is_there() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE)
    assert set(TARGETS) <= set(stages)
    assert len(stages) == len(set(stages))


def test_bases_are_pinned_by_digest() -> None:
    """Guards against an image that is another one tomorrow."""
    stages = set(re.findall(r" AS (\S+)$", TEXT, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) - stages
    assert bases == {"${BASE}"}
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", TEXT, re.MULTILINE)


def test_what_runs_is_not_root() -> None:
    for target in TARGETS:
        assert _user(target) == "10001:10001", target


def _user(stage: str) -> str:
    """The last one of a stage, or of the one that it is made from."""
    (base, body) = re.findall(rf"^FROM (\S+) AS {stage}\n(.*?)(?=^FROM|\Z)", TEXT, re.M | re.S)[0]
    users: list[str] = re.findall(r"^USER (\S+)$", body, re.MULTILINE)
    return users[-1] if users else _user(base)


def test_a_compiler_is_where_triton_needs_one_alone() -> None:
    assert TEXT.count("gcc") == 1
    after = TEXT[: TEXT.index("gcc")].rindex("FROM ")
    assert TEXT[after:].startswith("FROM runtime AS generator-cuda")


def test_what_is_copied_is_let_in() -> None:
    """Guards against a build that fails for a file that .dockerignore keeps out."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for arguments in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE)
        for source in arguments.split()
    }
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("extras", [["orchestrator"], ["models"], ["models", "embedded"]])
def test_everything_an_image_installs_is_pinned(extras: list[str]) -> None:
    """Guards against a package that came with another one and is in no lock."""
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {canonicalize_name(re.split("[=;]", line)[0]) for line in lock if "==" in line}
    asked = install.requirements(ROOT / "pyproject.toml", extras)
    assert set(_closure(asked)) <= pinned


def _closure(asked: list[str]) -> Iterator[str]:
    """The packages that these bring, as far as they are installed here."""
    seen: set[str] = set()
    waiting = [Requirement(each) for each in asked]
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        if name in seen or not _applies(each):
            continue
        seen.add(name)
        yield name
        waiting += _required(each)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _required(requirement: Requirement) -> list[Requirement]:
    try:
        found = [Requirement(each) for each in requires(requirement.name) or ()]
    except PackageNotFoundError:
        return []
    for each in found:
        extras = {extra for extra in requirement.extras if each.marker}
        if any(each.marker.evaluate({"extra": extra}) for extra in extras if each.marker):
            each.marker = None
    return found


def test_a_package_that_is_not_pinned_is_told() -> None:
    """Guards against a check that finds nothing."""
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    without = [line for line in lock if not line.startswith("grpcio==")]
    other = [re.sub("^numpy==.*", "numpy==1.0", line) for line in without]
    loose = {each.split()[0] for each in install.unpinned(other, gpu=False)}
    assert loose >= {"grpcio", "numpy"}
    assert "torch" not in loose


# Compose


def test_compose_names_what_is_there() -> None:
    """Guards against a service, a target or a file that compose asks for in vain."""
    compose = yaml.safe_load(COMPOSE.read_text())
    for service in compose["services"].values():
        if build := service.get("build"):
            assert build["target"] in TARGETS
            assert (COMPOSE.parent / build["context"]).resolve() == ROOT
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE.parent / source).exists(), source
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", SERVICES)
def test_compose_settings_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a variable nobody reads, and a value that stops the service."""
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    known = {f"SPECREJ_{name}_{field}".upper() for field in SETTINGS[name].model_fields}
    assert service["environment"].keys() <= known
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value.replace("${OTLP_ENDPOINT:-}", ""))
    settings = load(SETTINGS[name], [])
    assert service["healthcheck"]["test"][-1] == f"127.0.0.1:{settings.port}"
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.drain_seconds + settings.grace_s + MARGIN_S


def test_compose_images_are_pinned() -> None:
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        assert re.fullmatch(r"\S+/\S+:[\w.-]+(@sha256:[0-9a-f]{64})?", service["image"])
        assert "latest" not in service["image"]
