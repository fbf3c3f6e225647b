"""What the images are made of. Nothing here is built: that takes minutes, see `make images`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images import build, install, sizes, slim
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


def test_what_pip_is_told_reaches_every_stage() -> None:
    """Guards against an index that the first stage alone knows: arguments end with their stage."""
    (first,) = re.findall(r"^FROM \$\{BASE\} AS build\n(.*?)(?=^FROM)", TEXT, re.M | re.S)
    for name in build.PIP_VARIABLES:
        assert re.search(rf"^ARG {name}(=\S+)?$", first, re.MULTILINE)
        assert f"{name}=${name} " in first


CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# Of a machine on which nobody has told pip anything.
_PLAIN = {name: value for name, value in os.environ.items() if name[:4] not in ("PIP_", "MAKE")}
_PLAIN["PIP_CONFIG_FILE"] = os.devnull


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ({}, CPU_TORCH),
        ({"PIP_CERT": "ca.pem"}, CPU_TORCH),
        ({"PIP_EXTRA_INDEX_URL": "https://example.com"}, "https://example.com"),
        ({"PIP_FIND_LINKS": "wheels"}, ""),
    ],
)
def test_an_ordinary_machine_gets_the_cpu_build_of_torch(
    told: dict[str, str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against gigabytes of CUDA, after which the build stops; and against an index that is
    asked although pip was told of others."""
    (default,) = re.findall(r"^ARG PIP_EXTRA_INDEX_URL=(\S+)$", TEXT, re.MULTILINE)
    _environment(monkeypatch, told)
    assert build.pip_settings().get("PIP_EXTRA_INDEX_URL", default) == asked
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if arguments := service.get("build", {}).get("args"):
            assert arguments == {"PIP_INDEX_URL": None, "PIP_EXTRA_INDEX_URL": None}


@pytest.mark.parametrize("environment", [".venv", ".vllm"])
@pytest.mark.parametrize("name", ["", "PIP_INDEX_URL", "PIP_FIND_LINKS"])
def test_make_asks_for_the_cpu_build_of_torch(
    name: str, environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an environment that cannot be made: PyPI's torch wants another Triton."""
    _environment(monkeypatch, {name: "wheels"} if name else {})
    changed = ("--what-if=requirements.lock", "--what-if=requirements-vllm.txt")
    make = ["make", "--dry-run", *changed, f"PYTHON={sys.executable}", f"{environment}/.installed"]
    printed = subprocess.check_output(make, cwd=ROOT, text=True)
    (index,) = re.findall(
        r" install (\$\(.+?\)) .*?--requirement requirements.(?:lock|vllm)", printed, re.S
    )
    shell = ["sh", "-c", f"echo {index}".replace(f"{environment}/bin/python", sys.executable)]
    expected = "" if name else f"--extra-index-url {CPU_TORCH}"
    assert subprocess.check_output(shell, text=True).strip() == expected


def _environment(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    """A machine's, with what pip is told by variables alone."""
    for name in os.environ.keys() - _PLAIN.keys():
        monkeypatch.delenv(name)
    for name, value in (_PLAIN | told).items():
        monkeypatch.setenv(name, value)


def test_local_indexes_are_found() -> None:
    """Guards against a build that cannot see what pip is told to read."""
    here = str(Path(__file__).parent)
    told = {
        "PIP_INDEX_URL": "https://example.com/simple",
        "PIP_EXTRA_INDEX_URL": "file:///srv/one/simple file:///srv/two/simple",
        "PIP_FIND_LINKS": here,
    }
    assert [str(each) for each in build.local_paths(told)] == ["/srv/one", "/srv/two", here]


def test_what_no_service_reads_is_dropped(tmp_path: Path) -> None:
    """Guards against dropping what an import needs, or nothing at all."""
    kept = (
        "torch/bin/torch_shm_manager", "torch/testing/a.py", "numpy/core.py",
        "transformers/models/auto/__pycache__/a.pyc", "transformers/models/llama/a.py",
    )  # fmt: skip
    dropped = (
        "torch/bin/protoc", "torch/include/a/b.h", "torch/test/a", "numpy/tests/a.py",
        "numpy/tests/data/tests/b.py", "numpy/lib/npymath.a",
        "transformers/models/llama/__pycache__/a.pyc",
    )  # fmt: skip
    for each in (*kept, *dropped):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text("x")
    found = set(slim.superfluous(tmp_path))
    for each in kept:
        assert not found & {tmp_path / each, *(tmp_path / each).parents}
    for each in dropped:
        assert found & {tmp_path / each, *(tmp_path / each).parents}
    assert not any(found & set(each.parents) for each in found)


def test_sizes_are_those_of_the_layers(tmp_path: Path) -> None:
    """Guards against a table that adds up to something else than the image."""
    large = sizes.LEAST
    archive = tmp_path / "image.tar"
    _write_archive(
        archive,
        {
            "/bin/sh -c #(nop) ADD file:01 in /": {"usr/lib/a": large, "etc/b": 5},
            "COPY dir:0a in /opt/venv": {"v/site-packages/torch/a": large, "v/pyvenv.cfg": 7},
        },
    )
    image = sizes.image_of(archive)
    assert image.bytes == 2 * large + 12
    assert [each.made_by for each in image.layers] == ["ADD file:01 in /", "COPY to /opt/venv"]
    assert [each.largest for each in image.layers] == [{"usr/lib": large}, {"torch": large}]
    assert f"{image.bytes / 1e6:.1f}" in build.table({"some": image})


def _write_archive(archive: Path, layers: dict[str, dict[str, int]]) -> None:
    """In the layout of the OCI; each layer with the sizes of its files."""
    with tarfile.open(archive, "w") as tar:

        def add(name: str, content: bytes) -> None:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))

        def blob(content: bytes) -> dict[str, str | int]:
            digest = hashlib.sha256(content).hexdigest()
            add(f"blobs/sha256/{digest}", content)
            return {"digest": f"sha256:{digest}", "size": len(content)}

        history = [{"created_by": "ENV A=b", "empty_layer": True}]
        history += [{"created_by": each} for each in layers]
        described = [blob(_packed(files)) for files in layers.values()]
        config = blob(json.dumps({"history": history}).encode())
        manifest = blob(json.dumps({"config": config, "layers": described}).encode())
        add("index.json", json.dumps({"manifests": [manifest]}).encode())


def _packed(files: dict[str, int]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, size in files.items():
            about = tarfile.TarInfo(name)
            about.size = size
            tar.addfile(about, io.BytesIO(bytes(size)))
    return packed.getvalue()


def test_the_sizes_that_are_told_are_of_these_targets() -> None:
    """Guards against a page whose figures are of other images than the result beside it."""
    told = json.loads((DEPLOY / "images" / "sizes.json").read_text())
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert set(told["images"]) == set(build.TARGETS)
    assert told["machine"]["processor"] and told["base"]
    for target, image in told["images"].items():
        figures = f"| {image['bytes'] / 1e6:.0f} | {image['packed_bytes'] / 1e6:.0f} |"
        assert re.search(rf"^\| `{target}` .*{re.escape(figures)}$", page, re.MULTILINE), target


@pytest.mark.parametrize("path", ["docs/deploy.md", "deploy/images/Dockerfile"])
def test_images_are_told_by_the_names_they_get(path: str) -> None:
    """Guards against a quick start of another version than the one that is built."""
    told = re.findall(r"localhost/specrej/([\w-]+|\$each):(\d[\w.]*)", (ROOT / path).read_text())
    assert told and all(build.name_of(name).endswith(f"/{name}:{tag}") for name, tag in told)


# Compose


def test_compose_names_what_is_there() -> None:
    """Guards against a service, a target or a file that compose asks for in vain."""
    compose = yaml.safe_load(COMPOSE.read_text())
    for service in compose["services"].values():
        if made := service.get("build"):
            assert made["target"] in TARGETS
            assert (COMPOSE.parent / made["context"]).resolve() == ROOT
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
    """Guards against somebody else's image that is another one tomorrow, and against ours under a
    name that `make images` does not give."""
    for service in yaml.safe_load(COMPOSE.read_text())["services"].values():
        if made := service.get("build"):
            assert service["image"] == build.name_of(made["target"])
        else:
            assert re.fullmatch(r"\S+/\S+:[\w.-]+@sha256:[0-9a-f]{64}", service["image"])
