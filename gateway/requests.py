"""Requests of OpenAI's completions as calls of specrej's client.

A field of OpenAI's API is one line of a request class, with its type and its rule. Options without
a field there are in `specrej`, which is built from the contract's options.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from gateway import images
from gateway.answers import Answer, CompletionAnswer
from specrej.client.options import json_text, value_of
from specrej.contracts import (
    MAX_SEED,
    Branching,
    CacheControl,
    ConfidenceCut,
    Grammar,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    Options,
    Prompt,
    Regex,
    Sampling,
    Schedule,
    StructuredOutput,
    TextPart,
    Tool,
    ToolCall,
    Vote,
    WeightedReward,
    declared_options,
)
from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any

JSON = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Maps:
    """The field sets the orchestrator's `path`; errors about that path name the field."""

    path: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """The field has no effect."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Values other than null and the `harmless` ones, which change nothing, are an error."""

    why: str
    harmless: tuple[Any, ...] = ()


Rule = Maps | Ignored | Refused

_TOOLS = "is not supported: raw text has no tools"
_FUNCTIONS = "is not supported: use tools"
_AUDIO = "is not supported: there is only text"
NO_SETTING = "no setting of the models here"
SHARED = "equal beginnings are shared without it"
HOSTING = "a feature of hosting"
OF_OPENAI = {
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), HOSTING),
    **dict.fromkeys(("safety_identifier", "service_tier"), HOSTING),
    **dict.fromkeys(("metadata", "store"), "answers are not stored"),
    "prompt_cache_key": SHARED,
    "user": "the token identifies the tenant",
}
OF_ANSWERS = "part of an answer"
_OUTPUT = Maps("sampling.structured_output")

# Options that only a field of OpenAI's sets. `specrej` has all others.
_OWN = {
    *("model", "return_candidates", "max_tokens", "temperature", "top_p", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
}
# Tags of the forms of an option, and pydantic's mark of a wrong key: not parts of a field's path.
_FORMS: Mapping[type, str] = {str: "(text)", dict: "(by name)"}
_OTHER, _KEY = "(other)", "[key]"


def rules_of(model: type[Checked]) -> dict[str, Rule]:
    """The rule of each field that has one."""
    rules = {name: _rule_of(info) for name, info in model.model_fields.items()}
    ignored = {name: Ignored(why) for name, why in model.ignores.items()}
    return ignored | {name: rule for name, rule in rules.items() if rule}


def _rule_of(field: FieldInfo) -> Rule | None:
    return next((item for item in field.metadata if isinstance(item, Rule)), None)


def _note(info: ValidationInfo, names: Iterable[str], *, is_unknown: bool) -> None:
    """Note fields without effect; the context is `ignored` of `parsed`."""
    ignored = {} if info.context is None else info.context
    for name in names:
        ignored[name] = is_unknown or ignored.get(name, False)


class Checked(BaseModel):
    """Fields with rules, and options with the ranges of the contract.

    All are checked while a request is parsed, so that its errors are reported together.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    ignores: ClassVar[Mapping[str, str]] = {}  # fields of the API without effect, and why

    @model_validator(mode="after")
    def _note_extra(self, info: ValidationInfo) -> Self:
        extra = self.model_extra or {}
        _note(info, extra.keys() - self.ignores, is_unknown=True)
        known = (name for name in self.ignores if extra.get(name) is not None)
        _note(info, known, is_unknown=False)
        return self

    @field_validator("*")
    @classmethod
    def _follow_the_rule(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        rule = _rule_of(cls.model_fields[name])
        if isinstance(rule, Refused) and value is not None and value not in rule.harmless:
            raise ValueError(rule.why)
        path = rule.path if isinstance(rule, Maps) else name
        option = declared_options().get(path.rpartition(".")[2])
        accepted = option and option.accepted
        if accepted and isinstance(value, int | float) and not accepted.contains(value):
            raise ValueError(f"must be {accepted.text}, is {value}")
        return value


def needs(by: str, **fields: Sequence[str]) -> Any:
    """A validator: the fields that a value of each kind must have; `by` names its kind."""

    def check(value: Any) -> Any:
        for name in fields.get(getattr(value, by), ()):
            if name not in value.model_fields_set:
                raise ValueError(f"must have {name}")
        return value

    return model_validator(mode="after")(check)


class StreamOptions(Checked):
    include_usage: bool | None = None

    ignores: ClassVar = {"include_obfuscation": "chunks are not padded"}


def _by_form(name: str, forms: Mapping[str, Any]) -> Any:
    """The type of an option by the form of its value; a text is that of its flag."""

    def parse(text: str) -> Any:
        value = value_of(name, text)
        return (value,) if isinstance(value, WeightedReward) else value

    forms = {_FORMS[str]: Annotated[str, AfterValidator(parse)], **forms}
    union = reduce(or_, (Annotated[kind, Tag(tag)] for tag, kind in forms.items()))

    def form_of(given: object) -> str:
        form = _FORMS.get(type(given), _OTHER)
        return form if form in forms else _OTHER

    return Annotated[union, Discriminator(form_of)]


def _with_data(reward: object) -> object:
    """A reward's fields, its data as the text of JSON."""
    if isinstance(reward, dict) and reward.get("data") is not None:
        return {**reward, "data": json_text(reward["data"])}
    return reward


def _options_of(part: str = "") -> dict[str, Any]:
    """Types of the options without a field of OpenAI, all with default None."""
    output = Annotated[StructuredOutput, Field(discriminator="kind")]
    reward = Annotated[WeightedReward, BeforeValidator(_with_data)]
    listed = tuple[reward, ...]
    types: dict[str, Any] = {
        "n": _by_form("n", {_OTHER: int}),
        "schedule": _by_form("schedule", {_OTHER: Schedule}),
        "branching": _by_form("branching", {_OTHER: Branching}),
        "vote": _by_form("vote", {_OTHER: Vote}),
        "confidence_cut": _by_form("confidence_cut", {_OTHER: ConfidenceCut}),
        "structured_output": _by_form("structured_output", {_OTHER: output}),
        "rewards": _by_form("rewards", {_FORMS[dict]: dict[str, float], _OTHER: listed}),
    }
    return {
        name: (types.get(name, option.type) | None, None)
        for name, option in declared_options().items()
        if name not in _OWN and option.path.startswith(part)
    }


class _Extension(Checked):
    """What OpenAI's API has no field for."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: Annotated[float | None, Field(gt=0)] = None
    events: Literal["rounds", "reasoning", "all", "none"] | None = None
    allow_special_tokens: bool | None = None


Extension: type[_Extension] = create_model("Extension", __base__=_Extension, **_options_of())


class _Preset(BaseModel):
    """What a preset may carry. Its source is a setting: texts of JSON become enums and tuples."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    events: Literal["rounds", "reasoning", "none"] | None = None


Preset: type[_Preset] = create_model("Preset", __base__=_Preset, **_options_of("selection."))


def as_texts(value: object) -> object:
    """A list of one text, if it is a text."""
    return [value] if isinstance(value, str) else value


# vLLM's number for an absent value.
_UNLESS_UNSET = BeforeValidator(lambda value: None if value == -1 else value)


_MaxTokens = Annotated[int | None, Maps("sampling.max_tokens"), Field(ge=1), _UNLESS_UNSET]


def _by_kind(given: Mapping[str, Any] | None) -> StructuredOutput | None:
    """vLLM's structured outputs."""
    if given is None:
        return None
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    match [(kind, given[kind]) for kind in kinds if given.get(kind) not in (None, False)]:
        case [("json", str(schema))]:
            return JsonSchema(schema)
        case [("json", dict(schema))]:
            return _schema(schema)
        case [("regex", str(pattern))]:
            return Regex(pattern)
        case [("choice", [_, *_] as texts)] if all(isinstance(text, str) for text in texts):
            return Regex("|".join(map(re.escape, texts)))
        case [("grammar", str(lark))]:
            return Grammar(lark)
        case [("json_object", True)]:
            return JsonObject()
    raise ValueError("must have a value of one kind: json, regex, choice, grammar or json_object")


def _guided(kind: str) -> Any:
    """A structured output of that kind."""
    made = AfterValidator(lambda given: None if given is None else _by_kind({kind: given}))
    return Annotated[Any, _OUTPUT, made]


def _schema(schema: dict[str, Any]) -> JsonSchema:
    """A schema without the white space and the escapes that would lengthen it."""
    return JsonSchema(compact(schema))


def compact(value: Any) -> str:
    """JSON without white space and escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Request(Checked):
    """The fields that all endpoints have."""

    model: Annotated[str, Maps("model"), Field(min_length=1)]
    temperature: Annotated[float | None, Maps("sampling.temperature")] = None
    top_p: Annotated[float | None, Maps("sampling.top_p")] = None
    stream: Annotated[bool | None, Maps("stream")] = None
    specrej: Annotated[Extension | None, Maps("specrej")] = None

    @property
    def num_prompts(self) -> int:
        """Prompts to answer, each by a call of its own."""
        return 1

    @property
    def extension(self) -> Any:
        """`specrej`, or an empty one."""
        return self.specrej or Extension()

    def options(self) -> list[tuple[str, str, Any]]:
        """The fields that set paths of the orchestrator: name, path, value."""
        rules = rules_of(type(self)).items()
        return [(f, r.path, getattr(self, f)) for f, r in rules if isinstance(r, Maps)]

    def turns(self) -> list[tuple[str, Message]]:
        """The conversation; of each turn also the caller's field."""
        return []

    def prompt_of(self, index: int) -> Prompt:
        """Prompt `index`.

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

    n: Annotated[int | None, Maps("selection.return_candidates")] = None
    best_of: Annotated[int | None, Maps("selection.n"), Field(ge=1)] = None
    max_tokens: _MaxTokens = None
    stop: Annotated[list[str] | None, Maps("sampling.stop"), BeforeValidator(as_texts)] = None
    presence_penalty: Annotated[float | None, Maps("sampling.presence_penalty")] = None
    frequency_penalty: Annotated[float | None, Maps("sampling.frequency_penalty")] = None
    logit_bias: Annotated[dict[int, float] | None, Maps("sampling.logit_bias")] = None
    seed: Annotated[int | None, Maps("sampling.seed"), _UNLESS_UNSET] = None
    top_k: Annotated[int | None, Maps("sampling.top_k"), _UNLESS_UNSET] = None
    min_p: Annotated[float | None, Maps("sampling.min_p")] = None
    repetition_penalty: Annotated[float | None, Maps("sampling.repetition_penalty")] = None
    min_tokens: Annotated[int | None, Maps("sampling.min_tokens")] = None
    ignore_eos: Annotated[bool | None, Maps("sampling.ignore_eos")] = None
    stop_token_ids: Annotated[list[int] | None, Maps("sampling.stop_token_ids")] = None
    bad_words: Annotated[list[str] | None, Maps("sampling.bad_words")] = None
    structured_outputs: Annotated[dict[str, Any] | None, _OUTPUT, AfterValidator(_by_kind)] = None
    guided_json: _guided("json") = None  # type: ignore[valid-type]
    guided_regex: _guided("regex") = None  # type: ignore[valid-type]
    guided_choice: _guided("choice") = None  # type: ignore[valid-type]
    guided_grammar: _guided("grammar") = None  # type: ignore[valid-type]
    stream_options: Annotated[StreamOptions | None, Maps("stream")] = None

    audio: Annotated[Any, Refused(_AUDIO)] = None
    echo: Annotated[Any, Refused("is not supported: prompts are not repeated", (False,))] = None
    function_call: Annotated[Any, Refused(_FUNCTIONS, ("none", "auto"))] = None
    functions: Annotated[Any, Refused(_FUNCTIONS, ([],))] = None
    modalities: Annotated[Any, Refused(_AUDIO, (["text"],))] = None
    moderation: Annotated[Any, Refused("is not supported: answers are not moderated")] = None
    suffix: Annotated[Any, Refused("is not supported: text is only continued", ("",))] = None
    tool_choice: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None
    tools: Annotated[Any, Refused(_TOOLS, ([],))] = None
    web_search_options: Annotated[Any, Refused("is not supported: there is no search")] = None

    ignores: ClassVar = {
        **OF_OPENAI,
        "chat_template_kwargs": "raw text has no template",
        "parallel_tool_calls": "raw text has no tools",
        "prediction": "it changes the speed only",
        "reasoning_effort": NO_SETTING,
        "verbosity": NO_SETTING,
    }

    def paths(self) -> dict[str, str]:
        """As of the base class, with those of biases."""
        items = enumerate(self.logit_bias or ())
        biases = {f"sampling.logit_bias[{n}]": f"logit_bias.{token_id}" for n, token_id in items}
        return super().paths() | biases

    def answer(self, call: Call) -> Answer:
        """What makes the reply."""
        return CompletionAnswer(
            self.model,
            call.num_choices,
            is_chat=isinstance(self, ChatRequest),
            logprobs=call.wants_logprobs,
            has_tools=bool(call.prompt.tools),
            shows_usage=bool(self.stream_options and self.stream_options.include_usage),
            num_prompts=self.num_prompts,
            stop_at=call.options.get("stop_at"),
        )


# Of texts and images; others are ignored. Citations and log-probabilities are those of answers.
PART_FIELDS = {
    *("type", "text", "image_url", "source", "detail", "prompt_cache_breakpoint", "cache_control"),
    *("citations", "annotations", "logprobs"),
}
_TEXTS = ("text", "input_text", "output_text", "reasoning_text")


def _parts(value: object, info: ValidationInfo) -> object:
    """The parts of a message's content, a text or a list, in the forms of all APIs."""
    if isinstance(value, str):
        return (TextPart(value),)
    parts: list[TextPart | Image] = []
    given: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for part in given:
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXTS:
                parts.append(TextPart(text))
            case {"type": "image_url" | "input_image", "image_url": url}:
                parts.append(images.of_url(url))
            case {"type": "image", "source": source}:
                parts.append(images.of_source(source))
            case _:
                raise ValueError("must be a text, or parts that are texts and images as data")
    _note(info, {name for part in given for name in part} - PART_FIELDS, is_unknown=True)
    return tuple(parts)


Content = Annotated[tuple[Any, ...], BeforeValidator(_parts)]


def message_of(
    role: str,
    parts: Sequence[TextPart | Image],
    calls: Iterable[ToolCall] = (),
    call_id: str = "",
) -> Message:
    """A turn. Texts are joined; with images, the parts stay."""
    if any(isinstance(part, Image) for part in parts):
        return Message(role, "", tuple(calls), call_id, tuple(parts))
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return Message(role, text, tuple(calls), call_id)


def role_of(value: object) -> object:
    """The role; developer is system."""
    if value == "function":
        raise ValueError(f"function {_FUNCTIONS}, and the role tool")
    return "system" if value == "developer" else value


class CalledFunction(Checked):
    name: str
    arguments: Annotated[str, BeforeValidator(lambda value: value or "{}")]

    ignores: ClassVar = {"parsed_arguments": OF_ANSWERS}


class ChatCall(Checked):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    ignores: ClassVar = {"index": OF_ANSWERS}


class ChatMessage(Checked):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(role_of)]
    content: Content = ()
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str | None = None

    function_call: Annotated[Any, Refused(_FUNCTIONS)] = None
    audio: Annotated[Any, Refused(_AUDIO)] = None

    ignores: ClassVar = {
        "name": "chat templates have no names",
        **dict.fromkeys(("refusal", "parsed", "annotations", "reasoning_content"), OF_ANSWERS),
    }

    @property
    def turn(self) -> Message:
        """The turn of the conversation."""
        calls = (
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        return message_of(self.role, self.content, calls, self.tool_call_id or "")


class Function(Checked):
    """A tool's name, and the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    ignores: ClassVar = {"strict": "all arguments conform"}

    @property
    def tool(self) -> Tool:
        schema = "" if self.parameters is None else compact(self.parameters)
        return Tool(self.name, self.description or "", schema)


class ChatTool(Checked):
    type: Literal["function"]
    function: Function


class Choice(NamedTuple):
    """Whether tools are called, and which."""

    kind: Literal["none", "auto", "required"] = "auto"
    name: str = ""


def _choice(value: Any) -> Choice | None:
    """The forms of /v1/chat/completions and of /v1/responses."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return Choice(value)
        case {"type": "function", "function": {"name": str(name), **others}, **more}:
            if not others and not more:
                return Choice("required", name)
        case {"type": "function", "name": str(name), **others} if not others:
            return Choice("required", name)
    raise ValueError("must be none, auto, required, or a function by its name")


ToolChoice = Annotated[Any, Maps("prompt.tool_choice"), AfterValidator(_choice)]


def with_tools(
    prompt: Prompt, tools: Iterable[Tool], choice: Choice | None, parallel: bool | None
) -> Prompt:
    """The prompt with tools. Without any, the choice "none" is what happens anyway."""
    choice, listed = choice or Choice(), tuple(tools)
    if choice.kind == "none" and not listed:
        choice = Choice()
    return replace(
        prompt,
        tools=listed,
        tool_choice=choice.kind,
        tool_name=choice.name,
        parallel_tool_calls=parallel is not False,
    )


def effort_of(value: str | None, info: ValidationInfo) -> bool | None:
    """False if the model does not reason; models here have no other efforts."""
    if value not in (None, "none"):
        _note(info, (info.field_name or "",), is_unknown=False)
    return False if value == "none" else None


class SchemaFormat(Checked):
    """A JSON schema with its name; answers always conform, also where `strict` is false."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Checked):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema if its type is json_schema, else not")
        return self

    @property
    def output(self) -> StructuredOutput | None:
        if self.json_schema:
            return _schema(self.json_schema.schema_)
        return JsonObject() if self.type == "json_object" else None


def _nested(value: object) -> object:
    """The format of the newer APIs as that of chats."""
    match value:
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": schema}
    return value


class OutputConfig(Checked):
    format: Annotated[ResponseFormat | None, BeforeValidator(_nested)] = None

    ignores: ClassVar = dict.fromkeys(("effort", "verbosity"), NO_SETTING)

    @property
    def output(self) -> StructuredOutput | None:
        return self.format.output if self.format else None


_output = AfterValidator(lambda given: given and given.output)
Output = Annotated[OutputConfig | None, _OUTPUT, _output]


class TemplateVariables(Checked):
    """Of chat templates that know whether the model reasons; others have no effect."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def flag(self) -> bool | None:
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class ChatRequest(CompletionFields):
    """A conversation."""

    response_format: Annotated[ResponseFormat | None, _OUTPUT, _output] = None
    messages: Annotated[list[ChatMessage], Maps("prompt.messages"), Field(min_length=1)]
    tools: Annotated[list[ChatTool] | None, Maps("prompt.tools")] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, Maps("prompt.parallel_tool_calls")] = None
    max_completion_tokens: _MaxTokens = None
    max_thinking_tokens: Annotated[int | None, Maps("sampling.max_thinking_tokens")] = None
    chat_template_kwargs: Annotated[TemplateVariables | None, Maps("prompt.thinking")] = None
    reasoning_effort: Annotated[str | None, Maps("prompt.thinking"), AfterValidator(effort_of)] = (
        None
    )
    continue_final_message: Annotated[bool | None, Maps("prompt.continue_final")] = None
    add_generation_prompt: Annotated[bool | None, Maps("prompt.continue_final")] = None
    logprobs: Annotated[bool | None, Maps("sampling.logprobs")] = None
    top_logprobs: Annotated[int | None, Maps("sampling.top_logprobs")] = None

    def turns(self) -> list[tuple[str, Message]]:
        """The conversation."""
        return [(f"messages[{n}]", message.turn) for n, message in enumerate(self.messages)]

    def prompt_of(self, index: int) -> Prompt:
        """The conversation."""
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is False and not continues:
            text = "false needs continue_final_message: true"
            raise InvalidRequest([Violation("add_generation_prompt", text)])
        flag = self.chat_template_kwargs.flag if self.chat_template_kwargs else None
        prompt = Prompt(
            messages=tuple(turn for _, turn in self.turns()),
            allow_special_tokens=bool(self.extension.allow_special_tokens),
            continue_final=continues,
            thinking=flag if self.reasoning_effort is None else False,
        )
        tools = [tool.function.tool for tool in self.tools or ()]
        return with_tools(prompt, tools, self.tool_choice, self.parallel_tool_calls)

    def paths(self) -> dict[str, str]:
        """As of the base class, with those of tools."""
        tools = range(len(self.tools or ()))
        named = {f"prompt.tools[{n}]": f"tools[{n}].function" for n in tools}
        return {**super().paths(), **named, "prompt": "messages"}


_PROMPTS = Field(min_length=1, max_length=16)


def _prompts(value: object) -> object:
    texts = as_texts(value)
    if isinstance(texts, list) and not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, not empty: no token ids")
    return texts


class CompletionRequest(CompletionFields):
    """Raw texts, without the model's chat template. `logprobs`: so many of each step's tokens."""

    prompt: Annotated[list[str], Maps("prompt.text"), BeforeValidator(_prompts), _PROMPTS]
    logprobs: Annotated[int | None, Maps("sampling.logprobs")] = None

    @property
    def num_prompts(self) -> int:
        """Prompts to answer, each by a call of its own."""
        return len(self.prompt)

    def prompt_of(self, index: int) -> Prompt:
        """The text."""
        special = bool(self.extension.allow_special_tokens)
        return Prompt(text=self.prompt[index], allow_special_tokens=special)


R = TypeVar("R", bound=Checked)

_MAX_ERRORS = 1000  # of a request: more are not listed, and no objects are made for them


def parsed(
    model: type[R], body: bytes, ignored: dict[str, bool] | None = None, *, strict: bool = False
) -> R:
    """The request in a JSON body; `strict` refuses unknown fields.

    `ignored` receives the names of those without effect, and whether they are unknown.

    Raises:
        InvalidRequest: every field that is refused, of a wrong type or out of range.
    """
    ignored = {} if ignored is None else ignored
    try:
        request = model.model_validate_json(body, context=ignored)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            text = f"has more than {_MAX_ERRORS} invalid fields"
            raise InvalidRequest([Violation("body", text)]) from None
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        texts = (item["msg"].removeprefix("Value error, ") for item in problems)
        raise_if_any(map(Violation, (_name(item["loc"]) for item in problems), texts))
        raise
    unknown = sorted(name for name, is_unknown in ignored.items() if strict and is_unknown)
    raise_if_any(Violation(name, "is unknown") for name in unknown)
    if isinstance(request, CompletionFields) and request.stream_options and not request.stream:
        raise InvalidRequest([Violation("stream_options", "needs stream: true")])
    return request


def _name(location: tuple[int | str, ...]) -> str:
    """The path of a field: that of ("messages", 0, "content") is "messages[0].content"."""
    parts = [part for part in location if part not in (*_FORMS.values(), _OTHER, _KEY)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.lstrip(".") or "body"


# Calls

# Of the choices of a request: the body of the answer has some 25 MB.
MAX_LOGPROBS = 2**18


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the client; `sources` has the caller's field for each path that is set."""

    prompt: Prompt
    options: Options
    timeout_s: float | None
    sources: Mapping[str, str]
    events: str = ""  # what a stream shows of rounds

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
                return self.sources[known] + path[len(known) :]
        part, _, option = path.partition(".")
        return f"specrej.{option}" if option and part in ("sampling", "selection") else path


def call_of(
    request: Request,
    presets: Mapping[str, Any],
    names: Mapping[str, str] = MappingProxyType({}),
    index: int = 0,
) -> Call:
    """The call for prompt `index` of a request; `names` are other names of models.

    Raises:
        InvalidRequest: fewer candidates than choices, several choices at temperature 0, more than
            MAX_LOGPROBS values, or no rewards for a preset that stops at a score.
    """
    paths = {name: option.path for name, option in declared_options().items()}
    by_path = {path: name for name, path in paths.items()}
    options: dict[str, Any] = {}
    sources = request.paths()
    model, _, preset = request.model.rpartition(":")
    has_preset = bool(model) and preset in presets and request.model not in names
    chosen = presets[preset] if has_preset else Preset()
    fields = [
        *((f"model: {preset}.{name}", paths.get(name), value) for name, value in chosen),
        *request.options(),
        *((f"specrej.{name}", paths.get(name), value) for name, value in request.extension),
    ]
    for field, path, value in fields:
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
    shown = request.extension.events or (isinstance(request, ChatRequest) and chosen.events)
    events = "" if shown == "none" else shown or ""
    if events and not isinstance(request, CompletionFields):
        raise InvalidRequest([Violation("specrej.events", "is for streams of completions")])
    call = Call(request.prompt_of(index), options, request.extension.timeout_s, sources, events)
    if 0 < call.options.get("n", 0) < call.num_choices:
        text = f"must be at least n, the number of choices ({call.num_choices})"
        raise InvalidRequest([Violation(call.name_of("selection.n"), text)])
    raise_if_any(_too_large(call, request.num_prompts))
    return call


def _too_large(call: Call, num_prompts: int) -> Iterator[Violation]:
    options = call.options
    per_token = 1 + options.get("top_logprobs", 0) if call.wants_logprobs else 0
    num_choices = num_prompts * call.num_choices
    num_tokens = num_choices * options.get("max_tokens", Sampling().max_tokens)
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
        options["seed"] = secrets.randbelow(MAX_SEED)
        options.setdefault("cache", CacheControl.BYPASS)  # no later request has this seed
    if not isinstance(options.get("logprobs", False), bool):  # a number, of completions
        options |= {"logprobs": True, "top_logprobs": options["logprobs"]}
    if (num_choices := options.get("return_candidates", 1)) > 1:
        options.setdefault("min_answers", num_choices)
