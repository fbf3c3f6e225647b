"""The values of the Python client as Markdown: fields with their types, defaults and comments.

Read from the source, because the comments are part of what a caller should see.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator, Sequence

from deploy.site.repository import ROOT
from specrej.contracts import GenerationRequest, Sampling, Selection

# A line of a document that is replaced: of classes of a module, all of them if none is named.
_MARK = re.compile(r"^<!-- values: ([\w.]+)((?: \w+)*) -->$", re.MULTILINE)
_OPTIONS = "<!-- options -->"


def inserted(markdown: str) -> str:
    """The document with tables in the places of its marks."""
    markdown = markdown.replace(_OPTIONS, "\n".join(_options()))
    return _MARK.sub(lambda match: "\n".join(_classes(match[1], match[2].split())), markdown)


def escaped(text: str) -> str:
    """Text on one line in a cell of a table, where only code between backticks is markup."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*_<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def _options() -> Iterator[str]:
    """Every option of a request, with its range and its default."""
    yield "| option | meaning | range | default |\n|---|---|---|---|"
    for owner in (Selection, Sampling, GenerationRequest):
        for field in dataclasses.fields(owner):
            if help_text := field.metadata.get("help"):
                accepted = field.metadata["accepted"]
                allowed = escaped(accepted.text) if accepted else ""
                shown = getattr(field.default, "value", field.default)
                default = "" if shown in ((), "", None) else f"`{shown}`"
                yield f"| `{field.name}` | {escaped(help_text)} | {allowed} | {default} |"


def _classes(module: str, names: Sequence[str]) -> Iterator[str]:
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and (node.name in names or not names):
            yield f"\n### {node.name} {{ #{module}.{node.name} }}\n"
            yield f"{ast.get_docstring(node)}\n"
            if rows := list(_rows(node, comments)):
                yield "| name | type or value | |\n|---|---|---|"
                yield from rows


def _rows(node: ast.ClassDef, comments: dict[int, str]) -> Iterator[str]:
    """The fields, members, properties and constructors of a class."""
    for item in node.body:
        comment = escaped(comments.get(item.end_lineno or 0, ""))
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                default = f" = {ast.unparse(value)}" if value else ""
                yield _row(name, f"{ast.unparse(kind)}{default}", comment)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield _row(name, ast.unparse(value), comment)
            case ast.FunctionDef(name=name, returns=kind) if not name.startswith("_"):
                parameters = "" if item.args.args[-1].arg == "self" else ast.unparse(item.args)
                shown = f"{name}({parameters.partition(', ')[2]})" if parameters else name
                docstring = escaped(ast.get_docstring(item) or "")
                yield _row(shown, ast.unparse(kind) if kind else "", docstring)


def _row(name: str, kind: str, text: str) -> str:
    return f"| `{name}` | `{kind}` | {text} |"
