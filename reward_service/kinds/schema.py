"""A reward for structured answers: 1 if the JSON in the text has the request's schema, else 0.

An unfinished text scores 1 unless its JSON is complete and invalid, or cannot be JSON any more.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from reward_service.specs import Resources, SchemaSpec
from reward_service.verifier import Data, Judge, Verifier, invalid
from specrej.isolated import Isolated

# A brace or a string; one that is not closed extends to the end, so that no part is read twice.
_BRACES_AND_STRINGS = re.compile(r'[{}]|"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)

Extract = Literal["whole", "fence", "first_object"]


class SchemaData(Data):
    """schema: a JSON Schema; its references must lead into itself.

    extract: where the JSON is: the "whole" text, the first "fence" (```), or "first_object", from
    the first { to the } that closes it.
    """

    json_schema: Annotated[Any, Field(alias="schema")]
    extract: Extract = "whole"


class SchemaReward(Verifier):
    """Validates the JSON of texts."""

    description = "1 if the text's JSON has the JSON Schema of the request's data, else 0."
    sample_data = '{"schema": {"type": "object"}}'
    data_type = SchemaData
    is_cheap = True
    is_isolated = True

    def __init__(self, spec: SchemaSpec, resources: Resources) -> None:
        super().__init__(spec, resources)
        self._schemas = Isolated("schema", "true", "1")

    def prepare(self, data: SchemaData) -> Judge:
        validates = self._schemas.checker(json.dumps(data.json_schema))
        if not validates(""):
            text = "must be a JSON Schema without outer references, look-around, back references"
            raise invalid("data.schema", text)

        def judge(text: str, is_final: bool) -> float:
            document, is_complete = extract_json(text, data.extract)
            if not (is_complete or is_final):
                return float(may_become_json(document))
            return float(is_json(document) and validates(document))

        return judge


def extract_json(text: str, extract: Extract) -> tuple[str, bool]:
    """The part of the text that is to be JSON, and whether more text cannot change it."""
    if extract == "whole":
        return text, False
    if extract == "fence":
        fence = text.partition("```")[2]
        content, end, _ = fence.partition("\n")[2].partition("\n```")
        return (content, True) if end else (content.rstrip("`"), False)
    begin, depth = text.find("{"), 0
    if begin < 0:
        return "", False
    for token in _BRACES_AND_STRINGS.finditer(text, begin):
        depth += (token[0] == "{") - (token[0] == "}")
        if not depth:
            return text[begin : token.end()], True
    return text[begin:], False


def is_json(text: str) -> bool:
    """Whether the text is JSON, nested at most some 200 times."""
    return _json_error(text) == ""


def may_become_json(text: str) -> bool:
    """Whether the text is JSON or the beginning of it."""
    return _json_error(text)[:3] in ("", "EOF")


def _json_error(text: str) -> str:
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return str(error)
    return ""
