"""Fields of requests: their rules, options of the contract, and what several APIs have alike.

A field of an API is one line of a class, with its type and its rule, or a name in `ignores`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from specrej import contracts as c
from specrej.client.options import json_text
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

FUNCTIONS = "is not supported: use tools"
NO_SETTING = "no setting of the models here"
SHARED = "equal beginnings are shared without it"
HOSTING = "a feature of hosting"
OF_ANSWERS = "part of an answer"
OF_OPENAI = {
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), HOSTING),
    **dict.fromkeys(("safety_identifier", "service_tier"), HOSTING),
    **dict.fromkeys(("metadata", "store"), "answers are not stored"),
    "prompt_cache_key": SHARED,
    "user": "the token identifies the tenant",
}
OUTPUT = Maps("sampling.structured_output")

# Options that only a field of OpenAI's sets. `specrej` has all others.
_OWN = {
    *("model", "return_candidates", "max_tokens", "temperature", "top_p", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
}
# Tags of the forms of rewards, and pydantic's mark of a wrong key: not parts of a field's path.
_BY_NAME, _LISTED, _KEY = "(by name)", "(listed)", "[key]"


def rules_of(model: type[Checked]) -> dict[str, Rule]:
    """The rule of each field that has one."""
    rules = {name: _rule_of(info) for name, info in model.model_fields.items()}
    ignored = {name: Ignored(why) for name, why in model.ignores.items()}
    return ignored | {name: rule for name, rule in rules.items() if rule}


def _rule_of(field: FieldInfo) -> Rule | None:
    return next((item for item in field.metadata if isinstance(item, Rule)), None)


def _note(info: ValidationInfo, names: Iterable[str]) -> None:
    """Note fields without effect; the context is `ignored` of `parsed`."""
    if info.context is not None:
        info.context.update(names)


class Checked(BaseModel):
    """Fields with rules, and options with the ranges of the contract.

    All are checked while a request is parsed, so that its errors are reported together.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    ignores: ClassVar[Mapping[str, str]] = {}  # fields of the API without effect, and why

    @model_validator(mode="after")
    def _note_extra(self, info: ValidationInfo) -> Self:
        extra = (self.model_extra or {}).items()
        _note(info, (n for n, given in extra if n not in self.ignores or given is not None))
        return self

    @field_validator("*")
    @classmethod
    def _follow_the_rule(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        rule = _rule_of(cls.model_fields[name])
        if isinstance(rule, Refused) and value is not None and value not in rule.harmless:
            raise ValueError(rule.why)
        path = rule.path if isinstance(rule, Maps) else name
        option = c.declared_options().get(path.rpartition(".")[2])
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


def _with_data(reward: object) -> object:
    """A reward's fields, its data as the text of JSON."""
    if isinstance(reward, dict) and reward.get("data") is not None:
        return {**reward, "data": json_text(reward["data"])}
    return reward


def _options_of(part: str = "") -> dict[str, Any]:
    """Types of the options without a field of OpenAI, all with default None."""
    reward = Annotated[c.WeightedReward, BeforeValidator(_with_data)]
    rewards = (
        Annotated[dict[str, float], Tag(_BY_NAME)] | Annotated[tuple[reward, ...], Tag(_LISTED)]
    )
    form_of = Discriminator(lambda given: _BY_NAME if isinstance(given, dict) else _LISTED)
    types: dict[str, Any] = {
        "structured_output": Annotated[c.StructuredOutput, Field(discriminator="kind")],
        "rewards": Annotated[rewards, form_of],
    }
    return {
        name: (types.get(name, option.type) | None, None)
        for name, option in c.declared_options().items()
        if name not in _OWN and option.path.startswith(part)
    }


class _Extension(Checked):
    """What OpenAI's API has no field for."""

    model_config = ConfigDict(extra="forbid")

    timeout_s: Annotated[float | None, Field(gt=0)] = None
    allow_special_tokens: bool | None = None


Extension: type[_Extension] = create_model("Extension", __base__=_Extension, **_options_of())


# What a preset may carry. Its source is a setting: texts of JSON become enums and tuples.
Preset: type[BaseModel] = create_model(
    "Preset",
    __config__=ConfigDict(extra="forbid", allow_inf_nan=False),
    **_options_of("selection."),
)


# Of numbers that JSON has: the parser reads others, too.
Object = Annotated[dict[str, Any], AfterValidator(lambda given: json_text(given) and given)]


def as_texts(value: object) -> object:
    """A list of one text, if it is a text."""
    return [value] if isinstance(value, str) else value


def schema_of(schema: dict[str, Any]) -> c.JsonSchema:
    """A schema without the white space and the escapes that would lengthen it."""
    return c.JsonSchema(json_text(schema))


# Of texts and images; others are ignored. Citations and log-probabilities are those of answers.
PART_FIELDS = {
    *("type", "text", "image_url", "source", "detail", "prompt_cache_breakpoint", "cache_control"),
    *("citations", "annotations", "logprobs"),
}
_TEXTS = ("text", "input_text", "output_text", "reasoning_text")


def _parts(value: object, info: ValidationInfo) -> object:
    """The parts of a message's content, a text or a list, in the forms of all APIs."""
    if isinstance(value, str):
        return (c.TextPart(value),)
    parts: list[c.TextPart | c.Image] = []
    given: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for part in given:
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXTS:
                parts.append(c.TextPart(text))
            case {"type": "image_url" | "input_image", "image_url": url}:
                parts.append(images.of_url(url))
            case {"type": "image", "source": source}:
                parts.append(images.of_source(source))
            case _:
                raise ValueError("must be a text, or parts that are texts and images as data")
    _note(info, {name for part in given for name in part} - PART_FIELDS)
    return tuple(parts)


Content = Annotated[tuple[Any, ...], BeforeValidator(_parts)]


def message_of(
    role: str,
    parts: Sequence[c.TextPart | c.Image],
    calls: Iterable[c.ToolCall] = (),
    call_id: str = "",
) -> c.Message:
    """A turn. Texts are joined; with images, the parts stay."""
    if any(isinstance(part, c.Image) for part in parts):
        return c.Message(role, "", tuple(calls), call_id, tuple(parts))
    text = "".join(part.text for part in parts if isinstance(part, c.TextPart))
    return c.Message(role, text, tuple(calls), call_id)


def role_of(value: object) -> object:
    """The role; developer is system."""
    if value == "function":
        raise ValueError(f"function {FUNCTIONS}, and the role tool")
    return "system" if value == "developer" else value


class Function(Checked):
    """A tool's name, and the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Object | None = None

    ignores: ClassVar = {"strict": "all arguments conform"}

    @property
    def tool(self) -> c.Tool:
        schema = "" if self.parameters is None else json_text(self.parameters)
        return c.Tool(self.name, self.description or "", schema)


class Choice(NamedTuple):
    """Whether tools are called, and which: the named one; empty: any."""

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
    prompt: c.Prompt, tools: Iterable[c.Tool], choice: Choice | None, parallel: bool | None
) -> c.Prompt:
    """The prompt with the tools that may be called. Without any, the choice "none" is what happens
    anyway."""
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
        _note(info, (info.field_name or "",))
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
    def output(self) -> c.StructuredOutput | None:
        if self.json_schema:
            return schema_of(self.json_schema.schema_)
        return c.JsonObject() if self.type == "json_object" else None


def _nested(value: object) -> object:
    """The format of the newer APIs as that of chats."""
    if isinstance(value, Mapping) and value.get("type") == "json_schema":
        schema = {name: given for name, given in value.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return value


class OutputConfig(Checked):
    format: Annotated[ResponseFormat | None, BeforeValidator(_nested)] = None

    ignores: ClassVar = dict.fromkeys(("effort", "verbosity"), NO_SETTING)

    @property
    def output(self) -> c.StructuredOutput | None:
        return self.format.output if self.format else None


MADE = AfterValidator(lambda given: given and given.output)
Output = Annotated[OutputConfig | None, OUTPUT, MADE]
R = TypeVar("R", bound=Checked)
_MAX_ERRORS = 1000  # of a request: more are not listed, and no objects are made for them


def parsed(model: type[R], body: bytes, ignored: set[str] | None = None) -> R:
    """The request in a JSON body; `ignored` receives the names of fields without effect.

    Raises:
        InvalidRequest: every field that is refused, of a wrong type or out of range.
    """
    try:
        return model.model_validate_json(body, context=ignored)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            text = f"has more than {_MAX_ERRORS} invalid fields"
            raise InvalidRequest([Violation("body", text)]) from None
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        texts = (item["msg"].removeprefix("Value error, ") for item in problems)
        raise_if_any(map(Violation, (_name(item["loc"]) for item in problems), texts))
        raise


def _name(location: tuple[int | str, ...]) -> str:
    """The path of a field: that of ("messages", 0, "content") is "messages[0].content"."""
    parts = [part for part in location if part not in (_BY_NAME, _LISTED, _KEY)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.lstrip(".") or "body"
