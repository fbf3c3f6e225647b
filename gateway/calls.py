"""From requests of OpenAI's clients to calls of specrej's client."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from gateway.mapping import (
    MESSAGE_TABLE,
    STREAM_TABLE,
    TABLE,
    ChatRequest,
    CompletionRequest,
    Ignored,
    Maps,
    Refused,
    Request,
    Rule,
    path_of,
)
from specrej.contracts import MAX_SEED, Algorithm, CacheControl, Message, Options, Prompt
from specrej.errors import InvalidRequest, Violation, raise_if_any

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the client; `sources` has the caller's field for each path that is set."""

    prompt: Prompt
    options: Options
    timeout_s: float | None
    sources: Mapping[str, str]

    @property
    def num_choices(self) -> int:
        return self.options.get("return_candidates", 1)

    def name_of(self, path: str) -> str:
        """The caller's field for a path in the core's errors."""
        for known in sorted(self.sources, key=len, reverse=True):
            if path == known or path.startswith((f"{known}.", f"{known}[")):
                return self.sources[known] + path[len(known) :]
        part, _, option = path.partition(".")
        return f"specrej.{option}" if part in ("sampling", "selection") else path


def parsed(model: type[R], body: bytes) -> R:
    """The request in a JSON body.

    Raises:
        InvalidRequest: every field that is unknown, refused or of a wrong type.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        texts = (item["msg"].removeprefix("Value error, ") for item in problems)
        raise_if_any(map(Violation, (_name(item["loc"]) for item in problems), texts))
        raise
    raise_if_any(_violations(request))
    return request


def _name(location: tuple[int | str, ...]) -> str:
    """The path of a field: that of ("messages", 0, "content") is "messages[0].content"."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.lstrip(".") or "body"


def _violations(request: Request) -> Iterator[Violation]:
    yield from _extra(request, TABLE)
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            yield from _extra(message, MESSAGE_TABLE, f"messages[{index}].")
        if None not in (request.max_tokens, request.max_completion_tokens):
            yield Violation("max_tokens", "is max_completion_tokens: set one of them")
    if request.stream_options:
        yield from _extra(request.stream_options, STREAM_TABLE, "stream_options.")
        if not request.stream:
            yield Violation("stream_options", "needs stream: true")
    if None not in (request.best_of, request.specrej.model_dump().get("n")):
        yield Violation("specrej.n", "is best_of: set one of them")


def _extra(given: BaseModel, table: Mapping[str, Rule], path: str = "") -> Iterator[Violation]:
    for name, value in (given.model_extra or {}).items():
        match table.get(name):
            case Ignored():
                pass
            case Refused(why, harmless):
                if value is not None and value not in harmless:
                    yield Violation(path + name, why)
            case _:
                yield Violation(path + name, "unknown field")


def call_of(request: Request, presets: Mapping[str, BaseModel]) -> Call:
    """The call for a request.

    Raises:
        InvalidRequest: fewer candidates than choices.
    """
    options: dict[str, Any] = {}
    sources: dict[str, str] = {}
    model, _, preset = request.model.rpartition(":")
    has_preset = bool(model) and preset in presets
    parts = [(presets[preset], f"model: {preset}.")] if has_preset else []
    for part, prefix in (*parts, (request.specrej, "specrej.")):
        for name in part.model_fields_set & Options.__annotations__.keys():
            if (value := getattr(part, name)) is not None:
                options[name] = value
                sources[path_of(name)] = prefix + name
    if request.temperature == 0 and has_preset and sources.get("selection.n") != "specrej.n":
        options.pop("n", None)  # greedy candidates would all be equal
    for name in type(request).model_fields:
        rule, value = TABLE[name], getattr(request, name)
        if isinstance(rule, Maps) and value is not None:
            sources[rule.path] = name
            option = rule.path.rpartition(".")[2]
            if option in Options.__annotations__:
                options[option] = value
    options["model"] = model if has_preset else request.model
    _fill_in(options)
    call = Call(_prompt(request), cast(Options, options), request.specrej.timeout_s, sources)
    if 0 < call.options.get("n", 0) < call.num_choices:
        text = f"must be at least n, the number of choices ({call.num_choices})"
        raise InvalidRequest([Violation(call.name_of("selection.n"), text)])
    return call


def _fill_in(options: dict[str, Any]) -> None:
    """Defaults that differ from the core's; docs/gateway.md has the reasons."""
    if options.get("temperature") == 0:
        options.setdefault("n", 1)
    elif "seed" not in options:
        options["seed"] = secrets.randbelow(MAX_SEED)
        options.setdefault("cache", CacheControl.BYPASS)  # no later request has this seed
    if "logprobs" in options:
        options["logprobs"] = options["logprobs"] is not False  # 0 asks for them, too
    if options.get("return_candidates", 1) > 1 and not {"algorithm", "alpha"} & options.keys():
        options["algorithm"] = Algorithm.BEST_OF_N


def _prompt(request: Request) -> Prompt:
    special = request.specrej.allow_special_tokens
    if isinstance(request, CompletionRequest):
        return Prompt(text=request.prompt, allow_special_tokens=special)
    assert isinstance(request, ChatRequest)
    turns = tuple(Message(message.role, message.content) for message in request.messages)
    return Prompt(messages=turns, allow_special_tokens=special)
