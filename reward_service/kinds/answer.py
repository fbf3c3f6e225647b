"""A reward for known answers: 1 if what is extracted from the text is the answer, else 0.

Unfinished texts score 1, as more text can change any extraction.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from reward_service.specs import AnswerSpec, Resources
from reward_service.verifier import Data, Judge, Verifier, invalid
from specrej import extraction
from specrej.isolated import Isolated, compile_pattern

_MOST_CHARACTERS = 16_384  # at the end of a text, that sympy and a regular expression read


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


class AnswerData(Data):
    """answer: a text, or a number; with kind "regex" what must be found in the extracted text.

    kind: how both are compared: "exact" without the white space around them, "number" up to
    `tolerance`, "math" as mathematical expressions. extract: "all", "last_number", the content of
    the last "boxed" (as in LaTeX), "after:TEXT" for the rest of the line after the last TEXT, or
    "regex:PATTERN" for the last match, of which the first group counts if it has any. By default
    "last_number" for numbers, otherwise "all".
    """

    answer: Annotated[str, BeforeValidator(_as_text)]
    kind: Literal["exact", "number", "math", "regex"] = "exact"
    extract: str = ""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class AnswerReward(Verifier):
    """Compares texts with the answer of the request's data."""

    description = "1 if the text has the answer of the request's data, else 0."
    sample_data = '{"answer": 4, "kind": "number"}'
    data_type = AnswerData
    is_isolated = True

    def __init__(self, spec: AnswerSpec, resources: Resources) -> None:
        super().__init__(spec, resources)
        self._math = Isolated("math", "$1/2$", "$0.5$")

    def prepare(self, data: AnswerData) -> Judge:
        extract = _extractor(data.extract or ("last_number" if data.kind == "number" else "all"))
        is_right = self._comparison(data)

        def judge(text: str, is_final: bool) -> float:
            if not is_final:
                return 1.0
            extracted = extract(text)
            return float(extracted is not None and is_right(extracted))

        return judge

    def _comparison(self, data: AnswerData) -> Callable[[str], bool]:
        answer = data.answer.strip()
        if data.kind == "exact":
            return lambda text: text.strip() == answer
        if data.kind == "math":
            equals = self._math.checker(_as_math(answer))
            is_whole = data.extract in ("", "all")
            return lambda text: equals(text[-_MOST_CHARACTERS:] if is_whole else _as_math(text))
        if data.kind == "regex":
            try:
                pattern = compile_pattern(data.answer)
            except ValueError as error:
                raise invalid("data.answer", str(error)) from None
            return lambda text: pattern.search(text) is not None
        number, tolerance = _number(answer), Decimal(str(data.tolerance))
        if number is None:
            raise invalid("data.answer", "must be a number")

        def is_near(text: str) -> bool:
            found = _number(text)
            try:
                return found is not None and abs(found - number) <= tolerance
            except ArithmeticError:  # more digits than any number that is meant
                return False

        return is_near


def _extractor(name: str) -> extraction.Extract:
    kind, _, argument = name.partition(":")
    if kind == "regex" and argument:
        try:
            return extraction.by_expression(argument, _MOST_CHARACTERS)
        except ValueError as error:
            raise invalid("data.extract", str(error)) from None
    if kind == "after" and argument:
        return lambda text: (
            text.rpartition(argument)[2].split("\n")[0] if argument in text else None
        )
    match name:
        case "all":
            return str
        case "last_number":
            return lambda text: (extraction.last_number(text) or "").rstrip("%") or None
        case "boxed":
            return extraction.boxed
    raise invalid("data.extract", "must be all, last_number, boxed, after:TEXT or regex:PATTERN")


def _number(text: str) -> Decimal | None:
    return extraction.value_of(extraction.last_number(text) or "")


def _as_math(text: str) -> str:
    text = text[-_MOST_CHARACTERS:].strip()
    return text if "$" in text or "\\boxed" in text else f"${text}$"
