"""OpenAI's requests as calls of specrej's client."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel

from gateway.requests import (
    TABLE,
    ChatRequest,
    CompletionRequest,
    Maps,
    Request,
    ResponseFormat,
    path_of,
)
from specrej.contracts import (
    MAX_SEED,
    Algorithm,
    CacheControl,
    Message,
    Options,
    Prompt,
    Sampling,
)
from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any

# Of the choices of a request: the body of the answer takes about 300 MB while it is made.
MAX_LOGPROBS = 2**18


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

    @property
    def wants_logprobs(self) -> bool:
        return self.options.get("logprobs", False)

    def name_of(self, path: str) -> str:
        """The caller's field for a path in the orchestrator's errors."""
        for known in sorted(self.sources, key=len, reverse=True):
            if path == known or path.startswith((f"{known}.", f"{known}[")):
                return self.sources[known] + path[len(known) :]
        part, _, option = path.partition(".")
        return f"specrej.{option}" if option and part in ("sampling", "selection") else path


def call_of(request: Request, presets: Mapping[str, BaseModel]) -> Call:
    """The call for a request.

    Raises:
        InvalidRequest: fewer candidates than choices, several choices at temperature 0, or more
            than MAX_LOGPROBS values.
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
    for name in type(request).model_fields:
        rule, value = TABLE[name], getattr(request, name)
        if isinstance(rule, Maps) and value is not None:
            sources[rule.path] = name
            option = rule.path.rpartition(".")[2]
            if option in Options.__annotations__:
                options[option] = value
    of_preset = {name for name in options if sources.get(path_of(name), "").startswith("model: ")}
    for name in of_preset & _unfit(options):
        del options[name]
    sources.setdefault("prompt", "messages" if isinstance(request, ChatRequest) else "prompt")
    sources.setdefault("selection.min_answers", "n")
    sources.setdefault("sampling.top_logprobs", "logprobs")
    sources.setdefault("sampling.max_tokens", "max_tokens")
    sources["prompt.allow_special_tokens"] = "specrej.allow_special_tokens"
    options["model"] = model if has_preset else request.model
    if options.get("temperature") == 0 and options.get("return_candidates", 1) > 1:
        raise InvalidRequest([Violation("n", "must be 1 at temperature 0: all would be equal")])
    _fill_in(options)
    call = Call(_prompt(request), cast(Options, options), request.specrej.timeout_s, sources)
    if 0 < call.options.get("n", 0) < call.num_choices:
        text = f"must be at least n, the number of choices ({call.num_choices})"
        raise InvalidRequest([Violation(call.name_of("selection.n"), text)])
    raise_if_any(_too_large(call))
    return call


def _too_large(call: Call) -> Iterator[Violation]:
    options = call.options
    per_token = 1 + options.get("top_logprobs", 0) if call.wants_logprobs else 0
    num_tokens = call.num_choices * options.get("max_tokens", Sampling().max_tokens)
    if num_tokens * per_token > MAX_LOGPROBS:
        # Without their number, which may have too many digits for a text.
        most = f"the choices may have at most {MAX_LOGPROBS} log-probabilities"
        yield Violation(call.name_of("sampling.top_logprobs"), most)


def _unfit(options: Mapping[str, Any]) -> set[str]:
    """Options that the others make invalid: a preset's are left out then."""
    if options.get("temperature") == 0:  # greedy candidates would all be equal
        return {"n", "min_answers", "branching"}
    unfit: set[str] = set()
    num_choices, least = options.get("return_candidates", 1), options.get("min_answers", 1)
    branching, most = options.get("branching"), options.get("n") or math.inf
    if most < num_choices:
        unfit.add("n")
        most = math.inf
    if branching:
        most = min(most, branching.keep)
        is_best_of_n = options.get("algorithm") is Algorithm.BEST_OF_N
        if is_best_of_n or branching.keep < max(num_choices, least):
            unfit.add("branching")
    if not num_choices <= least <= most:
        unfit.add("min_answers")
    return unfit


def _fill_in(options: dict[str, Any]) -> None:
    """Set defaults that differ from the orchestrator's; docs/gateway.md has the reasons."""
    if options.get("temperature") == 0:
        options.setdefault("n", 1)
    elif "seed" not in options:
        options["seed"] = secrets.randbelow(MAX_SEED)
        options.setdefault("cache", CacheControl.BYPASS)  # no later request has this seed
    if isinstance(given := options.get("structured_output"), ResponseFormat):
        options["structured_output"] = given.output
    if not isinstance(options.get("logprobs", False), bool):  # a number, of completions
        options |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    if (num_choices := options.get("return_candidates", 1)) > 1:
        options.setdefault("min_answers", num_choices)


def _prompt(request: Request) -> Prompt:
    special = request.specrej.allow_special_tokens
    if isinstance(request, CompletionRequest):
        return Prompt(text=request.prompt, allow_special_tokens=special)
    assert isinstance(request, ChatRequest)
    turns = tuple(Message(message.role, message.content) for message in request.messages)
    return Prompt(messages=turns, allow_special_tokens=special)
