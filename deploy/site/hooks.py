"""MkDocs' hooks: pages of documents outside docs/, links between them, and notebooks.

`nav` names a document outside docs/ as repository/PATH. A link to any other file outside docs/
loses its target on the site and keeps its text.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_OUTSIDE = "repository/"
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
# GitHub needs an escaped bar within code in a table; Python's Markdown would print the backslash.
_ROW, _CODE = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`]+`")
_log = get_plugin_logger("site")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents of `nav` that are outside docs/, and a page for each notebook."""
    for uri in _uris(config.nav):
        if uri.startswith(_OUTSIDE):
            path = ROOT / uri.removeprefix(_OUTSIDE)
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = _notebook(Path(str(file.abs_src_path)))
        uri = file.src_uri.replace(".ipynb", ".md")
        files.append(File.generated(config, uri, content=page))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the pages of the site."""
    uri = page.file.src_uri
    own = uri.removeprefix(_OUTSIDE) if uri.startswith(_OUTSIDE) else f"docs/{uri}"

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        if path.startswith("docs/"):  # MkDocs checks that it exists
            found = path.removeprefix("docs/")
            return f"[{text}]({posixpath.relpath(found, posixpath.dirname(uri))}{anchor})"
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", own, target)
        for found in (f"{_OUTSIDE}{path}", f"{_OUTSIDE}{path}/README.md"):
            if files.get_file_from_path(found):
                return f"[{text}]({posixpath.relpath(found, posixpath.dirname(uri))}{anchor})"
        return text

    unescaped = _ROW.sub(
        lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown
    )
    return _LINK.sub(rewritten, unescaped)


def _uris(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(item)


def _notebook(path: Path) -> str:
    """A notebook's cells as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ((cell["cell_type"], "".join(cell["source"])) for cell in cells)
    return "\n\n".join(
        text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts
    )
