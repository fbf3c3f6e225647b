"""The documents as a site, built as `make docs` does."""

from __future__ import annotations

import functools
import html
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

import specrej
from deploy.values_schema import SETTINGS
from reward_service.specs import RewardSpec
from specrej.contracts import GenerationRequest, Sampling, Selection
from specrej.telemetry import names
from tests.browser import CHROMIUM, DRIVER, browser
from tests.documents.blocks import ROOT
from tests.serving import need


def build(directory: Path, config: Path = ROOT / "mkdocs.yml") -> str:
    """Build the site into `directory`; returns what the command prints if it fails, else ""."""
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--site-dir", str(directory)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without a warning."""
    directory = tmp_path_factory.mktemp("site")
    problems = build(directory)
    assert not problems, problems
    return directory


def page_of(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())


def test_the_reference_has_every_public_name(site: Path) -> None:
    """Guards against a name of the client, or the help of an option, without documentation."""
    page = page_of(site, "reference/python")
    identifiers = set(re.findall(r'id="([^"]+)"', page))
    clients = [specrej.Client, specrej.SyncClient, specrej.Retries]
    values = [*clients, *(value for value in vars(specrej).values() if isinstance(value, type))]
    public = {f"{value.__module__}.{value.__qualname__}" for value in values}
    assert public - identifiers == set()
    text = text_of(page)
    for owner in (GenerationRequest, Sampling, Selection):
        for field in owner.__dataclass_fields__.values():
            assert " ".join(field.metadata.get("help", "").split()).replace("`", "") in text
    assert "ranked by likelihood: a reward failed" in text  # a comment


def test_the_reference_has_the_whole_schema(site: Path) -> None:
    """Guards against a file of the schema that the page leaves out."""
    shown = text_of(page_of(site, "reference/schema"))
    sources = sorted((ROOT / "proto" / "specrej").rglob("*.proto"))
    assert len(sources) == 4
    for source in sources:
        assert " ".join(source.read_text(encoding="utf-8").split()) in shown


def test_the_reference_has_all_that_is_generated(site: Path) -> None:
    """Guards against a setting, a metric, an alert, a field or an option without documentation."""
    shown = text_of(page_of(site, "reference/settings"))
    for service in SETTINGS.values():
        for name, field in service.model_fields.items():
            assert f" {name.upper()} " in shown, name
            assert " ".join(str(field.description).split()) in shown, name
    shown = text_of(page_of(site, "reference/metrics"))
    made = [value for value in vars(names).values() if isinstance(value, names.Metric)]
    assert len(made) > 40
    assert [metric.name for metric in made if f" {metric.name} " not in shown] == []
    assert "SpecrejSlotsLeaked critical 10m" in shown
    shown = text_of(page_of(site, "reference/http"))
    for row in ("top_p sampling.top_p Nucleus", "echo refused, unless false", "store ignored"):
        assert row in shown
    shown = text_of(page_of(site, "reference/rewards"))
    for kind in get_args(get_args(RewardSpec)[0]):
        for option in kind.model_fields.keys() - {"kind", "name", "images"}:
            assert f" {option} " in shown


def test_named_settings_exist() -> None:
    """Guards against a setting that was removed, or renamed, and is recommended still."""
    text = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    rows = re.findall(r"^\| `SPECREJ_([A-Z]+)_` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    for service, row in rows:
        known = SETTINGS[service.lower()].model_fields
        named = re.findall(r"`([A-Z_]+)`", row)
        assert [name for name in named if name.lower() not in known] == []


@pytest.mark.long
def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """Guards against settings that let a link or an anchor to nothing pass."""
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "page.md").write_text("[a](gone.md) [b](../gone.py) [c](page.md#gone)")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {pages}")
    config = config.replace("deploy/site", f"{ROOT}/deploy/site")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [page.md]\n")
    printed = build(tmp_path / "built", tmp_path / "mkdocs.yml")
    assert [target for target in ("gone.md", "gone.py", "#gone") if target not in printed] == []


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address at which a directory is served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.long
async def test_pages_fit_the_window_and_load_from_their_origin(site: Path, tmp_path: Path) -> None:
    """Guards against wide pages on phones, missing files, and requests to other hosts."""
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    requested = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    with served(site) as origin:
        async with browser(tmp_path / "profile") as page:
            for name in ("", "configuration/", "reference/python/", "reference/schema/"):
                for width in (400, 1400):
                    await page.open(f"{origin}{name}", width)
                    whole = await page.evaluate("return document.documentElement.scrollWidth")
                    assert (name, whole) == (name, width)
                    assert await page.log() == []
                    urls = await page.evaluate(requested)
                    assert urls and [url for url in urls if not url.startswith(origin)] == []
