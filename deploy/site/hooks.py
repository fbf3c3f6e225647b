"""MkDocs' hooks: a link to a file outside docs/ loses its target on the site and keeps its text;
the reference has tables that the code is the source of."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.pages import Page

from deploy.site import reference

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
# GitHub needs an escaped bar within code in a table; Python's Markdown would print the backslash.
_ROW, _CODE = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`]+`")
_GENERATED = {
    "<!-- generated: settings -->": reference.settings,
    "<!-- generated: metrics -->": reference.metrics,
    "<!-- generated: alerts -->": reference.alerts,
    "<!-- generated: rewards -->": reference.rewards,
    "<!-- generated: http -->": reference.http,
}
_log = get_plugin_logger("site")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrite a page; warn of links to files that do not exist."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def text_of(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):  # MkDocs checks that it exists
            return link[0]
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return link[1]

    unescaped = _ROW.sub(
        lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown
    )
    linked = _OUTSIDE.sub(text_of, unescaped)
    for mark, made in _GENERATED.items():
        if mark in linked:
            linked = linked.replace(mark, made())
    return linked
