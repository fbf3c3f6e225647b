"""OpenAI's requests: a table of fields, types of those that are mapped, and parsing.

A new option of the orchestrator is one row of `TABLE`, and its type in a request class. Options
that OpenAI's API has no field for are in `specrej`, which is built from the client's `Options`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from specrej.contracts import (
    MAX_RETURN_CANDIDATES,
    JsonObject,
    JsonSchema,
    Options,
    Sampling,
    Selection,
    StructuredOutput,
    WeightedReward,
)
from specrej.contracts.errors import InvalidRequest, Violation, raise_if_any


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

_TOOLS = "is not supported: tools do not work here"
_AUDIO = "is not supported: there is only text"
_THOUGHT = "is not supported: no setting of the models here"
_HOSTING = "a feature of OpenAI's hosting"

TABLE: Mapping[str, Rule] = {
    "model": Maps("model"),
    "messages": Maps("prompt.messages"),
    "prompt": Maps("prompt.text"),
    "n": Maps("selection.return_candidates"),
    "best_of": Maps("selection.n"),
    "max_tokens": Maps("sampling.max_tokens"),
    "max_completion_tokens": Maps("sampling.max_tokens"),
    "temperature": Maps("sampling.temperature"),
    "top_p": Maps("sampling.top_p"),
    "stop": Maps("sampling.stop"),
    "presence_penalty": Maps("sampling.presence_penalty"),
    "frequency_penalty": Maps("sampling.frequency_penalty"),
    "logit_bias": Maps("sampling.logit_bias"),
    "seed": Maps("sampling.seed"),
    "logprobs": Maps("sampling.logprobs"),
    "top_logprobs": Maps("sampling.top_logprobs"),
    "response_format": Maps("sampling.structured_output"),
    "stream": Maps("stream"),
    "stream_options": Maps("stream"),
    "specrej": Maps("specrej"),
    "audio": Refused(_AUDIO),
    "echo": Refused("is not supported: prompts are not repeated", (False,)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "functions": Refused(_TOOLS, ([],)),
    "modalities": Refused(_AUDIO, (["text"],)),
    "moderation": Refused("is not supported: answers are not moderated"),
    "reasoning_effort": Refused(_THOUGHT, ("none",)),
    "store": Refused("is not supported: conversations are not stored", (False,)),
    "suffix": Refused("is not supported: text is only continued", ("",)),
    "tool_choice": Refused(_TOOLS, ("none", "auto")),
    "tools": Refused(_TOOLS, ([],)),
    "verbosity": Refused(_THOUGHT, ("medium",)),
    "web_search_options": Refused("is not supported: there is no search"),
    "metadata": Ignored("it labels stored conversations"),
    "parallel_tool_calls": Ignored("there are no tools"),
    "prediction": Ignored("it changes the speed only"),
    "prompt_cache_key": Ignored("equal beginnings are shared without it"),
    "prompt_cache_options": Ignored(_HOSTING),
    "prompt_cache_retention": Ignored(_HOSTING),
    "safety_identifier": Ignored(_HOSTING),
    "service_tier": Ignored(_HOSTING),
    "user": Ignored("the token identifies the tenant"),
}

# The same for the fields of a message, of its parts, and of stream_options.
MESSAGE_TABLE: Mapping[str, Rule] = {
    "tool_calls": Refused(_TOOLS, ([],)),
    "tool_call_id": Refused(_TOOLS),
    "function_call": Refused(_TOOLS),
    "audio": Refused(_AUDIO),
    "name": Ignored("chat templates have no names"),
    "refusal": Ignored("part of an answer"),
    "parsed": Ignored("part of an answer"),
    "annotations": Ignored("part of an answer"),
    "reasoning_content": Ignored("part of an answer"),
}
PART_TABLE: Mapping[str, Rule] = {
    "type": Maps("prompt.messages.content"),
    "text": Maps("prompt.messages.content"),
    "prompt_cache_breakpoint": Ignored(_HOSTING),
}
STREAM_TABLE: Mapping[str, Rule] = {"include_obfuscation": Ignored("chunks are not padded")}

# Options that are fields of OpenAI's and of `specrej`, which has more values; not both at once.
_BOTH = {"selection.n": "best_of", "sampling.structured_output": "response_format"}

# Tags of the two forms of rewards, and pydantic's mark of a wrong key: not parts of a field's path.
_BY_NAME, _LISTED, _KEY = "(by name)", "(listed)", "[key]"

# Unknown fields are kept, for the tables.
_JSON = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = _JSON

    include_usage: bool | None = None


def path_of(option: str) -> str:
    """The path of a client's option in the orchestrator's errors: "sampling.top_p"."""
    for contract, part in ((Sampling, "sampling."), (Selection, "selection.")):
        if any(item.name == option for item in fields(contract)):
            return part + option
    return {"cache": "cache_control"}.get(option, option)


def _options_of(part: str = "") -> dict[str, Any]:
    """Types of the options without a field of OpenAI, all with default None."""
    own = {rule.path for rule in TABLE.values() if isinstance(rule, Maps)} - _BOTH.keys()
    hints = get_type_hints(Options) | {
        "structured_output": Annotated[StructuredOutput, Field(discriminator="kind")],
        "rewards": Annotated[
            Annotated[dict[str, float], Tag(_BY_NAME)]
            | Annotated[tuple[WeightedReward, ...], Tag(_LISTED)],
            Discriminator(lambda given: _BY_NAME if isinstance(given, Mapping) else _LISTED),
        ],
    }
    paths = {name: path_of(name) for name in hints}
    chosen = [n for n, path in paths.items() if path not in own and path.startswith(part)]
    return {name: (hints[name] | None, None) for name in chosen}


class _Extension(BaseModel):
    """What OpenAI's API has no field for."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    timeout_s: Annotated[float | None, Field(gt=0)] = None
    events: Literal["rounds", "reasoning", "all"] | None = None
    allow_special_tokens: bool = False


Extension: type[_Extension] = create_model("Extension", __base__=_Extension, **_options_of())

# What a preset may carry. Its source is a setting: texts of JSON become enums and tuples.
Preset: type[BaseModel] = create_model(
    "Preset",
    __config__=ConfigDict(extra="forbid", allow_inf_nan=False),
    **_options_of("selection."),
)


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Request(BaseModel):
    """The fields that both endpoints have."""

    model_config = _JSON

    model: Annotated[str, Field(min_length=1)]
    n: Annotated[int | None, Field(ge=1, le=MAX_RETURN_CANDIDATES)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    specrej: Extension = Field(default_factory=Extension)


def _joined(value: object) -> object:
    """The text of a message: a string, or the parts of one."""
    if not isinstance(value, list):
        return "" if value is None else value
    texts = [p.get("text") for p in value if isinstance(p, dict) and p.get("type") == "text"]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text, or parts of type text: no images, audio or files")
    if unknown := sorted({name for part in value for name in part} - PART_TABLE.keys()):
        raise ValueError(f"its parts have unknown fields: {', '.join(unknown)}")
    return "".join(map(str, texts))


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise ValueError(f"{value} {_TOOLS}")
    return "system" if value == "developer" else value


class ChatMessage(BaseModel):
    model_config = _JSON

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_joined)] = ""


class SchemaFormat(BaseModel):
    """A JSON schema with its name; answers always conform, also where `strict` is false."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None

    @property
    def text(self) -> str:
        """The schema without the white space and the escapes that would lengthen it."""
        return json.dumps(self.schema_, ensure_ascii=False, separators=(",", ":"))


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

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
            return JsonSchema(self.json_schema.text)
        return JsonObject() if self.type == "json_object" else None


class ChatRequest(Request):
    """A conversation."""

    response_format: ResponseFormat | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def _one(value: object) -> object:
    if isinstance(value, list) and not (len(value) == 1 and isinstance(value[0], str)):
        raise ValueError("must be one text: neither token ids nor several prompts")
    return value[0] if isinstance(value, list) else value


class CompletionRequest(Request):
    """Raw text, without the model's chat template. `logprobs`: so many of each step's tokens."""

    prompt: Annotated[str, BeforeValidator(_one), Field(min_length=1)]
    logprobs: int | None = None


R = TypeVar("R", bound=Request)

_MAX_ERRORS = 1000  # of a request: more are not listed, and no objects are made for them


def parsed(model: type[R], body: bytes) -> R:
    """The request in a JSON body.

    Raises:
        InvalidRequest: every field that is unknown, refused or of a wrong type.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            text = f"has more than {_MAX_ERRORS} invalid fields"
            raise InvalidRequest([Violation("body", text)]) from None
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        texts = (item["msg"].removeprefix("Value error, ") for item in problems)
        raise_if_any(map(Violation, (_name(item["loc"]) for item in problems), texts))
        raise
    raise_if_any(_violations(request))
    return request


def _name(location: tuple[int | str, ...]) -> str:
    """The path of a field: that of ("messages", 0, "content") is "messages[0].content"."""
    parts = [part for part in location if part not in (_BY_NAME, _LISTED, _KEY)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
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
    for path, name in _BOTH.items():
        option = path.rpartition(".")[2]
        if None not in (getattr(request, name, None), getattr(request.specrej, option, None)):
            yield Violation(f"specrej.{option}", f"is {name}: set one of them")


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
