"""MkDocs' hooks: pages that are generated, links that leave docs/, checks of the built pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from deploy.site import repository, schema, values

_log = get_plugin_logger("documents")
# Elements that load what they name; links do not. `data:` is part of the page.
_LOADS = re.compile(r'<(?:script|img|link|iframe|source|object)\b[^>]*\b(?:src|href|data)="'
                    r'((?:https?:)?//[^"]*)"')  # fmt: skip
_IMPORTS = re.compile(r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]*)""")
# A list without an empty line above it is part of the paragraph in Python's Markdown.
_BROKEN_LIST = re.compile(r"<p>[^<]*\n(?:\* |\d+\. )")
# Code in tables: GitHub needs a bar escaped there, and Python's Markdown shows the backslash.
_ROW, _CODE = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`]+`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List a page per package of the schema at the end of the reference."""
    pages = schema.pages()
    (reference,) = (item["Reference"] for item in config.nav or () if "Reference" in item)
    reference += [{name: f"reference/{name}.md"} for name in pages]
    config.extra["schema"] = pages
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of the schema, of notebooks, and of linked files outside docs/."""

    def add(uri: str, content: str) -> None:
        files.append(
            File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        )

    for name, content in config.extra["schema"].items():
        add(f"reference/{name}.md", content)
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        add(notebook.src_uri.replace(".ipynb", ".md"), _notebook(Path(str(notebook.abs_src_path))))
    documents = [f"docs/{file.src_uri}" for file in files.documentation_pages()
                 if (repository.ROOT / "docs" / file.src_uri).exists()]  # fmt: skip
    named = (uri.removeprefix("repository/") for uri in _uris(config.nav or [])
             if uri.startswith("repository/"))  # fmt: skip
    for path in sorted(repository.reachable([*documents, *named])):
        if repository.is_data(path):
            uri, source = repository.uri_of(path), str(repository.ROOT / path)
            files.append(File.generated(config, uri, abs_src_path=source))
        else:
            add(repository.uri_of(path), repository.page(path))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/, and insert the tables of the Python client's values."""
    markdown = _ROW.sub(lambda row: _CODE.sub(_unescaped, row[0]), values.inserted(markdown))
    return repository.rewritten(markdown, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn, which ends a strict build, of what a page would load from other hosts."""
    for file in sorted(Path(config.site_dir).rglob("*.*")):
        if file.suffix not in {".html", ".css"}:
            continue
        text = file.read_text(encoding="utf-8")
        for url in (_LOADS if file.suffix == ".html" else _IMPORTS).findall(text):
            _log.warning("%s loads %s", file.relative_to(config.site_dir), url)
        if file.suffix == ".html" and (match := _BROKEN_LIST.search(text)):
            _log.warning("%s has a list inside a paragraph: %s", file, match[0])


def _unescaped(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def _uris(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(item)


def _notebook(path: Path) -> str:
    """A notebook's cells as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    return "\n\n".join(
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    )
