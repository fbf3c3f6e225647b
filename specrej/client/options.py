"""Flags that several commands share: credentials, and the options of a generation request."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from specrej.contracts import (
    Branching,
    GenerationRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Normalization,
    Options,
    Regex,
    Sampling,
    Schedule,
    Selection,
    StructuredOutput,
    TokenBias,
    WeightedReward,
)
from specrej.security import TOKEN_VARIABLE, Credentials, credentials_from

BIAS_SYNTAX = "TOKEN=BIAS"
STRUCTURED_SYNTAX = "json_object | (json_schema|regex|grammar):(TEXT|@FILE)"
REWARD_SYNTAX = "NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]"


@contextmanager
def _usage(text: str, syntax: str) -> Iterator[None]:
    """Turn the errors of a text that cannot be read into one with the syntax to use."""
    try:
        yield
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r}: use {syntax}") from None


def parse_schedule(text: str) -> Schedule:
    """`memory[:FIRST]`, `geometric[:FIRST[,FACTOR]]` or `tokens:T,T,...`."""
    kind, _, rest = text.partition(":")
    values = rest.split(",") if rest else []
    with _usage(text, "memory:16 (first), geometric:16,2 (first, factor) or tokens:16,32,64"):
        match kind, values:
            case "tokens", [_, *_]:
                return Schedule("tokens", tokens=tuple(map(int, values)))
            case "memory" | "geometric", []:
                return Schedule(kind)
            case "memory" | "geometric", [first]:
                return Schedule(kind, int(first))
            case "geometric", [first, factor]:
                return Schedule("geometric", int(first), float(factor))
        raise ValueError("unknown schedule")


def parse_branching(text: str) -> Branching:
    """`WIDTH[,KEEP[,TAPER]]`."""
    width, *rest = text.split(",")
    with _usage(text, "16,4 or 32,2,1 (width, keep, taper)"):
        return Branching(int(width), *map(int, rest[:1]), *map(float, rest[1:]))


def parse_reward(text: str) -> WeightedReward:
    """`NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]`; parts after the name in any order."""
    first, *rest = text.split(",")
    name, _, weight = first.partition("=")
    parts = {key: value for key, _, value in (part.partition("=") for part in rest)}
    with _usage(text, REWARD_SYNTAX):
        if len(parts) < len(rest):
            raise ValueError("a part is repeated")
        veto = parts.pop("veto", None)
        veto_below = None if veto is None else float(veto)
        return WeightedReward(name, float(weight or 1), _normalization(parts), veto_below)


def parse_bias(text: str) -> TokenBias:
    """`TOKEN=BIAS`: a token id and a number."""
    token_id, _, bias = text.partition("=")
    with _usage(text, BIAS_SYNTAX):
        return TokenBias(int(token_id), float(bias))


def parse_structured_output(text: str) -> StructuredOutput:
    """`json_schema:TEXT`, `regex:TEXT`, `grammar:TEXT` or `json_object`; TEXT may be `@FILE`."""
    kind, _, given = text.partition(":")
    if given.startswith("@"):
        try:
            given = Path(given[1:]).read_text().removesuffix("\n")  # an editor's, not the regex's
        except (OSError, UnicodeError) as error:
            raise argparse.ArgumentTypeError(f"{given[1:]}: {error}") from None
    match kind:
        case "json_object" if not given:
            return JsonObject()
        case "json_schema" if given:
            return JsonSchema(given)
        case "regex" if given:
            return Regex(given)
        case "grammar" if given:
            return Grammar(given)
    raise argparse.ArgumentTypeError(f"{text!r}: use {STRUCTURED_SYNTAX}")


def _normalization(parts: Mapping[str, str]) -> Normalization:
    match sorted(parts.items()):
        case []:
            return Normalization()
        case [("batch", "")]:
            return Normalization("batch")
        case [("deviation", deviation), ("mean", mean)]:
            return Normalization("fixed", float(mean), float(deviation))
        case _:
            raise ValueError("unknown normalization")


# Of options that are repeated, or that are no number, text or enumeration.
_SYNTAX: dict[str, tuple[Callable[[str], object], str]] = {
    "rewards": (parse_reward, REWARD_SYNTAX),
    "logit_bias": (parse_bias, BIAS_SYNTAX),
    "schedule": (parse_schedule, "SCHEDULE"),
    "branching": (parse_branching, "WIDTH,KEEP"),
    "structured_output": (parse_structured_output, STRUCTURED_SYNTAX),
}


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add a flag per option of a request; a flag that is not given leaves no attribute."""
    for contract in (Selection, Sampling, GenerationRequest):
        hints = get_type_hints(contract)
        for item in fields(contract):
            if "help" in item.metadata:
                _add_option(parser, item, hints[item.name])


def _add_option(parser: argparse._ArgumentGroup, item: Field[Any], hint: Any) -> None:
    more: dict[str, Any] = {}
    if item.name in _SYNTAX:
        more["type"], more["metavar"] = _SYNTAX[item.name]
    elif hint is bool:
        on_off = argparse.BooleanOptionalAction
        more["action"] = on_off if item.default else "store_true"
    elif isinstance(hint, type) and issubclass(hint, Enum):
        choices = [choice.value for choice in hint]
        more |= {"type": _choice(hint), "metavar": f"{{{','.join(choices)}}}"}
    else:
        more["type"] = {tuple[str, ...]: str, tuple[int, ...]: int}.get(hint, hint)
    if isinstance(item.default, tuple):
        more["action"] = "append"
    flag = "--reward" if item.name == "rewards" else f"--{item.name.replace('_', '-')}"
    names = (flag, "-n") if item.name == "n" else (flag,)
    # argparse formats help texts with %.
    text = item.metadata["help"].replace("%", "%%")
    parser.add_argument(*names, dest=item.name, default=argparse.SUPPRESS, help=text, **more)


def _choice(kind: type[Enum]) -> Callable[[str], Enum]:
    """A parser of an enumeration's values."""

    def parse(text: str) -> Enum:
        with _usage(text, f"one of {', '.join(choice.value for choice in kind)}"):
            return kind(text)

    return parse


def options_of(arguments: argparse.Namespace) -> Options:
    """The options that were given; for all others the server's defaults apply."""
    given: Any = _given(arguments, Options)
    options: Options = given
    return options


def _given(arguments: argparse.Namespace, keys: type) -> dict[str, Any]:
    return {key: value for key, value in vars(arguments).items() if key in keys.__annotations__}


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a client's credentials; see `credentials_of`."""
    group = parser.add_argument_group("credentials")
    for flag, text in (
        ("--token-file", f"file with the token to send; {TOKEN_VARIABLE} holds the token itself"),
        ("--tls-ca", "use TLS and trust the authorities in this PEM file"),
        ("--tls-cert", "PEM file of the client's certificate"),
        ("--tls-key", "PEM file of its key"),
    ):
        variable = f"SPECREJ_{flag.strip('-').replace('-', '_').upper()}"
        text = f"{text} [{variable}]"
        group.add_argument(flag, metavar="FILE", default=argparse.SUPPRESS, help=text)
    for flag, text in (
        ("--tls", "use TLS and trust the system's authorities [SPECREJ_TLS]"),
        ("--allow-plaintext-token", "send the token to other machines without TLS"),
    ):
        group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """The credentials of the flags, and those of environment variables for flags not given.

    The token itself has no flag: other users of the machine can read the arguments of a process.
    """
    given: Any = {**credentials_from(os.environ), **_given(arguments, Credentials)}
    credentials: Credentials = given
    return credentials
