"""From requests, as clients of OpenAI write them, to calls of specrej's client."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.mapping import ChatRequest, CompletionRequest, Maps, Request, path_of
from specrej.contracts import MAX_SEED, Algorithm, CacheControl, Message, Options, Prompt
from specrej.errors import MAX_VIOLATIONS, InvalidRequest, Violation

R = TypeVar("R", bound=Request)

Presets = Mapping[str, BaseModel]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the client; `sources` has the caller's name of each path that the caller set."""

    prompt: Prompt
    options: Options
    num_choices: int
    timeout_s: float | None
    sources: Mapping[str, str]

    def name_of(self, path: str) -> str:
        """The caller's field for a path of the core's errors."""
        for known in sorted(self.sources, key=len, reverse=True):
            if path == known or path.startswith((f"{known}.", f"{known}[")):
                return self.sources[known] + path[len(known) :]
        part, _, rest = path.partition(".")
        return f"specrej.{rest}" if part in ("sampling", "selection") else path


def parsed(model: type[R], body: bytes) -> R:
    """The request in a JSON body.

    Raises:
        InvalidRequest: every field that is unknown, refused or of a wrong type.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    violations = [Violation(_name(item["loc"]), item["msg"]) for item in problems]
    raise InvalidRequest(violations[:MAX_VIOLATIONS])


def _name(location: tuple[int | str, ...]) -> str:
    """A field's path: ("messages", 0, "content") is "messages[0].content"."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return name.lstrip(".") or "body"


def call_of(request: Request, presets: Presets) -> Call:
    """The call for a request.

    Raises:
        InvalidRequest: fields that contradict each other.
    """
    options: dict[str, Any] = {}
    sources: dict[str, str] = {}
    model, _, preset = request.model.rpartition(":")
    if model and preset in presets:
        _merge(options, sources, presets[preset], "model: preset ")
    else:
        model = request.model
    extension: Any = request.specrej
    if extension:
        _merge(options, sources, extension, "specrej.")
        if extension.n is not None and request.best_of is not None:
            raise InvalidRequest([Violation("specrej.n", "is best_of: set one of them")])
    for name, path in mapped(type(request)).items():
        value = getattr(request, name)
        if value is not None:
            sources[path] = name
            if (option := path.rpartition(".")[2]) in Options.__annotations__:
                options[option] = value
    options["model"] = model
    if request.temperature == 0 and sources.get("selection.n", "").startswith("model"):
        options["n"] = 1  # a preset's number is no contradiction to greedy answers
    _fill_in(options)
    _check_choices(options, sources)
    timeout_s = extension.timeout_s if extension else None
    given: Options = {name: options[name] for name in options if name in Options.__annotations__}  # type: ignore[assignment]
    prompt = _prompt(request)
    sources["prompt"] = "messages" if prompt.messages else "prompt"
    return Call(prompt, given, options.get("return_candidates", 1), timeout_s, sources)


def mapped(model: type[BaseModel]) -> dict[str, str]:
    """The path that each field of a request maps to."""
    return {
        name: rule.path
        for name, field in model.model_fields.items()
        for rule in field.metadata
        if isinstance(rule, Maps)
    }


def _merge(options: dict[str, Any], sources: dict[str, str], given: BaseModel, prefix: str) -> None:
    for name in given.model_fields_set:
        value = getattr(given, name)
        if value is not None and name in Options.__annotations__:
            options[name] = value
            sources[path_of(name)] = f"{prefix}{name}"


def _fill_in(options: dict[str, Any]) -> None:
    """Defaults that differ from the core's."""
    if options.get("temperature") == 0:
        options.setdefault("n", 1)  # all candidates would be equal
    elif "seed" not in options:
        options["seed"] = secrets.randbelow(MAX_SEED)
        # Nothing will ever look for an answer of this seed.
        options.setdefault("cache", CacheControl.BYPASS)
    if "logprobs" in options:
        options["logprobs"] = options["logprobs"] is not False
    if options.get("return_candidates", 1) > 1 and not {"algorithm", "alpha"} & options.keys():
        # Rejection may end all candidates but one: see docs/gateway.md.
        options["algorithm"] = Algorithm.BEST_OF_N


def _check_choices(options: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    num_choices, num_candidates = options.get("return_candidates", 1), options.get("n", 0)
    if 0 < num_candidates < num_choices:
        name = sources.get("selection.n", "n")
        text = f"{num_candidates} candidates are fewer than the {num_choices} choices of n"
        raise InvalidRequest([Violation(name, text)])


def _prompt(request: Request) -> Prompt:
    if isinstance(request, ChatRequest):
        turns = tuple(Message(message.role, message.content) for message in request.messages)
        special = _allows_special(request)
        return Prompt(messages=turns, allow_special_tokens=special)
    assert isinstance(request, CompletionRequest)
    return Prompt(text=request.prompt, allow_special_tokens=_allows_special(request))


def _allows_special(request: Request) -> bool:
    extension: Any = request.specrej
    return bool(extension and extension.allow_special_tokens)
