"""Numbers of JSON schemas that llguidance does not keep exactly: it reads them as float64."""

from __future__ import annotations

import json
from decimal import ROUND_DOWN, Decimal
from typing import Any

_DIGITS = 15
# Keywords whose value is an example, which constrains nothing.
_EXAMPLES = ("default", "examples")
# Keywords whose value has schemas by names, which may be those of keywords.
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def check_numbers(schema: str) -> None:
    """Check a schema; text that is no JSON passes.

    Raises:
        ValueError: answers of this schema would not conform to it.
    """
    try:
        _check(json.loads(schema, parse_float=Decimal))
    except json.JSONDecodeError:
        return
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except ArithmeticError:
        raise ValueError("a number is out of range") from None


def _check(schema: Any) -> None:
    if isinstance(schema, list):
        for part in schema:
            _check(part)
    if not isinstance(schema, dict):
        return
    _check_bounds(schema)
    for keyword, value in schema.items():
        if keyword in _BY_NAME and isinstance(value, dict):
            _check([*value.values()])
        elif keyword in ("enum", "const"):
            _check_values(value)
        elif keyword not in _EXAMPLES:
            _check(value)


def _check_values(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            _check_values(part)
    if _is_number(value) and not _is_exact(value):
        raise ValueError(f"the number {value} in enum or const is not exact as float64"[:80])


def _is_exact(value: int | Decimal) -> bool:
    """llguidance's parser may miss the last bit of a fraction of more than 15 digits."""
    digits = value.as_tuple().digits if isinstance(value, Decimal) else ()
    return len(digits) <= _DIGITS and Decimal(repr(float(value))) == value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _whole(value: int | Decimal) -> Decimal:
    return Decimal(value).to_integral_value(ROUND_DOWN)  # not int: of 1e9999999 it takes minutes


def _check_bounds(schema: dict[str, Any]) -> None:
    """Where an exclusive bound is whole and the other one has its whole part, llguidance allows the
    exclusive bound itself."""
    if schema.get("type") == "integer":
        return
    for exclusive, other in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = schema.get(exclusive)
        others = [schema[name] for name in other if _is_number(schema.get(name))]
        if _is_number(bound) and any(value != bound == _whole(value) for value in others):
            text = "an exclusive bound that is the whole part of the other bound is not supported"
            raise ValueError(text)
