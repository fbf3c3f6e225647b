"""What becomes of each field of OpenAI's requests: the one table of the gateway.

A field's annotation is its rule: it `Maps` to an option of the client, is `Ignored` on purpose, or
`Refused` until the core can do it. A new ability of the core is one changed annotation here. What
OpenAI's API has no field for is in `specrej`, built from the client's own `Options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from specrej.contracts import Options, Sampling, Schedule, Selection, WeightedReward

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Maps:
    """The field sets what the core names `path`; errors about it name the field."""

    path: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """The field has no effect."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Any value is an error, except null and the `harmless` ones, which change nothing."""

    why: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> None:
        if value is not None and value not in self.harmless:
            raise PydanticCustomError("refused", "{why}", {"why": self.why})


_SAMPLER = "is not supported: the sampler has no such penalty or bias"
_TOOLS = "is not supported: tools do not work here"
_AUDIO = "is not supported: there is only text"
_HOSTED = "a feature of OpenAI's hosting"


def path_of(option: str) -> str:
    """The path of a client's option in the core's errors: "sampling.top_p"."""
    for contract, part in ((Sampling, "sampling."), (Selection, "selection.")):
        if any(item.name == option for item in fields(contract)):
            return f"{part}{option}"
    return {"cache": "cache_control"}.get(option, option)


# The options that OpenAI's own fields set.
_TOP_LEVEL = ("model", "max_tokens", "temperature", "top_p", "stop", "seed", "logprobs")
_OPTIONS = {
    name: hint
    for name, hint in get_type_hints(Options).items()
    if name not in (*_TOP_LEVEL, "return_candidates")
} | {
    "schedule": Annotated[Schedule, Field(discriminator="kind")],
    "rewards": dict[str, float] | tuple[WeightedReward, ...],
}


def _optional(hints: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (hint | None, None) for name, hint in hints.items()}


class _Extension(BaseModel):
    """Everything of specrej that OpenAI's API has no field for."""

    model_config = _STRICT

    timeout_s: Annotated[float | None, Field(gt=0)] = None
    events: Literal["rounds", "reasoning"] | None = None
    allow_special_tokens: Annotated[bool | None, Maps("prompt.allow_special_tokens")] = None


Extension: type[_Extension] = create_model("Extension", __base__=_Extension, **_optional(_OPTIONS))

# What a preset may carry.
Preset: type[BaseModel] = create_model(
    "Preset",
    __config__=ConfigDict(extra="forbid", allow_inf_nan=False),
    **_optional({k: v for k, v in _OPTIONS.items() if path_of(k).startswith("selection.")}),
)


class _StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Ignored("chunks are not padded")] = None


def _list_of_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Request(BaseModel):
    """The fields that both endpoints have."""

    model_config = _STRICT

    model: Annotated[str, Field(min_length=1), Maps("model")]
    n: Annotated[int | None, Field(ge=1), Maps("selection.return_candidates")] = None
    best_of: Annotated[int | None, Field(ge=1), Maps("selection.n")] = None
    max_tokens: Annotated[int | None, Maps("sampling.max_tokens")] = None
    temperature: Annotated[float | None, Maps("sampling.temperature")] = None
    top_p: Annotated[float | None, Maps("sampling.top_p")] = None
    stop: Annotated[list[str] | None, BeforeValidator(_list_of_texts), Maps("sampling.stop")] = None
    seed: Annotated[int | None, Maps("sampling.seed")] = None
    stream: Annotated[bool | None, Maps("stream")] = None
    stream_options: Annotated[_StreamOptions | None, Maps("stream")] = None
    specrej: Annotated[Extension | None, Maps("specrej")] = None
    frequency_penalty: Annotated[float | None, Refused(_SAMPLER, (0,))] = None
    presence_penalty: Annotated[float | None, Refused(_SAMPLER, (0,))] = None
    logit_bias: Annotated[dict[str, float] | None, Refused(_SAMPLER, ({},))] = None
    user: Annotated[str | None, Ignored("the token names the tenant")] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Request:
        if self.stream_options and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream: true")
        return self


def _joined(value: object) -> object:
    """The text of a message: a string, or text parts."""
    if value is None:
        return ""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    texts: list[Any] = []
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
            raise PydanticCustomError("parts", "only parts of type text: no images, audio, files")
        texts.append(part.get("text"))
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("parts", "the text of a part must be a string")
    return "".join(texts)


def _known_role(value: object) -> object:
    if value in ("tool", "function"):
        raise PydanticCustomError("role", "{role} {why}", {"role": value, "why": _TOOLS})
    return "system" if value == "developer" else value


class ChatMessage(BaseModel):
    """One turn."""

    model_config = _STRICT

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_known_role)]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    name: Annotated[str | None, Ignored("chat templates have no names")] = None
    refusal: Annotated[str | None, Ignored("part of an answer")] = None
    annotations: Annotated[Any, Ignored("part of an answer")] = None
    reasoning_content: Annotated[str | None, Ignored("part of an answer")] = None
    audio: Annotated[Any, Refused(_AUDIO)] = None
    tool_calls: Annotated[Any, Refused(_TOOLS, ([],))] = None
    function_call: Annotated[Any, Refused(_TOOLS)] = None


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), Maps("prompt.messages")]
    max_completion_tokens: Annotated[int | None, Maps("sampling.max_tokens")] = None
    logprobs: Annotated[bool | None, Maps("sampling.logprobs")] = None
    top_logprobs: Annotated[
        int | None, Refused("is not supported: only the log-probabilities of drawn tokens", (0,))
    ] = None
    response_format: Annotated[
        Any, Refused("is not supported: only text, no JSON mode or schema", ({"type": "text"},))
    ] = None
    tools: Annotated[Any, Refused(_TOOLS, ([],))] = None
    tool_choice: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None
    parallel_tool_calls: Annotated[bool | None, Ignored("there are no tools")] = None
    functions: Annotated[Any, Refused(_TOOLS, ([],))] = None
    function_call: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None
    audio: Annotated[Any, Refused(_AUDIO)] = None
    modalities: Annotated[Any, Refused(_AUDIO, (["text"],))] = None
    web_search_options: Annotated[Any, Refused("is not supported: there is no search")] = None
    moderation: Annotated[Any, Refused("is not supported: answers are not moderated")] = None
    store: Annotated[
        bool | None, Refused("is not supported: conversations are not stored", (False,))
    ] = None
    reasoning_effort: Annotated[
        Any, Refused("is not supported: it is no setting of the models here", ("none",))
    ] = None
    verbosity: Annotated[
        Any, Refused("is not supported: it is no setting of the models here", ("medium",))
    ] = None
    prediction: Annotated[Any, Ignored("it changes the speed only")] = None
    metadata: Annotated[Any, Ignored("it labels stored conversations")] = None
    service_tier: Annotated[Any, Ignored(_HOSTED)] = None
    safety_identifier: Annotated[Any, Ignored(_HOSTED)] = None
    prompt_cache_key: Annotated[Any, Ignored("equal beginnings are shared without it")] = None
    prompt_cache_options: Annotated[Any, Ignored(_HOSTED)] = None
    prompt_cache_retention: Annotated[Any, Ignored(_HOSTED)] = None

    @model_validator(mode="after")
    def _one_length(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise PydanticCustomError("length", "max_tokens is max_completion_tokens: set one")
        return self


def _one_text(value: object, info: ValidationInfo) -> object:
    if isinstance(value, list):
        if len(value) == 1 and isinstance(value[0], str):
            return value[0]
        raise PydanticCustomError("prompt", "must be one text: no token ids, no several prompts")
    return value


class CompletionRequest(Request):
    """POST /v1/completions: raw text, without the model's chat template."""

    prompt: Annotated[str, BeforeValidator(_one_text), Field(min_length=1), Maps("prompt.text")]
    logprobs: Annotated[
        Literal[0] | None, Maps("sampling.logprobs"), Field(description="0: drawn tokens only")
    ] = None
    echo: Annotated[bool | None, Refused("is not supported: prompts are not echoed", (False,))] = (
        None
    )
    suffix: Annotated[
        str | None, Refused("is not supported: no text is inserted before one", ("",))
    ] = None
