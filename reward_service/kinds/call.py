"""A reward for calls of tools: 1 if all calls of a text are allowed, else 0.

A dry run by a function of the operator can give a final text's calls any score in [0, 1]. Its
arguments are a call's name and its arguments as a dict; a call for which it raises scores 0.
An unfinished text scores 1 until it has a whole call that is not allowed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from reward_service.kinds.function import import_function
from reward_service.specs import CallSpec, Resources
from reward_service.verifier import Data, Judge, Verifier, invalid
from specrej import fingerprint
from specrej.answer_form import CALL_MARKS, is_malformed, parts_of
from specrej.contracts import AnswerForm, ToolCall
from specrej.isolated import Isolated

log = logging.getLogger(__name__)


class CallData(Data):
    """tools: a JSON Schema of the arguments for each name that may be called; `enum` and `const` in
    it give the allowed values.

    required: whether a text without calls scores 0. format: how the model writes calls; "auto": by
    the first mark in the text, and JSON without one.
    """

    tools: Annotated[dict[str, Any], Field(min_length=1, max_length=128)]
    required: bool = True
    format: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"


class CallReward(Verifier):
    """Validates calls, and tries them if there is a function for it."""

    description = "1 if the text's calls are those of the request's data, else 0."
    sample_data = '{"tools": {"add": {"required": ["n"]}}}'
    data_type = CallData
    is_cheap = True
    is_isolated = True

    def __init__(self, spec: CallSpec, resources: Resources) -> None:
        super().__init__(spec, resources)
        self._schemas = Isolated("schema", "true", "1")
        self._try: Callable[..., Any] | None = None
        if spec.function:
            self._try, digest = import_function(spec.function)
            self.fingerprint = fingerprint.of_values(
                kind=self.fingerprint, path=spec.function, file=digest
            )

    def prepare(self, data: CallData) -> Judge:
        schemas = {name: json.dumps(schema) for name, schema in data.tools.items()}
        validates = self._schemas.checker()
        if not all(validates(schema, "") for schema in schemas.values()):
            text = "must have JSON Schemas without outer references, look-around, back references"
            raise invalid("data.tools", text)

        def is_allowed(call: ToolCall) -> bool:
            return call.name in schemas and validates(schemas[call.name], call.arguments)

        def judge(text: str, is_final: bool) -> float:
            marked = [(text.find(mark), name) for name, mark in CALL_MARKS.items() if mark in text]
            kind = min(marked, default=(0, ""))[1] if data.format == "auto" else data.format
            if not (kind or is_final):
                return 1.0  # a mark may follow
            form = AnswerForm(kind or "json")
            parts = parts_of(text, form, complete=is_final)
            assert parts
            if is_malformed(parts, form) or not all(map(is_allowed, parts.tool_calls)):
                return 0.0
            if not (is_final and parts.tool_calls):
                return float(not (is_final and data.required))
            return min(map(self._tried, parts.tool_calls))

        return judge

    def _tried(self, call: ToolCall) -> float:
        if not self._try:
            return 1.0
        try:
            return min(1.0, max(0.0, float(self._try(call.name, json.loads(call.arguments)))))
        except Exception as error:  # anything that the function raises; it may quote the call
            log.info("reward %s: a dry run raised %s", self.name, type(error).__name__)
            return 0.0
