"""Griffe's extension: the comment behind a field, or the help of an option, is its docstring."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Reads the source, because a field's unit and range are in the comment on its line."""

    def on_attribute_instance(
        self, *, node: Any, attr: griffe.Attribute, agent: Any, **arguments: Any
    ) -> None:
        """Set the docstring of a field that has none."""
        if attr.docstring or not attr.lineno:
            return
        text = _help_of(getattr(node, "value", None)) or _comment_of(attr)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)


def _help_of(value: Any) -> str:
    """The second argument of `option`."""
    match value:
        case ast.Call(func=ast.Name(id="option"), args=[_, ast.Constant(value=str(text)), *_]):
            return text
    return ""


def _comment_of(attribute: griffe.Attribute) -> str:
    comments = (re.search(r"(?:^|  )# *(.+)$", line.strip("\n")) for line in attribute.lines)
    return " ".join(comment[1] for comment in comments if comment)
