"""The chart renders the objects of the overlays, by Helm's own engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from deploy.images.build import version
from tests.deploy.manifests import DEPLOY, OVERLAYS, ROOT, Manifests, kustomized, parsed, rendered

HELM = ROOT / ".tools" / "helm"  # make helm
# In a process of its own, as Helm's engine brings the runtime of another language.
RENDER = """
import json, sys
from helm_python import Chart
from helm_python.chart import lint
chart, options = Chart.load(sys.argv[1]), json.loads(sys.argv[2])
try:
    print(json.dumps({"files": chart.render(**options), "lint": lint(sys.argv[1])}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
"""
OWN = {"name": "specrej", "namespace": "specrej"}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with all overlays, as make manifests builds it."""
    if not HELM.exists():
        pytest.skip("no Helm: make helm installs its engine")
    directory = tmp_path_factory.mktemp("chart") / "specrej"
    shutil.copytree(DEPLOY / "helm" / "specrej", directory)
    (directory / "overlays").mkdir()
    for overlay in OVERLAYS:
        content = kustomized(DEPLOY / "overlays" / overlay)
        (directory / "overlays" / f"{overlay}.yaml").write_text(content)
    return directory


def _run(chart: Path, values: dict[str, Any], **options: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", RENDER, chart, json.dumps({"values": values, **OWN, **options})],
        env={**os.environ, "PYTHONPATH": str(HELM)},
        capture_output=True,
        text=True,
        check=True,
    )
    outcome: dict[str, Any] = json.loads(result.stdout)
    return outcome


def _template(chart: Path, **values: Any) -> Manifests:
    """The objects that Helm renders."""
    outcome = _run(chart, values)
    assert "error" not in outcome, outcome["error"]
    assert outcome["lint"]["errors"] == []
    (text,) = outcome["files"].values()
    return Manifests(parsed(text))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_renders_the_objects_of_the_overlay(chart: Path, overlay: str) -> None:
    """Guards against a chart and an overlay that differ; the namespace is there before Helm."""
    ours = {(item["kind"], item["metadata"]["name"]): item for item in rendered(overlay).objects}
    del ours["Namespace", "specrej"]
    theirs = _template(chart, overlay=overlay).objects
    assert len(theirs) == len(ours)
    for item in theirs:
        assert item == ours[item["kind"], item["metadata"]["name"]]


def test_values_change_what_they_name(chart: Path) -> None:
    """Guards against values without effect, and settings that no pod is restarted for."""
    redis = "SPECREJ_ORCHESTRATOR_REDIS_URL"  # empty: none
    settings = {"orchestrator": {"SPECREJ_ORCHESTRATOR_MAX_RUNNING": "7", redis: ""}}
    images = {"generator": "example.com/generator:1", "models": "example.com/models:1"}
    theirs = _template(chart, images=images, settings=settings, replicas={"orchestrator": 3})
    ours = rendered("cpu-embedded")
    changed = {"MAX_RUNNING": "7", "REDIS_URL": ""}
    assert theirs.settings("orchestrator") == ours.settings("orchestrator") | changed
    assert theirs.workloads["orchestrator"]["spec"]["replicas"] == 3
    used = {container["name"]: container["image"] for _, container in theirs.containers()}
    others = {container["name"]: container["image"] for _, container in ours.containers()}
    assert used == others | images
    annotated = {
        name: workload["spec"]["template"]["metadata"].get("annotations", {})
        for name, workload in theirs.workloads.items()
    }
    assert [name for name in annotated if "checksum/settings" in annotated[name]] == [
        "orchestrator"
    ]
    other = _template(chart, settings={"orchestrator": {"SPECREJ_ORCHESTRATOR_MAX_RUNNING": "8"}})
    template = other.workloads["orchestrator"]["spec"]["template"]
    assert template["metadata"]["annotations"] != annotated["orchestrator"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"overlay": "other"}, "schema"),
        ({"image": {}}, "schema"),
        ({"settings": {"redis": {}}}, "schema"),
        ({"images": {"orchestator": "x"}}, "images.orchestator: overlay cpu-embedded has nothing"),
        ({"overlay": "gpu-nodes", "replicas": {"generator": 5}}, "replicas.generator: overlay"),
    ],
)
def test_wrong_values_are_refused(chart: Path, values: dict[str, Any], reason: str) -> None:
    """Guards against a value that is misspelt and ignored."""
    assert reason in _run(chart, values)["error"]


def test_versions_and_overlays_are_those_of_the_project() -> None:
    source = DEPLOY / "helm" / "specrej"
    metadata = yaml.safe_load((source / "Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == version()
    schema = json.loads((source / "values.schema.json").read_text())
    assert schema["properties"]["overlay"]["enum"] == OVERLAYS
