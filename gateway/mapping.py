"""What becomes of each field of OpenAI's requests: one table, and the types of what is mapped.

A new ability of the core is one changed row of `TABLE`, and its type in a request class. Options
that OpenAI's API has no field for are in `specrej`, which is built from the client's `Options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from specrej.contracts import Options, Sampling, Schedule, Selection, WeightedReward


@dataclass(frozen=True, slots=True)
class Maps:
    """The field sets what the core names `path`; errors about that name the field."""

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

_PENALTY = "is not supported: the sampler has no penalties and no bias"
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
    "seed": Maps("sampling.seed"),
    "logprobs": Maps("sampling.logprobs"),
    "stream": Maps("stream"),
    "stream_options": Maps("stream"),
    "specrej": Maps("specrej"),
    "audio": Refused(_AUDIO),
    "echo": Refused("is not supported: prompts are not repeated", (False,)),
    "frequency_penalty": Refused(_PENALTY, (0,)),
    "function_call": Refused(_TOOLS, ("none", "auto")),
    "functions": Refused(_TOOLS, ([],)),
    "logit_bias": Refused(_PENALTY, ({},)),
    "modalities": Refused(_AUDIO, (["text"],)),
    "moderation": Refused("is not supported: answers are not moderated"),
    "presence_penalty": Refused(_PENALTY, (0,)),
    "reasoning_effort": Refused(_THOUGHT, ("none",)),
    "response_format": Refused("is not supported: only type text", ({"type": "text"},)),
    "store": Refused("is not supported: conversations are not stored", (False,)),
    "suffix": Refused("is not supported: text is only continued", ("",)),
    "tool_choice": Refused(_TOOLS, ("none", "auto")),
    "tools": Refused(_TOOLS, ([],)),
    "top_logprobs": Refused("is not supported: only those of drawn tokens", (0,)),
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

# The same for the fields of a message, and of stream_options.
MESSAGE_TABLE: Mapping[str, Rule] = {
    "tool_calls": Refused(_TOOLS, ([],)),
    "tool_call_id": Refused(_TOOLS),
    "function_call": Refused(_TOOLS),
    "audio": Refused(_AUDIO),
    "name": Ignored("chat templates have no names"),
    "refusal": Ignored("part of an answer"),
    "annotations": Ignored("part of an answer"),
    "reasoning_content": Ignored("part of an answer"),
}
STREAM_TABLE: Mapping[str, Rule] = {"include_obfuscation": Ignored("chunks are not padded")}

# Unknown fields are kept, for the tables.
_JSON = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = _JSON

    include_usage: bool | None = None


def path_of(option: str) -> str:
    """The path of a client's option in the core's errors: "sampling.top_p"."""
    for contract, part in ((Sampling, "sampling."), (Selection, "selection.")):
        if any(item.name == option for item in fields(contract)):
            return part + option
    return {"cache": "cache_control"}.get(option, option)


def _options_of(part: str = "") -> dict[str, Any]:
    """Types of the options without a field of OpenAI, all with default None."""
    own = {rule.path for name, rule in TABLE.items() if isinstance(rule, Maps)} - {"selection.n"}
    hints = get_type_hints(Options) | {
        "schedule": Annotated[Schedule, Field(discriminator="kind")],
        "rewards": dict[str, float] | tuple[WeightedReward, ...],
    }
    paths = {name: path_of(name) for name in hints}
    chosen = [n for n, path in paths.items() if path not in own and path.startswith(part)]
    return {name: (hints[name] | None, None) for name in chosen}


class _Extension(BaseModel):
    """What OpenAI's API has no field for."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    timeout_s: Annotated[float | None, Field(gt=0)] = None
    events: Literal["rounds", "reasoning"] | None = None
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
    n: Annotated[int | None, Field(ge=1)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
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
    return "".join(map(str, texts))


def _role(value: object) -> object:
    if value in ("tool", "function"):
        raise ValueError(f"{value} {_TOOLS}")
    return "system" if value == "developer" else value


class ChatMessage(BaseModel):
    model_config = _JSON

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_joined)] = ""


class ChatRequest(Request):
    """A conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


def _one(value: object) -> object:
    if isinstance(value, list) and not (len(value) == 1 and isinstance(value[0], str)):
        raise ValueError("must be one text: neither token ids nor several prompts")
    return value[0] if isinstance(value, list) else value


class CompletionRequest(Request):
    """Raw text, without the model's chat template. `logprobs` 0: those of drawn tokens."""

    prompt: Annotated[str, BeforeValidator(_one), Field(min_length=1)]
    logprobs: Literal[0] | None = None
