"""The reward service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from specrej.credentials import Credentials
from specrej.settings import Port, Seconds, ServiceSettings

# The generator's own mean log-likelihood goes by this name in requests.
_RESERVED = "likelihood"

_HARMLESS = Path(__file__).with_name("harmless.safetensors")

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Spec(BaseModel):
    """One reward: the name to ask for, what kind it is, and what that kind needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")

    @field_validator("name")
    @classmethod
    def _is_not_reserved(cls, name: str) -> str:
        if name == _RESERVED:
            raise ValueError(f"{_RESERVED} is the generator's own reward, choose another name")
        return name


class ToySpec(_Spec):
    kind: Literal["toy"]


class RelevanceSpec(_Spec):
    kind: Literal["relevance"]
    directory: Path


class LocalSpec(_Spec):
    """A model in a local directory; code that comes with it runs only if that is asked for."""

    directory: Path
    trust_remote_code: bool = False


class TransformSpec(BaseModel):
    """scale * f(logit) + offset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["identity", "sigmoid"] = "identity"
    scale: Finite = 1.0
    offset: Finite = 0.0


class CrossEncoderSpec(LocalSpec):
    kind: Literal["cross-encoder"]
    transform: TransformSpec = TransformSpec()


class _CausalSpec(LocalSpec):
    """A decoder-only model, and how conversations are written for it."""

    # None: the template's, or the tokeniser's where a plain format takes the template's place.
    special_tokens: Literal["template", "tokenizer"] | None = None
    format: str = ""
    unfinished: Literal["closed", "open"] = "closed"

    @field_validator("format")
    @classmethod
    def _has_both_places(cls, plain: str) -> str:
        if plain and (plain.count("{response}") != 1 or plain.count("{prompt}") != 1):
            raise ValueError(
                'must be empty, or have {prompt} and {response} once, "{prompt}" first'
            )
        if plain.find("{response}") < plain.find("{prompt}"):
            raise ValueError("must have {prompt} before {response}")
        return plain


class ClassifierSpec(_CausalSpec):
    kind: Literal["classifier"]
    head: Path | None = None
    adapter: Path | None = None
    label_weights: tuple[Finite, ...] = Field((1.0,), min_length=1, max_length=256)
    transform: TransformSpec = TransformSpec()

    @model_validator(mode="after")
    def _a_head_has_one_label(self) -> ClassifierSpec:
        if self.head and len(self.label_weights) > 1:
            raise ValueError("a head of its own has one label: label_weights must be one number")
        return self


class VLLMClassifierSpec(_CausalSpec):
    kind: Literal["vllm-classifier"]
    label_weights: tuple[Finite, ...] = Field((1.0,), min_length=1, max_length=256)
    transform: TransformSpec = TransformSpec()
    vllm_options: dict[str, Any] = Field(default_factory=dict)


class GatedSpec(_CausalSpec):
    kind: Literal["gated"]
    gate_at: str = Field(min_length=1)


class LikelihoodSpec(_CausalSpec):
    kind: Literal["likelihood"]
    unfinished: Literal["closed", "open"] = "open"
    reference: Path | None = None
    beta: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    mean: bool = True


class ProcessSpec(_CausalSpec):
    kind: Literal["process"]
    unfinished: Literal["closed", "open"] = "open"
    separator: str = Field("\n\n", min_length=1)
    step_token: str = Field("\n\n", min_length=1)
    step_text: str = ""
    good: str = ""
    bad: str = ""
    good_label: int = Field(1, ge=0)
    aggregate: Literal["last", "min", "mean"] = "min"

    @model_validator(mode="after")
    def _has_both_words_or_none(self) -> ProcessSpec:
        if bool(self.good) != bool(self.bad):
            raise ValueError("good and bad must both be words, or both be empty")
        return self


class PairwiseSpec(LocalSpec):
    kind: Literal["pairwise"]
    special_tokens: Literal["template", "tokenizer"] = "template"
    template: str = "[CONTEXT] {context} [RESPONSE A] {a} [RESPONSE B] {b} \n"
    first: str = Field("A", min_length=1)
    second: str = Field("B", min_length=1)
    opponents: int = Field(2, ge=1, le=64)

    @field_validator("template")
    @classmethod
    def _has_its_places_in_order(cls, template: str) -> str:
        places = [template.find(place) for place in ("{context}", "{a}", "{b}")]
        once = all(template.count(place) == 1 for place in ("{context}", "{a}", "{b}"))
        if not once or places != sorted(places):
            raise ValueError("must have {context}, {a} and {b} once each, in this order")
        return template


class FunctionSpec(_Spec):
    kind: Literal["function"]
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")


class HTTPSpec(_Spec):
    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://\S+$")
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    version: str = ""


class GRPCSpec(_Spec):
    kind: Literal["grpc"]
    address: str = Field(pattern=r"^\S+:\d{1,5}$")
    reward: str = ""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    token_file: str = ""
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    allow_plaintext_token: bool = False

    @property
    def credentials(self) -> Credentials:
        """What the other service is shown, and how it is known."""
        return Credentials(
            token_file=self.token_file,
            tls=self.tls,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            allow_plaintext_token=self.allow_plaintext_token,
        )


RewardSpec = Annotated[
    ToySpec
    | RelevanceSpec
    | CrossEncoderSpec
    | ClassifierSpec
    | VLLMClassifierSpec
    | GatedSpec
    | LikelihoodSpec
    | ProcessSpec
    | PairwiseSpec
    | FunctionSpec
    | HTTPSpec
    | GRPCSpec,
    Field(discriminator="kind"),
]


class RewardSettings(ServiceSettings):
    """The reward service judges prefixes and answers.

    Set by flags, or by environment variables named SPECREJ_REWARD_ and the setting's name.

    rewards is a JSON list; the first is the default of requests that name none. Kinds, of which
    docs/rewards.md has every option:
      classifier     a decoder-only Bradley-Terry or regression model; or any causal model, and the
                     "head" that specrej train-reward fitted on it
      vllm-classifier  the same kind of model on vLLM, which docs/vllm.md installs
      gated          several objectives and a gate, of the ArmoRM kind
      process        scores the steps of a response
      likelihood     how likely a language model finds the response, against a reference perhaps
      pairwise       a language model that compares two responses
      cross-encoder  an encoder that reads question and answer as a pair
      relevance      cosine of all-MiniLM-L6-v2 embeddings of prompt and response
      function       a Python function by its dotted path
      http, grpc     a reward somewhere else
      toy            the share of vowels
    such as [{"name": "helpful", "kind": "classifier", "directory": "/models/helpful"}].

    Each reward scores in a thread of its own, batches of all sessions together. queue_limit calls
    may be there at once per reward, others are refused with RESOURCE_EXHAUSTED.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_REWARD_")

    port: Port = Field(50052, description="port to listen on; 0 picks a free one")
    rewards: tuple[RewardSpec, ...] = Field(
        (
            RelevanceSpec(name="relevance", kind="relevance", directory=Path(".models/relevance")),
            ClassifierSpec(
                name="harmless",
                kind="classifier",
                directory=Path(".models/SmolLM2-135M-Instruct"),
                head=_HARMLESS,
            ),
        ),
        description="JSON list of rewards; the first is the default",
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads torch uses; 0 leaves the choice to torch"
    )
    max_batch: Annotated[int, Field(ge=1, le=65536)] = Field(
        1024, description="most responses or candidates per call"
    )
    token_budget: Annotated[int, Field(ge=512)] = Field(
        2048, description="most tokens per forward pass, padding included"
    )
    kept_tokens: Annotated[int, Field(ge=1)] = Field(
        65_536, description="most tokens whose keys and values a causal reward keeps, all sessions'"
    )
    queue_limit: Annotated[int, Field(ge=1, le=65536)] = Field(
        64, description="most calls at once, waiting or under way, per reward"
    )
    merge_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        2, description="milliseconds a batch waits for others to share its pass, if there are any"
    )
    # Whole rounds of the generator lie between two batches, all of Best-of-N before the first:
    # longer than the orchestrator's default deadline. A dead peer is found sooner, by keepalive.
    lease_s: Seconds = Field(
        900, description="seconds a session's peer may be silent before it loses the session"
    )
    deadline_s: Seconds = Field(
        3600, description="seconds a call may take whose client set no deadline"
    )

    @field_validator("rewards")
    @classmethod
    def _at_least_one_each_name_once(
        cls, rewards: tuple[RewardSpec, ...]
    ) -> tuple[RewardSpec, ...]:
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ValueError("must have at least 1 reward, each name once")
        return rewards
