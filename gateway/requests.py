"""Requests of OpenAI's completions, and the calls of specrej's client for requests of all APIs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gateway import fields
from gateway.answers import Answer, CompletionAnswer
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any

_TOOLS = "is not supported: raw text has no tools"
_AUDIO = "is not supported: there is only text"
# vLLM's number for an absent value.
_UNLESS_UNSET = BeforeValidator(lambda value: None if value == -1 else value)
_MaxTokens = Annotated[int | None, fields.Maps("sampling.max_tokens"), Field(ge=1), _UNLESS_UNSET]


def _by_kind(given: Mapping[str, Any] | None) -> c.StructuredOutput | None:
    """vLLM's structured outputs."""
    if given is None:
        return None
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    match [(kind, given[kind]) for kind in kinds if given.get(kind) not in (None, False)]:
        case [("json", str(schema))]:
            return c.JsonSchema(schema)
        case [("json", dict(schema))]:
            return fields.schema_of(schema)
        case [("regex", str(pattern))]:
            return c.Regex(pattern)
        case [("choice", [_, *_] as texts)] if all(isinstance(text, str) for text in texts):
            return c.Regex("|".join(map(re.escape, texts)))
        case [("grammar", str(lark))]:
            return c.Grammar(lark)
        case [("json_object", True)]:
            return c.JsonObject()
    raise ValueError("must have a value of one kind: json, regex, choice, grammar or json_object")


def _guided(kind: str) -> Any:
    """A structured output of that kind."""
    made = AfterValidator(lambda given: None if given is None else _by_kind({kind: given}))
    return Annotated[Any, fields.OUTPUT, made]


class Request(fields.Checked):
    """The fields that all endpoints have."""

    model: Annotated[str, fields.Maps("model"), Field(min_length=1)]
    temperature: Annotated[float | None, fields.Maps("sampling.temperature")] = None
    top_p: Annotated[float | None, fields.Maps("sampling.top_p")] = None
    seed: Annotated[int | None, fields.Maps("sampling.seed"), _UNLESS_UNSET] = None
    stream: Annotated[bool | None, fields.Maps("stream")] = None
    specrej: Annotated[fields.Extension | None, fields.Maps("specrej")] = None

    @property
    def extension(self) -> Any:
        """`specrej`, or an empty one."""
        return self.specrej or fields.Extension()

    def options(self) -> list[tuple[str, str, Any]]:
        """The fields that set paths of the orchestrator: name, path, value."""
        rules = fields.rules_of(type(self)).items()
        return [(f, r.path, getattr(self, f)) for f, r in rules if isinstance(r, fields.Maps)]

    def turns(self) -> list[tuple[str, c.Message]]:
        """The conversation; of each turn also the caller's field."""
        return []

    def made_prompt(self) -> c.Prompt:
        """The prompt.

        Raises:
            InvalidRequest: fields that contradict each other.
        """
        raise NotImplementedError

    def paths(self) -> dict[str, str]:
        """The caller's fields for paths of the orchestrator that no rule names."""
        turns = {f"prompt.messages[{n}]": field for n, (field, _) in enumerate(self.turns())}
        return {**turns, "prompt.tool_name": "tool_choice"}

    def answer(self, call: Call) -> Answer:
        """What makes the reply."""
        raise NotImplementedError


class CompletionFields(Request):
    """The fields that both endpoints of completions have."""

    n: Annotated[int | None, fields.Maps("selection.return_candidates")] = None
    best_of: Annotated[int | None, fields.Maps("selection.n"), Field(ge=1)] = None
    max_tokens: _MaxTokens = None
    stop: Annotated[
        list[str] | None, fields.Maps("sampling.stop"), BeforeValidator(fields.as_texts)
    ] = None
    presence_penalty: Annotated[float | None, fields.Maps("sampling.presence_penalty")] = None
    frequency_penalty: Annotated[float | None, fields.Maps("sampling.frequency_penalty")] = None
    logit_bias: Annotated[dict[int, float] | None, fields.Maps("sampling.logit_bias")] = None
    top_k: Annotated[int | None, fields.Maps("sampling.top_k"), _UNLESS_UNSET] = None
    min_p: Annotated[float | None, fields.Maps("sampling.min_p")] = None
    repetition_penalty: Annotated[float | None, fields.Maps("sampling.repetition_penalty")] = None
    min_tokens: Annotated[int | None, fields.Maps("sampling.min_tokens")] = None
    ignore_eos: Annotated[bool | None, fields.Maps("sampling.ignore_eos")] = None
    stop_token_ids: Annotated[list[int] | None, fields.Maps("sampling.stop_token_ids")] = None
    structured_outputs: Annotated[
        dict[str, Any] | None, fields.OUTPUT, AfterValidator(_by_kind)
    ] = None
    guided_json: _guided("json") = None  # type: ignore[valid-type]
    guided_regex: _guided("regex") = None  # type: ignore[valid-type]
    guided_choice: _guided("choice") = None  # type: ignore[valid-type]
    guided_grammar: _guided("grammar") = None  # type: ignore[valid-type]
    stream_options: Annotated[fields.StreamOptions | None, fields.Maps("stream")] = None

    audio: Annotated[Any, fields.Refused(_AUDIO)] = None
    bad_words: Annotated[Any, fields.Refused("is not supported: use logit_bias", ([],))] = None
    echo: Annotated[Any, fields.Refused("is not supported: prompts are not repeated", (False,))] = (
        None
    )
    function_call: Annotated[Any, fields.Refused(fields.FUNCTIONS, ("none", "auto"))] = None
    functions: Annotated[Any, fields.Refused(fields.FUNCTIONS, ([],))] = None
    modalities: Annotated[Any, fields.Refused(_AUDIO, (["text"],))] = None
    moderation: Annotated[Any, fields.Refused("is not supported: answers are not moderated")] = None
    suffix: Annotated[Any, fields.Refused("is not supported: text is only continued", ("",))] = None
    tool_choice: Annotated[Any, fields.Refused(_TOOLS, ("none", "auto"))] = None
    tools: Annotated[Any, fields.Refused(_TOOLS, ([],))] = None
    web_search_options: Annotated[Any, fields.Refused("is not supported: there is no search")] = (
        None
    )

    ignores: ClassVar = {
        **fields.OF_OPENAI,
        "chat_template_kwargs": "raw text has no template",
        "parallel_tool_calls": "raw text has no tools",
        "prediction": "it changes the speed only",
        "reasoning_effort": fields.NO_SETTING,
        "verbosity": fields.NO_SETTING,
    }

    def options(self) -> list[tuple[str, str, Any]]:
        if self.stream_options and not self.stream:
            raise InvalidRequest([Violation("stream_options", "needs stream: true")])
        return super().options()

    def paths(self) -> dict[str, str]:
        items = enumerate(self.logit_bias or ())
        biases = {f"sampling.logit_bias[{n}]": f"logit_bias.{token_id}" for n, token_id in items}
        return super().paths() | biases

    def answer(self, call: Call) -> Answer:
        return CompletionAnswer(
            self.model,
            call.num_choices,
            is_chat=isinstance(self, ChatRequest),
            logprobs=call.wants_logprobs,
            has_tools=bool(call.prompt.tools),
            shows_usage=bool(self.stream_options and self.stream_options.include_usage),
            stop_at=call.options.get("stop_at"),
        )


class CalledFunction(fields.Checked):
    name: str
    arguments: Annotated[str, BeforeValidator(lambda value: value or "{}")]

    ignores: ClassVar = {"parsed_arguments": fields.OF_ANSWERS}


class ChatCall(fields.Checked):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    ignores: ClassVar = {"index": fields.OF_ANSWERS}


class ChatMessage(fields.Checked):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(fields.role_of)]
    content: fields.Content = ()
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None

    function_call: Annotated[Any, fields.Refused(fields.FUNCTIONS)] = None
    audio: Annotated[Any, fields.Refused(_AUDIO)] = None

    ignores: ClassVar = {
        "name": "chat templates have no names",
        **dict.fromkeys(
            ("refusal", "parsed", "annotations", "reasoning_content"), fields.OF_ANSWERS
        ),
    }

    @property
    def turn(self) -> c.Message:
        """The turn of the conversation."""
        calls = (
            c.ToolCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        return fields.message_of(self.role, self.content, calls, self.tool_call_id or "")


class ChatTool(fields.Checked):
    type: Literal["function"]
    function: fields.Function


class TemplateVariables(fields.Checked):
    """Of chat templates that know whether the model reasons; others have no effect."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def flag(self) -> bool | None:
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class ChatRequest(CompletionFields):
    """A conversation."""

    response_format: Annotated[fields.ResponseFormat | None, fields.OUTPUT, fields.MADE] = None
    messages: Annotated[list[ChatMessage], fields.Maps("prompt.messages"), Field(min_length=1)]
    tools: Annotated[list[ChatTool] | None, fields.Maps("prompt.tools")] = None
    tool_choice: fields.ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, fields.Maps("prompt.parallel_tool_calls")] = None
    max_completion_tokens: _MaxTokens = None
    max_thinking_tokens: Annotated[int | None, fields.Maps("sampling.max_thinking_tokens")] = None
    chat_template_kwargs: Annotated[TemplateVariables | None, fields.Maps("prompt.thinking")] = None
    reasoning_effort: Annotated[
        str | None, fields.Maps("prompt.thinking"), AfterValidator(fields.effort_of)
    ] = None
    continue_final_message: Annotated[bool | None, fields.Maps("prompt.continue_final")] = None
    add_generation_prompt: Annotated[bool | None, fields.Maps("prompt.continue_final")] = None
    logprobs: Annotated[bool | None, fields.Maps("sampling.logprobs")] = None
    top_logprobs: Annotated[int | None, fields.Maps("sampling.top_logprobs")] = None

    def turns(self) -> list[tuple[str, c.Message]]:
        return [(f"messages[{n}]", message.turn) for n, message in enumerate(self.messages)]

    def made_prompt(self) -> c.Prompt:
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is False and not continues:
            text = "false needs continue_final_message: true"
            raise InvalidRequest([Violation("add_generation_prompt", text)])
        flag = self.chat_template_kwargs.flag if self.chat_template_kwargs else None
        prompt = c.Prompt(
            messages=tuple(turn for _, turn in self.turns()),
            allow_special_tokens=bool(self.extension.allow_special_tokens),
            continue_final=continues,
            thinking=flag if self.reasoning_effort is None else False,
        )
        tools = [tool.function.tool for tool in self.tools or ()]
        return fields.with_tools(prompt, tools, self.tool_choice, self.parallel_tool_calls)

    def paths(self) -> dict[str, str]:
        functions = [f"tools[{n}]" for n in range(len(self.tools or ()))]
        for number, message in enumerate(self.messages):
            calls = range(len(message.tool_calls or ()))
            functions += (f"messages[{number}].tool_calls[{n}]" for n in calls)
        named = {f"prompt.{field}": f"{field}.function" for field in functions}
        return {**super().paths(), **named, "prompt": "messages"}


def _one(value: object) -> object:
    """The text of a prompt, perhaps in a list."""
    match value:
        case [str(text)] | str(text) if text:
            return text
    raise ValueError("must be one text, not empty: no token ids, and no other prompts")


class CompletionRequest(CompletionFields):
    """Raw text, without the model's chat template. `logprobs`: so many of each step's tokens."""

    prompt: Annotated[str, fields.Maps("prompt.text"), BeforeValidator(_one)]
    logprobs: Annotated[int | None, fields.Maps("sampling.logprobs")] = None

    def made_prompt(self) -> c.Prompt:
        special = bool(self.extension.allow_special_tokens)
        return c.Prompt(text=self.prompt, allow_special_tokens=special)


# Calls

# Of the choices of a request: the body of the answer has some 25 MB.
MAX_LOGPROBS = 2**18


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the client; `sources` has the caller's field for each path that is set."""

    prompt: c.Prompt
    options: c.Options
    timeout_s: float | None
    sources: Mapping[str, str]

    @property
    def num_choices(self) -> int:
        return int(self.options.get("return_candidates", 1))

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.options.get("logprobs", False))

    def name_of(self, path: str) -> str:
        """The caller's field for a path in the orchestrator's errors."""
        for known in sorted(self.sources, key=len, reverse=True):
            if path == known or path.startswith((f"{known}.", f"{known}[")):
                # A message's content is a list of its parts.
                name = self.sources[known] + path[len(known) :]
                return name.replace("].parts", "].content", 1)
        part, _, option = path.partition(".")
        return f"specrej.{option}" if option and part in ("sampling", "selection") else path


def call_of(
    request: Request, presets: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> Call:
    """The call for a request; `names` are other names of models.

    Raises:
        InvalidRequest: fewer candidates than choices, several choices at temperature 0, more than
            MAX_LOGPROBS values, or no rewards for a preset that stops at a score.
    """
    paths = {name: option.path for name, option in c.declared_options().items()}
    by_path = {path: name for name, path in paths.items()}
    options: dict[str, Any] = {}
    sources = request.paths()
    model, _, preset = request.model.rpartition(":")
    has_preset = bool(model) and preset in presets and request.model not in names
    chosen = presets[preset] if has_preset else fields.Preset()
    rows = [
        *((f"model: {preset}.{name}", paths.get(name), value) for name, value in chosen),
        *request.options(),
        *((f"specrej.{name}", paths.get(name), value) for name, value in request.extension),
    ]
    for field, path, value in rows:
        if path is None or value is None:
            continue
        option, source = by_path.get(path), sources.get(path, "model: ")
        if option:
            if value != options.get(option, value) and not source.startswith("model: "):
                raise InvalidRequest([Violation(field, f"is {source}: set one of them")])
            options[option] = value
        sources[path] = field
    of_preset = {name for name in options if sources.get(paths[name], "").startswith("model: ")}
    for name in of_preset & _unfit(options):
        del options[name]
    if "stop_at" in of_preset and "rewards" not in options:
        text = (
            f"{preset} ends at a verified answer: name a verifier here, with what it compares with,"
            ' as {"name": "answer", "data": {"answer": "4"}}'
        )
        raise InvalidRequest([Violation("specrej.rewards", text)])
    sources.setdefault("prompt", "prompt")
    sources.setdefault("selection.min_answers", "n")
    sources.setdefault("sampling.top_logprobs", "logprobs")
    sources.setdefault("sampling.max_tokens", "max_tokens")
    sources["prompt.allow_special_tokens"] = "specrej.allow_special_tokens"
    model = model if has_preset else request.model
    options["model"] = names.get(model, model)
    if options.get("temperature") == 0 and options.get("return_candidates", 1) > 1:
        raise InvalidRequest([Violation("n", "must be 1 at temperature 0: all would be equal")])
    _fill_in(options)
    call = Call(request.made_prompt(), options, request.extension.timeout_s, sources)
    if 0 < call.options.get("n", 0) < call.num_choices:
        text = f"must be at least n, the number of choices ({call.num_choices})"
        raise InvalidRequest([Violation(call.name_of("selection.n"), text)])
    raise_if_any(_too_large(call))
    return call


def _too_large(call: Call) -> Iterator[Violation]:
    options = call.options
    per_token = 1 + options.get("top_logprobs", 0) if call.wants_logprobs else 0
    num_tokens = call.num_choices * options.get("max_tokens", c.Sampling().max_tokens)
    if num_tokens * per_token > MAX_LOGPROBS:
        # Without their number, which may have too many digits for a text.
        most = f"the choices may have at most {MAX_LOGPROBS} log-probabilities"
        yield Violation(call.name_of("sampling.top_logprobs"), most)


def _unfit(options: Mapping[str, Any]) -> set[str]:
    """Options of a preset that are left out, because the request's own contradict them."""
    of_waves = {"waves", "confidence_cut"}
    if options.get("temperature") == 0:  # greedy candidates would all be equal
        return {"n", "min_answers", "branching", "first"} | of_waves
    num_choices = options.get("return_candidates", 1)
    unfit = {name for name in ("n", "min_answers") if 0 < options.get(name, 0) < num_choices}
    has_no_waves = options.get("branching") or options.get("n") == 0
    is_small = options.get("waves", 0) < max(num_choices, options.get("min_answers", 0))
    return unfit | of_waves if has_no_waves or is_small else unfit


def _fill_in(options: dict[str, Any]) -> None:
    """Set defaults that differ from the orchestrator's; docs/gateway.md has the reasons."""
    if options.get("temperature") != 0 and "seed" not in options:
        options["seed"] = secrets.randbelow(c.MAX_SEED)
        options.setdefault("cache", c.CacheControl.BYPASS)  # no later request has this seed
    if not isinstance(options.get("logprobs", False), bool):  # a number, of completions
        options |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    if (num_choices := options.get("return_candidates", 1)) > 1:
        options.setdefault("min_answers", num_choices)
