"""What a caller sends: a prompt, how tokens are drawn, and how the answer is selected.

Every field that callers set by name is declared once, with its type, default, help text and, if it
does not depend on other values, its accepted range: `option`. The client, the command line,
`specrej.contracts.wire` and `specrej.contracts.validation` read these declarations.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

MAX_INT32 = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_RETURN_CANDIDATES = 64
MAX_TOP_LOGPROBS = 20
# Of the orchestrator's settings.
DEFAULT_N = 16
DEFAULT_MAX_TOKENS = 2048

T = TypeVar("T")


class Accepted(NamedTuple):
    """The accepted values of a numeric option."""

    text: str  # in errors: "must be TEXT"
    contains: Callable[[float], bool]


def option(default: T, help_text: str, accepted: Accepted | None = None) -> T:
    """A dataclass field that callers set by its name."""
    made: T = field(default=default, metadata={"help": help_text, "accepted": accepted})
    return made


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text between images."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """A file of an image."""

    data: bytes = field(default=b"", repr=False)
    media_type: str = "image/png"

    @property
    def data_uri(self) -> str:
        """The file in a URI, as OpenAI's API has it."""
        return f"data:{self.media_type};base64,{b64encode(self.data).decode()}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that answers may call; `parameters`: a JSON Schema in JSON, empty for none."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments`: an object in JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user", "assistant" or "tool".

    A tool's turn is the result of the call `tool_call_id`. A user's turn with images has `parts`
    in place of `content`.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    parts: tuple[TextPart | Image, ...] = ()

    @property
    def text(self) -> str:
        """All of its text."""
        return self.content or "".join(p.text for p in self.parts if isinstance(p, TextPart))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))

    @property
    def chat_content(self) -> str | list[dict[str, Any]]:
        """Its text, or its parts in order if it has images, as in OpenAI's chats."""
        if not self.images:
            return self.text
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "image_url", "image_url": {"url": part.data_uri}}
            for part in self.parts
        ]

    def with_texts(self, convert: Callable[[str], str]) -> Message:
        """The turn with its texts converted."""
        parts = tuple(
            TextPart(convert(part.text)) if isinstance(part, TextPart) else part
            for part in self.parts
        )
        return replace(self, content=convert(self.content), parts=parts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation or raw text, exactly one of the two.

    Control tokens such as `<|im_start|>` in either are text, unless `allow_special_tokens` is set,
    which only raw text may have. With `continue_final` the last turn is the assistant's, and
    answers continue its text. Answers may call `tools`, and call one, or `tool_name`, with the
    choice "required". `thinking`: whether the model reasons first; None: as its template does.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    allow_special_tokens: bool = False
    continue_final: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    thinking: bool | None = None

    @classmethod
    def from_user(cls, content: str) -> Prompt:
        """A conversation of one user turn."""
        return cls(messages=(Message("user", content),))

    @property
    def images(self) -> dict[str, Image]:
        """All images in their order, by their paths in errors."""
        return {
            f"prompt.messages[{number}].parts[{index}]": part
            for number, message in enumerate(self.messages)
            for index, part in enumerate(message.parts)
            if isinstance(part, Image)
        }

    @property
    def question(self) -> Prompt:
        """The prompt without the beginning of its answers."""
        if not self.continue_final:
            return self
        return replace(self, messages=self.messages[:-1], continue_final=False)

    @property
    def beginning(self) -> str:
        """The text that answers continue."""
        return self.messages[-1].text if self.continue_final else ""

    @property
    def without_images(self) -> Prompt:
        """The prompt for readers of text alone; a turn of nothing but images says so."""

        def text_only(turn: Message) -> Message:
            text = turn.text if turn.text.strip() else "(image)"
            return replace(turn, content=text, parts=()) if turn.parts else turn

        return replace(self, messages=tuple(map(text_only, self.messages)))

    def with_images(self, convert: Callable[[Image], TextPart | Image]) -> Prompt:
        """The prompt with its images, in their order, converted."""
        messages = tuple(
            replace(
                turn, parts=tuple(convert(p) if isinstance(p, Image) else p for p in turn.parts)
            )
            for turn in self.messages
        )
        return replace(self, messages=messages)

    @property
    def turns(self) -> tuple[Message, ...]:
        """The conversation; raw text is one user turn."""
        return self.messages or (Message("user", self.text),)


_PENALTY = Accepted("-2 .. 2", lambda value: -2 <= value <= 2)


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A number that is added to the logit of one token."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a JSON Schema, itself in JSON, describes."""

    schema: str = ""
    kind: Literal["json_schema"] = "json_schema"


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole, in the syntax of Rust's regex crate."""

    pattern: str = ""
    kind: Literal["regex"] = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar in Lark's syntax, with the rule `start`."""

    lark: str = ""
    kind: Literal["grammar"] = "grammar"


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""

    kind: Literal["json_object"] = "json_object"


# What every candidate that ends by itself conforms to.
StructuredOutput = JsonSchema | Regex | Grammar | JsonObject


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; fields as in `specrej.v1.Sampling`."""

    max_tokens: int = option(
        DEFAULT_MAX_TOKENS,
        "Maximum number of new tokens per candidate; default: the rest of the context, up to the"
        " server's limit.",
    )
    temperature: float = option(
        1.0,
        "Softmax temperature; 0 is greedy and needs n = 1.",
        Accepted("0 or 0.01 .. 2", lambda value: value == 0 or 0.01 <= value <= 2),
    )
    top_k: int = option(
        0,
        "Draw from the k most probable tokens; 0: from all.",
        Accepted("0 (all) or more", lambda value: 0 <= value <= MAX_INT32),
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling: draw from the smallest set of tokens with this probability mass.",
        Accepted("(0, 1]", lambda value: 0 < value <= 1),
    )
    stop: tuple[str, ...] = option((), "Text that ends a candidate; repeatable.")
    seed: int = option(
        0,
        "Equal seeds give equal answers.",
        Accepted("0 .. 2^63 - 1", lambda value: 0 <= value <= MAX_SEED),
    )
    ignore_eos: bool = option(False, "Continue past end-of-sequence tokens.")
    min_tokens: int = option(0, "Number of tokens before which no candidate ends.")
    logprobs: bool = option(
        False, "Report token ids and log-probabilities of returned candidates (--json shows them)."
    )
    min_p: float = option(
        0.0,
        "Draw from tokens with at least this fraction of the most probable one's probability.",
        Accepted("0 .. 1", lambda value: 0 <= value <= 1),
    )
    repetition_penalty: float = option(
        1.0,
        "Divides positive logits, multiplies others, of tokens in the prompt or the candidate.",
        Accepted("0.01 .. 100", lambda value: 0.01 <= value <= 100),
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logit of each token in the candidate.", _PENALTY
    )
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's logit once per occurrence in the candidate.", _PENALTY
    )
    logit_bias: tuple[TokenBias, ...] = option(
        (), "Added to the logit of a token, -100 .. 100; repeatable."
    )
    stop_token_ids: tuple[int, ...] = option((), "Token that ends a candidate; repeatable.")
    top_logprobs: int = option(
        0,
        "With --logprobs: report so many of the most probable tokens of each step, too.",
        Accepted(f"0 .. {MAX_TOP_LOGPROBS}", lambda value: 0 <= value <= MAX_TOP_LOGPROBS),
    )
    structured_output: StructuredOutput | None = option(
        None, "What complete answers conform to: json_schema, regex, grammar or json_object."
    )
    max_thinking_tokens: int = option(
        0,
        "Most tokens of the reasoning before an answer, which then begins; 0: no own bound.",
        Accepted("0 or more", lambda value: 0 <= value <= MAX_INT32),
    )


class Algorithm(Enum):
    """How the best candidate is found."""

    SPECULATIVE_REJECTION = "speculative-rejection"
    BEST_OF_N = "best-of-n"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where decision tokens lie. Full slots end a round early under every schedule.

    "geometric": at `first * factor**i`, rounded down. "tokens": at `tokens`, in ascending order.
    "memory": none are planned; a session opens with room for `first` tokens per candidate, and with
    n = 0 there are as many candidates as that allows: full slots end the first round there.
    """

    kind: Literal["geometric", "tokens", "memory"] = "geometric"
    first: int = 16  # with "geometric" and "memory"
    factor: float = 2.0  # only with "geometric"
    tokens: tuple[int, ...] = ()  # only with "tokens"


@dataclass(frozen=True, slots=True)
class Branching:
    """Forks fill the room of rejected candidates: at each decision token the best `keep` live
    candidates go on, and forks of them, in turn from the best one, bring their number to `width`.

    Rounds that are longer than the first one have fewer: `width` times (tokens of the first round /
    tokens of this one) to the power of `taper`, at least `keep`. With 1, all rounds generate about
    as many tokens.
    """

    width: int = 16
    keep: int = 4
    taper: float = 0.0


@dataclass(frozen=True, slots=True)
class Normalization:
    """Makes the values of different rewards comparable before they are weighted.

    "none": values as they are. "batch": (value - mean) / deviation over all candidates that count
    at the decision token; 0 for all if all values are equal.
    """

    kind: Literal["none", "batch"] = "none"


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of a weighted sum; raw values below `veto_below` veto their candidate.

    `stage`: when it counts. With "cuts" it does not choose the answer; with "end" it scores only
    answers that have ended and are not vetoed. `data` is JSON that the reward compares answers
    with, such as a reference or tests; it is never logged, traced or returned.
    """

    name: str
    weight: float = 1.0
    normalization: Normalization = field(default_factory=Normalization)
    veto_below: float | None = None
    stage: Literal["both", "cuts", "end"] = "both"
    data: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer that most candidates agree on: complete ones that are not vetoed vote.

    `argument`: the regular expression, JSON pointer or function's name that the extractor needs.
    `stop_probability`: how sure it must be that the leading answer stays ahead of the next one for
    the request to end early; 1: it cannot lose.
    """

    extractor: Literal["number", "boxed", "regex", "json", "tool_call", "function"] = "number"
    argument: str = ""
    weight: Literal["one", "reward", "confidence"] = "one"
    stop_probability: float = 1.0


@dataclass(frozen=True, slots=True)
class ConfidenceCut:
    """Ends candidates of later waves whose confidence over `window` tokens falls below what the
    fraction `keep` of the first wave's candidates reached (DeepConf, arXiv 2508.15260)."""

    keep: float = 0.9
    window: int = 64


@dataclass(frozen=True, slots=True)
class Selection:
    """How the returned candidate is found; fields as in `specrej.v1.Selection`."""

    n: int = option(
        DEFAULT_N,
        "Candidates; auto (0): as many as the free slots hold at the first cut; default: the"
        " server's.",
    )
    alpha: float = option(
        0.5,
        "Fraction of the ranked candidates rejected at each decision token.",
        Accepted("in [0, 1)", lambda value: 0 <= value < 1),
    )
    schedule: Schedule = option(
        Schedule(),
        "Decision tokens: memory:FIRST, geometric:FIRST,FACTOR or tokens:T,T,...; default: the"
        " server's.",
    )
    algorithm: Algorithm = option(Algorithm.SPECULATIVE_REJECTION, "How the best is found.")
    rewards: tuple[WeightedReward, ...] = option(
        (),
        "A reward, repeatable: a weighted sum. Candidates with a value below veto are "
        "rejected; mean and deviation of the batch normalize the values.",
    )
    return_candidates: int = option(
        1,
        "Number of top candidates to return.",
        Accepted(
            f"1 .. {MAX_RETURN_CANDIDATES}", lambda value: 1 <= value <= MAX_RETURN_CANDIDATES
        ),
    )
    prefer_complete: bool = option(
        False,
        "Rank answers cut off at max_tokens behind all complete ones; on with structured output.",
    )
    branching: Branching | None = option(
        None,
        "WIDTH,KEEP[,TAPER]: the best KEEP live candidates go on, with forks up to WIDTH; fewer in"
        " long rounds if TAPER is above 0; no alpha.",
    )
    min_answers: int = option(1, "Fewest candidates that a cut keeps, and so of answers.")
    stop_at: float | None = option(
        None, "End as soon as a complete answer that is not vetoed has this score."
    )
    waves: int = option(
        0,
        "Begin with so many candidates, then as many as there are already, up to n, unless the"
        " request ends before; 0: all at once.",
    )
    first: int = option(0, "End as soon as so many answers are complete; 0: never.")
    vote: Vote | None = option(
        None, "Return the answer that most candidates agree on, and end once it cannot lose."
    )
    confidence_cut: ConfidenceCut | None = option(
        None, "End candidates of later waves that are less confident than the first wave's."
    )
    score_thinking: bool = option(
        False,
        "Score the reasoning before answers, too; else cuts leave candidates that reason alone.",
    )

    @property
    def cuts_by_rank(self) -> bool:
        """Whether a reward counts in cuts; the server's default does."""
        return not self.rewards or any(reward.stage != "end" for reward in self.rewards)

    @property
    def may_stop(self) -> bool:
        """Whether answers that are complete can end the request."""
        return self.stop_at is not None or self.first > 0 or self.vote is not None


class CacheControl(Enum):
    """What the cache may do for a request; as in `specrej.v1.CacheControl`."""

    USE = "use"
    BYPASS = "bypass"
    REFRESH = "refresh"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to answer it."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    selection: Selection = field(default_factory=Selection)
    model: str = option("", "The model's name; empty: the one that is served.")
    cache: CacheControl = option(CacheControl.USE, "What the cache may do for the request.")
    allow_degraded: bool = option(
        False, "Accept a weaker answer where the request would otherwise fail."
    )
    # Not sent: which of n, schedule, prefer_complete, max_tokens are left to the orchestrator.
    absent: tuple[str, ...] = field(default=(), compare=False)

    @property
    def fits_context(self) -> bool:
        """Whether fewer tokens than `max_tokens` are enough where the prompt leaves less room."""
        return "max_tokens" in self.absent


# Values of options by their names, as `Client.generate` accepts them. An option left out is absent
# on the wire, so that the server's default applies.
Options = dict[str, Any]


class Option(NamedTuple):
    """A declared option; `path` is that of its field in errors."""

    path: str
    type: Any
    default: Any
    help_text: str
    accepted: Accepted | None


@cache
def declared_options() -> Mapping[str, Option]:
    """Every `option` of Selection, Sampling and GenerationRequest, by its name."""
    options: dict[str, Option] = {}
    for contract, part in (
        (Selection, "selection."),
        (Sampling, "sampling."),
        (GenerationRequest, ""),
    ):
        hints = get_type_hints(contract)
        for item in fields(contract):
            if "help" in item.metadata:
                wire_name = "cache_control" if item.name == "cache" else item.name
                options[item.name] = Option(
                    part + wire_name,
                    hints[item.name],
                    item.default,
                    item.metadata["help"],
                    item.metadata["accepted"],
                )
    return options
