"""Both wheels and what a release is made of.

`make release` installs the wheels with pip, and runs the demo on the embedded models.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy import release
from deploy.images.build import ROOT, version
from deploy.local import models

SERVICES = {
    "specrej_models", "orchestrator", "generator_service", "reward_service", "gateway", "loadtest",
    "deploy",
}  # fmt: skip
LIGHT = {
    "grpcio", "grpcio-health-checking", "googleapis-common-protos", "opentelemetry-api", "protobuf",
}  # fmt: skip


def build(target: Path, source: Path = ROOT) -> dict[str, Path]:
    """The wheels and the source archive, by the first part of their names, as `build` calls it."""
    for folder, kinds in ((source, ("sdist", "wheel")), (source / "server", ("wheel",))):
        targets = [argument for kind in kinds for argument in ("--target", kind)]
        command = (sys.executable, "-m", "hatchling", "build", "--directory", str(target))
        subprocess.run([*command, *targets], cwd=folder, check=True, capture_output=True)
    names = {".gz": "source", ".whl": ""}
    return {names[path.suffix] or path.name.partition("-")[0]: path for path in target.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("dist"))


def files_of(wheel: Path) -> set[str]:
    """The names of a wheel's files, metadata aside."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheels_have_the_files_that_git_tracks(built: dict[str, Path]) -> None:
    """Guards against two packages with one file, services in the client, and files left out."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    names = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    tracked = {name for name in names if (ROOT / name).exists()}
    client = {name for name in tracked if name.startswith("specrej/")}
    folders = tuple(f"{name}/" for name in SERVICES)
    server = {name for name in tracked if name.startswith(folders)}
    server -= {name for name in server if re.match("deploy/(?!local/)", name)}
    assert files_of(built["specrej"]) == client
    beside = {"deploy/local/requirements-models.txt", "deploy/local/envoy.yaml"}
    assert files_of(built["specrej_server"]) == server | beside


def test_the_client_has_few_requirements(built: dict[str, Path]) -> None:
    """Guards against a heavy requirement, and services of another version than the client's."""
    required = {}
    for name in ("specrej", "specrej_server"):
        with zipfile.ZipFile(built[name]) as files:
            (path,) = (path for path in files.namelist() if path.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(files.read(path).decode())
        assert metadata["Version"] == version()
        texts = metadata.get_all("Requires-Dist", [])
        required[name] = [r for r in map(Requirement, texts) if r.marker is None]
    assert {requirement.name for requirement in required["specrej"]} == LIGHT
    assert f"specrej=={version()}" in map(str, required["specrej_server"])


@pytest.mark.long
def test_the_source_archive_builds_equal_wheels(built: dict[str, Path], tmp_path: Path) -> None:
    """Guards against an incomplete archive, and packages with times of the building machine."""
    shutil.unpack_archive(built["source"], tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name, path in build(tmp_path / "dist", source).items():
        assert path.read_bytes() == built[name].read_bytes(), name


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


def test_prepared_models_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a download at every start, and one for models that are not used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[str] = []

    def run(*arguments: str, packages: Path | None = None) -> None:
        calls.append(arguments[1] if packages is None else arguments[2].rpartition("/")[2])

    monkeypatch.setattr(models, "_run", run)
    both = ["SmolLM2-135M-Instruct", "relevance"]
    toys = json.dumps([{"name": "t", "kind": "toy"}])
    for name, value, expected in (
        ("UNUSED", "", ["pip", *both]),
        ("SPECREJ_REWARD_REWARDS", toys, ["pip", both[0]]),
        ("SPECREJ_GENERATOR_MODEL", "toy", []),
    ):
        calls.clear()
        monkeypatch.setenv(name, value)
        models.prepare(print)
        assert calls == expected
