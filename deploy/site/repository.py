"""Pages for the files outside docs/ that documents link to.

The site then needs no other host: a Markdown file becomes a page, source text a page with one block
of code, a folder its README or a list of its files, and data is copied. Paths are those of the
repository, URIs those of MkDocs' source files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DOCS = "docs/"
_OUTSIDE = "repository/"
_DATA = {".json", ".csv", ".svg", ".png", ".ipynb"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def uri_of(path: str) -> str:
    """The URI of the page, or of the copy, of a file or a folder."""
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    if (ROOT / path).is_dir():
        return f"{_OUTSIDE}{path}/index.md"
    is_itself = Path(path).suffix in {".md", *_DATA}
    return f"{_OUTSIDE}{path}" if is_itself else f"{_OUTSIDE}{path}.md"


def _target(path: str, link: str) -> str | None:
    """The path that a link in the document `path` leads to; None: there is no such file."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if target.startswith("..") or not (ROOT / target).exists():
        return None
    readme = posixpath.join(target, "README.md")
    return readme if (ROOT / readme).exists() and target != "." else target


def reachable(documents: Iterable[str]) -> set[str]:
    """Paths outside docs/ that are documents, or that they link to, directly or by others."""
    seen, waiting = set[str](), list(documents)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            targets = (_target(path, link) for link in _LINK.findall(text))
            waiting += [target for target in targets if target]
    return {path for path in seen if not path.startswith(_DOCS)}


def rewritten(text: str, uri: str) -> str:
    """The document with the URI `uri`, whose links lead to pages of the site.

    Links to files that do not exist stay, so that MkDocs reports them.
    """
    path = uri.removeprefix(_OUTSIDE) if uri.startswith(_OUTSIDE) else f"{_DOCS}{uri}"

    def link(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        if target is None:
            return match[1]
        return posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")

    return _LINK.sub(link, text)


def is_data(path: str) -> bool:
    """Whether a file is copied."""
    return Path(path).suffix in _DATA


def page(path: str) -> str:
    """The Markdown of the page of a file or a folder that is not copied."""
    file = ROOT / path
    if file.is_dir():
        return f"{_HIDDEN}# {path}\n\n| file | content |\n|---|---|\n" + "".join(_rows(file))
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    language = {".py": "python", ".proto": "protobuf", ".js": "javascript"}.get(
        file.suffix, file.suffix.removeprefix(".") if file.suffix in {".yaml", ".toml"} else "text"
    )
    fence = "`" * 8
    return f"{_HIDDEN}# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _rows(folder: Path) -> Iterator[str]:
    """Each file of a folder, with the first line of its docstring."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith((".", "__")):
            continue
        docstring = ""
        if file.suffix == ".py" and (match := re.match(r'"""(.+)', file.read_text("utf-8"))):
            docstring = match[1].removesuffix('"""').replace("|", "\\|")
        yield f"| `{file.name}{'/' if file.is_dir() else ''}` | {docstring} |\n"
