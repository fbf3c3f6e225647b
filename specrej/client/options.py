"""Texts of options, for the client and the command line, and the flags that commands share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from specrej import contracts as c
from specrej.security import TOKEN_VARIABLE, Credentials, credentials_from

BIAS_SYNTAX = "TOKEN=BIAS"
STRUCTURED_SYNTAX = "json_object | (json_schema|regex|grammar):TEXT"
REWARD_SYNTAX = "NAME[=WEIGHT][,veto=X][,batch][,stage=cuts|end]"
VOTE_SYNTAX = "number | boxed | tool_call | (regex|json|function):TEXT"


def parse_schedule(text: str) -> c.Schedule:
    """`memory[:FIRST]`, `geometric[:FIRST[,FACTOR]]` or `tokens:T,T,...`."""
    kind, _, rest = text.partition(":")
    values = rest.split(",") if rest else []
    match kind, values:
        case "tokens", [_, *_]:
            return c.Schedule("tokens", tokens=tuple(map(int, values)))
        case "memory" | "geometric", []:
            return c.Schedule(kind)
        case "memory" | "geometric", [first]:
            return c.Schedule(kind, int(first))
        case "geometric", [first, factor]:
            return c.Schedule("geometric", int(first), float(factor))
    raise ValueError("unknown schedule")


def parse_n(text: str) -> int:
    """A number, or `auto`."""
    return 0 if text == "auto" else int(text)


def parse_branching(text: str) -> c.Branching:
    """`WIDTH[,KEEP[,TAPER]]`."""
    width, *rest = text.split(",")
    return c.Branching(int(width), *map(int, rest[:1]), *map(float, rest[1:]))


def parse_reward(text: str) -> c.WeightedReward:
    """`REWARD_SYNTAX`; parts after the name in any order."""
    first, *rest = text.split(",")
    name, _, weight = first.partition("=")
    parts = {key: value for key, _, value in (part.partition("=") for part in rest)}
    if len(parts) < len(rest):
        raise ValueError("a part is repeated")
    veto = parts.pop("veto", None)
    veto_below = None if veto is None else float(veto)
    stage = parts.pop("stage", "both")
    if stage not in ("both", "cuts", "end"):
        raise ValueError("unknown stage")
    batch = parts.pop("batch", None)
    if parts or batch:  # a batch has no value
        raise ValueError("unknown part")
    normalization = c.Normalization("none" if batch is None else "batch")
    return c.WeightedReward(name, float(weight or 1), normalization, veto_below, cast(Any, stage))


def parse_vote(text: str) -> c.Vote:
    """An extractor, with what it needs after a colon."""
    kind, _, argument = text.partition(":")
    if kind not in get_args(get_type_hints(c.Vote)["extractor"]):
        raise ValueError("unknown extractor")
    return c.Vote(cast(Any, kind), argument)


def parse_confidence_cut(text: str) -> c.ConfidenceCut:
    """`KEEP[,WINDOW]`."""
    keep, *window = text.split(",")
    return c.ConfidenceCut(float(keep), *map(int, window))


def parse_bias(text: str) -> c.TokenBias:
    """`TOKEN=BIAS`: a token id and a number."""
    token_id, _, bias = text.partition("=")
    return c.TokenBias(int(token_id), float(bias))


def parse_structured_output(text: str) -> c.StructuredOutput:
    """`json_schema:TEXT`, `regex:TEXT`, `grammar:TEXT` or `json_object`."""
    kind, _, given = text.partition(":")
    kinds = {"json_schema": c.JsonSchema, "regex": c.Regex, "grammar": c.Grammar}
    if kind == "json_object" and not given:
        return c.JsonObject()
    if not given or kind not in kinds:
        raise ValueError("unknown structured output")
    return kinds[kind](given)


# Of options that take more than a number, text or enumeration: parser, metavar, and what to use
# instead of a text that cannot be parsed. Where there may be several values, the parser is that of
# one.
_SYNTAX: dict[str, tuple[Callable[[str], object], str, str]] = {
    "n": (parse_n, "N", "an integer or auto"),
    "rewards": (parse_reward, REWARD_SYNTAX, REWARD_SYNTAX),
    "logit_bias": (parse_bias, BIAS_SYNTAX, BIAS_SYNTAX),
    "schedule": (
        parse_schedule,
        "SCHEDULE",
        "memory:16 (first), geometric:16,2 (first, factor) or tokens:16,32,64",
    ),
    "vote": (parse_vote, VOTE_SYNTAX, VOTE_SYNTAX),
    "confidence_cut": (parse_confidence_cut, "KEEP[,WINDOW]", "0.9 or 0.9,64 (keep, window)"),
    "branching": (parse_branching, "WIDTH,KEEP", "16,4 or 32,2,1 (width, keep, taper)"),
    "structured_output": (parse_structured_output, STRUCTURED_SYNTAX, STRUCTURED_SYNTAX),
}
# Flags that take more than the option's text.
_FILES = {"structured_output": STRUCTURED_SYNTAX.replace("TEXT", "(TEXT|@FILE)")}
_KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "a text"}


def _syntax_of(name: str) -> tuple[Callable[[str], object], str, str] | None:
    """As in `_SYNTAX`; None: the option's texts are its values, or it has none."""
    kind = c.declared_options()[name].type
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = [choice.value for choice in kind]
        return kind, f"{{{','.join(choices)}}}", f"one of {', '.join(choices)}"
    return _SYNTAX.get(name)


def value_of(name: str, given: Any) -> Any:
    """The value of an option, or one of its values: from the text that its flag takes, or from a
    mapping of its fields; anything else as it is.

    Raises:
        ValueError: with what to use.
    """
    convert, _, syntax = _syntax_of(name) or (str, "", "")
    try:
        if isinstance(given, Mapping):
            kind = c.declared_options()[name].type
            return _from_mapping((*get_args(kind), kind)[0], given)
        return convert(given) if isinstance(given, str) else given
    except (TypeError, ValueError):
        raise ValueError(f"{shown(name, given)}: use {syntax or accepted(name)}") from None


def shown(name: str, given: Any) -> str:
    """A value in an error, without the data of rewards."""
    if name == "rewards" and not isinstance(given, str):
        return type(given).__name__
    return f"{given!r:.100}"


def json_text(value: Any) -> str:
    """A text as it is, anything else as JSON.

    Raises:
        ValueError: JSON cannot have it.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError):
        raise ValueError("must be JSON") from None


def _from_mapping(kind: Any, fields: Any) -> Any:
    if not isinstance(fields, Mapping):
        return fields
    kinds = get_type_hints(kind)
    return kind(
        **{
            name: json_text(value)
            if (kind, name) == (c.WeightedReward, "data")
            else _from_mapping(kinds.get(name), value)
            for name, value in fields.items()
        }
    )


def accepted(name: str) -> str:
    """What an option takes, for an error."""
    if syntax := _syntax_of(name):
        return syntax[2]
    kind = c.declared_options()[name].type
    return _KINDS.get(kind) or f"a list of {'texts' if kind == tuple[str, ...] else 'numbers'}"


def _flag_type(name: str) -> Callable[[str], object]:
    """`value_of` for argparse."""

    def parsed(text: str) -> object:
        try:
            return value_of(name, _with_file(text) if name == "structured_output" else text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _with_file(text: str) -> str:
    """A structured output with the text of a file in place of `@FILE`."""
    kind, _, given = text.partition(":")
    if not given.startswith("@"):
        return text
    given = Path(given[1:]).read_text().removesuffix("\n")  # an editor's, not the regex's
    return f"{kind}:{given}"


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Add a flag per option of a request; a flag that is not given leaves no attribute."""
    for name, option in c.declared_options().items():
        more: dict[str, Any] = {}
        kind = option.type
        if syntax := _syntax_of(name):
            more = {"type": _flag_type(name), "metavar": _FILES.get(name, syntax[1])}
        elif kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        else:
            types = {tuple[str, ...]: str, tuple[int, ...]: int, float | None: float}
            more["type"] = types.get(kind, kind)
        if isinstance(option.default, tuple):
            more["action"] = "append"
        flag = "--reward" if name == "rewards" else f"--{name.replace('_', '-')}"
        flags = (flag, "-n") if name == "n" else (flag,)
        text, default = option.help_text, getattr(option.default, "value", option.default)
        if default != "" and type(default) in (int, float, str) and "default" not in text:
            text = f"{text.removesuffix('.')}; default: {default}."
        text = text.replace("%", "%%")  # argparse formats help texts
        parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **more)


def options_of(arguments: argparse.Namespace) -> c.Options:
    """The options that were given; for all others the server's defaults apply."""
    return {key: value for key, value in vars(arguments).items() if key in c.declared_options()}


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
    names = Credentials.__annotations__
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    return cast(Credentials, {**credentials_from(os.environ), **flags})
