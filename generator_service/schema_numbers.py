"""Numbers of JSON schemas that llguidance does not keep exactly: it reads them as float64."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

_DIGITS = 15  # that float64 keeps of any number
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
        else:
            _check(value)


def _check_values(value: Any) -> None:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            _check_values(part)
    is_exact = not isinstance(value, Decimal) or len(value.as_tuple().digits) <= _DIGITS
    if isinstance(value, int) and not isinstance(value, bool):
        is_exact = abs(value) <= 2**53
    if not is_exact:
        raise ValueError(f"numbers in enum and const have at most {_DIGITS} digits")


def _check_bounds(schema: dict[str, Any]) -> None:
    """Where an exclusive bound is whole and the other one has its whole part, llguidance allows the
    exclusive bound itself."""
    lows, highs, exclusive = (
        [schema[name] for name in names if isinstance(schema.get(name), int | Decimal)]
        for names in (
            ("minimum", "exclusiveMinimum"),
            ("maximum", "exclusiveMaximum"),
            ("exclusiveMinimum", "exclusiveMaximum"),
        )
    )
    is_of_integers = schema.get("type") == "integer"
    is_whole = any(Decimal(bound).to_integral_value() == bound for bound in exclusive)
    if lows and highs and is_whole and not is_of_integers and min(highs) - max(lows) < 1:
        raise ValueError("bounds of a number are at least 1 apart where one is whole and exclusive")
