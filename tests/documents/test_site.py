"""The documents as a site, built as `make docs` does: no warnings, nothing from other hosts."""

from __future__ import annotations

import functools
import html
import http.server
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig

import specrej
from deploy import stubs
from deploy.site import hooks, repository, schema
from specrej.contracts import Options
from tests.browser import CHROMIUM, DRIVER, browser
from tests.documents.blocks import ROOT
from tests.serving import need


def build(directory: Path, config: Path = ROOT / "mkdocs.yml") -> str:
    """Build the site into `directory`; returns what the command prints if it fails, else ""."""
    command = (*(sys.executable, "-m", "mkdocs", "build", "--strict"),
               *("--config-file", str(config), "--site-dir", str(directory)))  # fmt: skip
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without a warning."""
    directory = tmp_path_factory.mktemp("site")
    problems = build(directory)
    assert not problems, problems
    return directory


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address at which a directory is served."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def text_of(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name(site: Path) -> None:
    """Guards against a name of the client that has no documentation."""
    page = text_of(site, "reference/python")
    identifiers = set(re.findall(r'id="([^"]+)"', page))
    unions = {"Event", "Schedule"}
    values = {getattr(specrej, name) for name in specrej.__all__ if name not in unions}
    names = {f"{value.__module__}.{value.__qualname__}" for value in values}
    assert names - identifiers == set()
    options = set(re.findall(r"<td><code>(\w+)</code></td>", page))
    assert options >= Options.__annotations__.keys()


def test_the_reference_has_the_whole_schema(site: Path) -> None:
    """Guards against messages, fields, methods and comments that are left out."""
    sources = sorted((ROOT / "proto" / "specrej").rglob("*.proto"))
    assert sources
    for source in sources:
        text = source.read_text(encoding="utf-8")
        package = re.findall(r"^package (.+);", text, re.MULTILINE)[0]
        page = html.unescape(text_of(site, f"reference/{package}"))
        for name in re.findall(r"^(?:message|enum) (\w+)", text, re.MULTILINE):
            assert f'id="{package}.{name}"' in page
        fields = re.findall(r"^ +(?:\w+ )?[\w.<>, ]+ (\w+) = \d+(?:;| \[)", text, re.MULTILINE)
        methods = re.findall(r"^ +rpc (\w+)", text, re.MULTILINE)
        for name in (*fields, *methods):
            assert f"<td><code>{name}</code></td>" in page


def test_comments_are_text(site: Path) -> None:
    """Guards against stars, brackets and bars in comments that are read as Markdown."""
    page = html.unescape(text_of(site, "reference/specrej.v1"))
    assert "At first, first * factor, first * factor^2" in page
    assert "\\*" not in page and "\\_" not in page


def test_source_pages_are_complete(site: Path) -> None:
    """Guards against code that ends its own block."""
    path = "repository/orchestrator/loop/rejection.py"
    shown = html.unescape(re.sub(r"<[^>]+>", "", text_of(site, path)))
    last = (ROOT / "orchestrator/loop/rejection.py").read_text(encoding="utf-8").rstrip()[-60:]
    assert last in shown


async def test_pages_fit_the_window_and_load_from_their_origin(site: Path, tmp_path: Path) -> None:
    """Guards against wide pages on phones, missing files, and requests to other hosts."""
    need(CHROMIUM, "chromium")
    need(DRIVER, "chromedriver")
    pages = ("", "concepts/", "comparison/", "configuration/", "reference/python/")
    requested = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    with served(site) as origin:
        async with browser(tmp_path / "profile") as page:
            for name in pages:
                for width in (400, 1400):
                    await page.open(f"{origin}{name}", width)
                    whole = await page.evaluate("return document.documentElement.scrollWidth")
                    assert (name, whole) == (name, width)
                    assert await page.log() == []
                    urls = await page.evaluate(requested)
                    assert urls and [url for url in urls if not url.startswith(origin)] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("[a](gone.md) [b](../gone.py) [c](page.md#gone)", ["gone.md", "gone.py", "#gone"]),
        ("[a](page.md)", []),
    ],
)
def test_broken_links_fail_the_build(tmp_path: Path, text: str, problems: list[str]) -> None:
    """Guards against settings that let a link or an anchor to nothing pass."""
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "page.md").write_text(text)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {pages}")
    config = config.replace("deploy/site", f"{ROOT}/deploy/site")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [page.md, {{Reference: []}}]\n")
    printed = build(tmp_path / "built", tmp_path / "mkdocs.yml")
    assert [problem for problem in problems if problem not in printed] == []
    assert bool(printed) == bool(problems), printed


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.html", '<script src="https://cdn.example/x.js"></script>'),
        ("index.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("index.html", '<img alt="" src="http://badge.example/x.svg">'),
        ("index.html", "<p>Two things:\n* one</p>"),
        ("site.css", '@import "https://fonts.example/css";'),
        ("site.css", "a{background:url(//cdn.example/x.png)}"),
    ],
)
def test_pages_that_load_from_elsewhere_are_warnings(
    tmp_path: Path, name: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a check of the built pages that finds nothing."""
    (tmp_path / name).write_text(content)
    config = MkDocsConfig()
    config.site_dir = str(tmp_path)
    with caplog.at_level(logging.WARNING):
        hooks.on_post_build(config)
    assert len(caplog.records) == 1
    (tmp_path / name).write_text('<a href="https://arxiv.org">a link</a><img src="x.svg">')
    caplog.clear()
    hooks.on_post_build(config)
    assert not caplog.records


def test_links_lead_to_pages_of_the_site() -> None:
    """Guards against relative paths that are wrong by a folder."""
    text = "[a](../orchestrator/loop/run.py) [b](cache.md#x) [c](../examples/rag) [d](https://x.y)"
    assert repository.rewritten(text, "branching.md") == (
        "[a](repository/orchestrator/loop/run.py.md) [b](cache.md#x) "
        "[c](repository/examples/rag/README.md) [d](https://x.y)"
    )
    text = "[a](docs/cache.md) [b](specrej)"
    assert repository.rewritten(text, "repository/ARCHITECTURE.md") == (
        "[a](../cache.md) [b](specrej/index.md)"
    )


def test_a_schema_that_is_invalid_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an empty reference."""
    bad = tmp_path / "specrej" / "bad.proto"
    bad.parent.mkdir()
    bad.write_text("message {")
    monkeypatch.setattr(stubs, "PROTO", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        schema.pages()
