"""The options of every kind of reward, declared once; imports no torch.

A spec is one entry of the setting `rewards`. The reward that it loads reads its options from the
spec, and they are part of the reward's fingerprint.

A new kind has a spec here, listed in `RewardSpec`, whose `loader` names a function or class in a
module of `kinds` that returns a `Reward` or a `RemoteReward`; a row in docs/rewards.md; and an
entry in `KINDS` of tests/reward_service/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from specrej import fingerprint
from specrej.security import is_loopback
from specrej_models import hub

if TYPE_CHECKING:
    from reward_service.reward import RemoteReward, Reward

# Options that name files: the fingerprint covers the files' contents, not their paths.
_PATHS = ("directory", "head_file")

# Headers that carry credentials, in lower case: their values come from files.
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"}


def _is_not_reserved(name: str) -> str:
    if name == "likelihood":
        raise ValueError("likelihood is the generator's own reward, choose another name")
    return name


Name = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$"), AfterValidator(_is_not_reserved)
]
FunctionPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]

# What a reward does with the images of prompts: reads them, reads the texts alone, or refuses them.
Images = Literal["read", "text", "refuse"]


@dataclass(frozen=True, slots=True)
class Resources:
    """What a reward may use.

    device: "cpu", "cuda" or "cuda:N"; threads: CPU threads of torch, 0 leaves torch's choice;
    token_budget: most tokens per forward pass; kept_tokens: most tokens of keys and
    values that a causal reward keeps for all sessions together.
    """

    device: str = "cpu"
    threads: int = 0
    token_budget: int = 2048
    kept_tokens: int = 65_536


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spec(_Options):
    """One reward: its name in requests, its kind, and the kind's options.

    images: what to do with those of prompts; "read" is for the kinds that can.
    """

    # "module:function" in `kinds`, to call with the spec and the resources. A string, as most of
    # these modules import torch.
    loader: ClassVar[str]
    can_read_images: ClassVar[bool] = False

    name: Name
    images: Images = "text"

    @field_validator("images")
    @classmethod
    def _can_be_read(cls, images: Images) -> Images:
        if images == "read" and not cls.can_read_images:
            raise ValueError("this kind cannot read images: must be text or refuse")
        return images

    def load(self, resources: Resources) -> Reward | RemoteReward:
        """The reward that this spec describes.

        Models of a hub are fetched, if its cache lacks them.

        Raises:
            FileNotFoundError: a file or directory that it names does not exist.
            OSError, ValueError, RuntimeError: the files cannot be used for this kind.
        """
        paths: dict[str, Path] = {}
        for option in _PATHS:
            path: Path | None = getattr(self, option, None)
            if not path or path.exists():
                continue
            if not hub.is_name(str(path)):
                raise FileNotFoundError(f"reward {self.name}: no {option} {path}")
            paths[option] = hub.find(str(path)).directory
        load: Callable[..., Reward | RemoteReward]
        load = resolve_name(f"reward_service.kinds.{self.loader}")
        reward = load(self.model_copy(update=paths), resources)
        reward.images = self.images
        return reward


class ToySpec(Spec):
    """The share of vowels, for dry runs."""

    loader = "toy:load_toy"
    kind: Literal["toy"] = "toy"


class LocalSpec(Spec):
    """A model in a local directory; code that comes with it is not run."""

    directory: Path

    def fingerprint(self, resources: Resources, **digests: str) -> str:
        """Fingerprint of the weights and all options; `digests`: of files outside the directory."""
        options = self.model_dump(mode="json", exclude={"name", "images", *_PATHS})
        options["dtype"] = "float32" if resources.device == "cpu" else "auto"
        return fingerprint.of_directory(self.directory, options | digests)


class RelevanceSpec(LocalSpec):
    """Cosine of all-MiniLM-L6-v2 embeddings of prompt and response."""

    loader = "encoder:RelevanceReward"
    kind: Literal["relevance"] = "relevance"


class ClassifierSpec(LocalSpec):
    """A decoder-only sequence classifier, or a backbone with a head of its own.

    special_tokens: what writes BOS and the like: the chat "template", or "both" it and the
    tokenizer; head_file: a file with the head's weights, the tensor `head` [hidden], in place of
    the checkpoint's `score`; label: the index of the label that is the score, where there are
    several; engine: what computes it, "auto" is vLLM on CUDA where it can and the own network
    elsewhere; vllm_options: further engine arguments of vLLM.
    """

    loader = "classifier:load_classifier"
    can_read_images = True
    kind: Literal["classifier"] = "classifier"
    special_tokens: Literal["template", "both"] = "template"
    head_file: Path | None = None
    label: Annotated[int, Field(ge=0)] | None = None
    engine: Literal["auto", "own", "vllm"] = "auto"
    vllm_options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.label and self.head_file:
            raise ValueError("has one label: label must be 0")
        if self.vllm_options and self.engine != "vllm":
            raise ValueError('vllm_options require engine "vllm"')
        if self.images == "read" and self.engine != "vllm":
            raise ValueError('images "read" requires engine "vllm"')
        return self


class FunctionSpec(Spec):
    """A Python function, by its dotted path such as "my_rewards:brevity"."""

    loader = "function:FunctionReward"
    can_read_images = True
    kind: Literal["function"] = "function"
    function: FunctionPath


class UnitTestsSpec(Spec):
    """Tests of a request, run in a sandbox.

    workers: programs at once, by default one per CPU; wall_s, cpu_s, memory_mb: bounds of each, of
    time in all, of the processor's time and of memory; allow_unsandboxed: where namespaces are
    refused, run programs with limits only.
    """

    loader = "unit_tests:UnitTestsReward"
    kind: Literal["tests"] = "tests"
    workers: int = Field(0, ge=0, le=1024)
    wall_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    cpu_s: int = Field(3, ge=1, le=600)
    memory_mb: int = Field(512, ge=64, le=65536)
    allow_unsandboxed: bool = False


class ServerSpec(Spec):
    """What a server computes, which has `timeout_s` seconds for each answer.

    headers: sent with every request; header_files: the same for secrets, each in a file that is
    read again when it changes; allow_plaintext_token: send them without TLS, too; version: part of
    the fingerprint, to be changed whenever the server's reward changes.
    """

    url: str = Field(pattern=r"^https?://\S+$")
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    allow_plaintext_token: bool = False
    headers: dict[HeaderName, str] = Field(default_factory=dict, repr=False)
    header_files: dict[HeaderName, Path] = Field(default_factory=dict)
    version: str = ""

    @model_validator(mode="after")
    def _secrets_are_protected(self) -> Self:
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise ValueError("url must not hold credentials: put them in header_files")
        if secret := sorted(name for name in self.headers if name.lower() in _SECRET_HEADERS):
            raise ValueError(f"{secret[0]} is a secret: put it in header_files")
        if not self.header_files or self.allow_plaintext_token or parts.scheme == "https":
            return self
        if not is_loopback(parts.hostname or ""):
            raise ValueError(
                "secrets would be sent in plaintext: use https, or allow_plaintext_token"
            )
        return self


class AnswerSpec(Spec):
    """Whether a text has the answer of its request's data."""

    loader = "answer:AnswerReward"
    kind: Literal["answer"] = "answer"


class ChecksSpec(Spec):
    """The share of the instructions in a request's data that a text follows."""

    loader = "checks:ChecksReward"
    kind: Literal["checks"] = "checks"


class SchemaSpec(Spec):
    """Whether a text's JSON has the JSON Schema of its request's data."""

    loader = "schema:SchemaReward"
    kind: Literal["schema"] = "schema"


class CallSpec(Spec):
    """Whether a text's calls are those that its request's data allows.

    function: tries a call, such as "my_tools:dry_run".
    """

    loader = "call:CallReward"
    kind: Literal["call"] = "call"
    function: FunctionPath | None = None


class HTTPSpec(ServerSpec):
    """A reward behind HTTP."""

    loader = "http:HTTPReward"
    can_read_images = True
    kind: Literal["http"] = "http"


class Criterion(_Options):
    """What a judge gives one grade for, and the grade's weight."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    description: str = ""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0


class JudgeSpec(ServerSpec):
    """A language model that grades answers, at a URL for chat completions in OpenAI's form.

    rubric: what is to be judged; criteria: a grade for each, of the integers of `scale`; mode:
    "each" grades answers alone, "pairs" asks which one of two is better, in both orders, each with
    `opponents` others; max_parallel: calls at once; max_tokens: of a reply; max_request_tokens:
    tokens that the calls for one batch of answers may take together before the next call is not
    made. Requests may bring their own rubric, criteria and reference.
    """

    loader = "judge:JudgeReward"
    can_read_images = True
    kind: Literal["judge"] = "judge"
    model: str = Field(min_length=1)
    rubric: str = "How good is the response as an answer to the prompt?"
    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)] = (Criterion(name="quality"),)
    scale: tuple[int, int] = (1, 10)
    mode: Literal["each", "pairs"] = "each"
    opponents: int = Field(2, ge=1, le=64)
    temperature: float = Field(0, ge=0, le=2)
    max_tokens: int = Field(512, ge=1)
    max_parallel: int = Field(8, ge=1, le=1024)
    max_request_tokens: int = Field(1_000_000, ge=1)

    @model_validator(mode="after")
    def _scale_ascends(self) -> Self:
        if self.scale[0] >= self.scale[1]:
            raise ValueError("scale must be a lowest grade and a higher one")
        return self


RewardSpec = Annotated[
    ToySpec
    | RelevanceSpec
    | ClassifierSpec
    | FunctionSpec
    | HTTPSpec
    | AnswerSpec
    | ChecksSpec
    | SchemaSpec
    | CallSpec
    | UnitTestsSpec
    | JudgeSpec,
    Field(discriminator="kind"),
]
