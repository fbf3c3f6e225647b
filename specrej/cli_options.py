"""Flags that several commands share: credentials, and the options of a generation request."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import typer

from specrej.contracts import (
    Branching,
    GenerationRequest,
    GeometricSchedule,
    Grammar,
    JsonObject,
    JsonSchema,
    MemorySchedule,
    Normalization,
    Regex,
    Sampling,
    Schedule,
    Selection,
    StructuredOutput,
    TokenBias,
    TokensSchedule,
    WeightedReward,
)
from specrej.credentials import TOKEN_VARIABLE, Credentials

BIAS_SYNTAX = "TOKEN=BIAS"
STRUCTURED_SYNTAX = "json_object | (json_schema|regex|grammar):(TEXT|@FILE)"
REWARD_SYNTAX = "NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]"


def parse_schedule(text: str) -> Schedule:
    """`memory[:FIRST]`, `geometric[:FIRST[,FACTOR]]` or `tokens:T,T,...`."""
    kind, _, rest = text.partition(":")
    values = rest.split(",") if rest else []
    try:
        if kind == "memory" and len(values) <= 1:
            return MemorySchedule(int(values[0])) if values else MemorySchedule()
        if kind == "tokens" and values:
            return TokensSchedule(tuple(int(value) for value in values))
        if kind == "geometric" and len(values) <= 2:
            default = GeometricSchedule()
            first = int(values[0]) if values else default.first
            factor = float(values[1]) if len(values) == 2 else default.factor
            return GeometricSchedule(first=first, factor=factor)
    except ValueError:
        pass
    raise typer.BadParameter(
        f"{text!r}: use memory:16 (first), geometric:16,2 (first, factor) or tokens:16,32,64"
    )


def parse_branching(text: str) -> Branching:
    """`WIDTH[,KEEP]`."""
    try:
        return Branching(*(int(value) for value in text.split(",")))
    except (ValueError, TypeError):
        raise typer.BadParameter(f"{text!r}: use 16,4 (width, keep)") from None


def parse_reward(text: str) -> WeightedReward:
    """`NAME[=WEIGHT][,veto=X][,mean=M,deviation=D][,batch]`; parts after the name in any order."""
    first, *rest = text.split(",")
    name, _, weight = first.partition("=")
    parts = {key: value for key, _, value in (part.partition("=") for part in rest)}
    try:
        if len(parts) < len(rest):
            raise ValueError("a part is repeated")
        veto = parts.pop("veto", None)
        veto_below = None if veto is None else float(veto)
        return WeightedReward(name, float(weight or 1), _normalization(parts), veto_below)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use {REWARD_SYNTAX}") from None


def parse_bias(text: str) -> TokenBias:
    """`TOKEN=BIAS`: a token id and a number."""
    token_id, _, bias = text.partition("=")
    try:
        return TokenBias(int(token_id), float(bias))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: use {BIAS_SYNTAX}") from None


def parse_structured_output(text: str) -> StructuredOutput:
    """`json_schema:TEXT`, `regex:TEXT`, `grammar:TEXT` or `json_object`; TEXT may be `@FILE`."""
    kind, _, given = text.partition(":")
    if given.startswith("@"):
        try:
            given = Path(given[1:]).read_text()
        except (OSError, UnicodeError) as error:
            raise typer.BadParameter(f"{given[1:]}: {error}") from None
    match kind:
        case "json_object" if not given:
            return JsonObject()
        case "json_schema" if given:
            return JsonSchema(given)
        case "regex" if given:
            return Regex(given)
        case "grammar" if given:
            return Grammar(given)
    raise typer.BadParameter(f"{text!r}: use {STRUCTURED_SYNTAX}")


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


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with a flag per option of a request; its keyword `options` holds those given."""
    flags = [
        _flag_of(item, get_type_hints(contract)[item.name])
        for contract in (Selection, Sampling, GenerationRequest)
        for item in fields(contract)
        if "help" in item.metadata
    ]

    def options_of(**given: Any) -> dict[str, Any]:
        for name, parse in (("rewards", parse_reward), ("logit_bias", parse_bias)):
            given[name] = [parse(text) for text in given[name] or ()]
        return {name: value for name, value in given.items() if value not in (None, [])}

    return _with_flags(command, "options", flags, options_of)


def _flag_of(item: Field[Any], hint: Any) -> inspect.Parameter:
    """The flag of one option. Not given: None, so that the server's default applies."""
    flag, kind = f"--{item.name.replace('_', '-')}", hint
    more: dict[str, Any] = {}
    match item.name:
        case "rewards":
            flag, kind, more = "--reward", list[str], {"metavar": REWARD_SYNTAX}
        case "logit_bias":
            kind, more = list[str], {"metavar": BIAS_SYNTAX}
        case "structured_output":
            kind = JsonObject
            more = {"parser": parse_structured_output, "metavar": STRUCTURED_SYNTAX}
        case "schedule":
            # typer accepts no union as a type; the parser makes the value.
            kind, more = GeometricSchedule, {"parser": parse_schedule, "metavar": "SCHEDULE"}
        case "branching":
            kind, more = Branching, {"parser": parse_branching, "metavar": "WIDTH,KEEP"}
        case _ if hint == tuple[str, ...]:
            kind = list[str]
        case _ if hint == tuple[int, ...]:
            kind = list[int]
        case _ if item.default is True:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
    names = (flag, "-n") if item.name == "n" else (flag,)
    annotation: Any = Annotated[
        Optional[kind],  # noqa: UP045
        typer.Option(*names, help=item.metadata["help"], **more),
    ]
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def takes_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the flags of a client's credentials, and the keyword `credentials`."""
    flags = list(inspect.signature(_credentials, eval_str=True).parameters.values())
    return _with_flags(command, "credentials", flags, _credentials)


def _with_flags(
    command: Callable[..., None],
    name: str,
    flags: list[inspect.Parameter],
    make: Callable[..., Any],
) -> Callable[..., None]:
    """The command with `flags` in place of its keyword `name`; `make` returns that value."""
    own = inspect.signature(command, eval_str=True)

    @wraps(command)
    def with_flags(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        command(**given, **{name: make(**values)})

    others = [parameter for parameter in own.parameters.values() if parameter.name != name]
    as_keywords = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
    with_flags.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*others, *as_keywords]
    )
    return with_flags


def _flag(name: str, variable: str | None, text: str) -> Any:
    return typer.Option(name, envvar=variable, help=text, rich_help_panel="Credentials")


def _credentials(
    token_file: Annotated[
        Path | None,
        _flag(
            "--token-file",
            "SPECREJ_TOKEN_FILE",
            f"File with the token to send; {TOKEN_VARIABLE} holds the token itself.",
        ),
    ] = None,
    tls: Annotated[
        bool, _flag("--tls", "SPECREJ_TLS", "Use TLS and trust the system's authorities.")
    ] = False,
    tls_ca: Annotated[
        Path | None,
        _flag("--tls-ca", "SPECREJ_TLS_CA", "Use TLS and trust the authorities in this PEM file."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        _flag("--tls-cert", "SPECREJ_TLS_CERT", "PEM file of the client's certificate."),
    ] = None,
    tls_key: Annotated[
        Path | None, _flag("--tls-key", "SPECREJ_TLS_KEY", "PEM file of its key.")
    ] = None,
    allow_plaintext_token: Annotated[
        bool,
        _flag("--allow-plaintext-token", None, "Send the token to other machines without TLS."),
    ] = False,
) -> Credentials:
    return Credentials(
        # Not a flag: other users of the machine can read the arguments of a process.
        token=os.environ.get(TOKEN_VARIABLE, ""),
        token_file=token_file or "",
        tls=tls,
        tls_ca=tls_ca or "",
        tls_cert=tls_cert or "",
        tls_key=tls_key or "",
        allow_plaintext_token=allow_plaintext_token,
    )
