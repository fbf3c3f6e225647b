"""The reward service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from specrej.settings import Port, Seconds, ServiceSettings

# The generator's own mean log-likelihood goes by this name in requests.
_RESERVED = "likelihood"


class RewardSpec(BaseModel):
    """One reward: the name to ask for, what kind it is, and where its model lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    kind: Literal["relevance", "classifier", "toy"]
    directory: Path | None = None
    head: Path | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> RewardSpec:
        if self.name == _RESERVED:
            raise ValueError(f"{_RESERVED} is the generator's own reward, choose another name")
        if (self.kind == "toy") != (self.directory is None):
            needs = "takes no" if self.kind == "toy" else "needs a"
            raise ValueError(f"reward {self.name}: kind {self.kind} {needs} directory")
        if self.head and self.kind != "classifier":
            raise ValueError(f"reward {self.name}: kind {self.kind} takes no head")
        return self


class RewardSettings(ServiceSettings):
    """The reward service judges prefixes and answers.

    Set by flags, or by environment variables named SPECREJ_REWARD_ and the setting's name.

    rewards is a JSON list; the first is the default of requests that name none. Kinds:
      relevance   cosine of all-MiniLM-L6-v2 embeddings of prompt and response
                  (python -m reward_service.embedded .models/relevance makes the directory)
      classifier  a local Bradley-Terry sequence classifier with one label and a chat template; or
                  any causal model with one, and the "head" that specrej train-reward fitted on it
      toy         the share of vowels, needs no directory
    such as [{"name": "helpful", "kind": "classifier", "directory": "/models/helpful"}].

    Each reward scores in a thread of its own, one call at a time; queue_limit more calls may wait
    per reward, others are refused with RESOURCE_EXHAUSTED.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_REWARD_")

    port: Port = Field(50052, description="port to listen on; 0 picks a free one")
    rewards: tuple[RewardSpec, ...] = Field(
        (RewardSpec(name="relevance", kind="relevance", directory=Path(".models/relevance")),),
        description="JSON list of {name, kind, directory, head}; the first is the default",
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads torch uses; 0 leaves the choice to torch"
    )
    max_batch: Annotated[int, Field(ge=1, le=65536)] = Field(
        1024, description="most responses or candidates per call"
    )
    token_budget: Annotated[int, Field(ge=512)] = Field(
        8192, description="most tokens per forward pass, padding included"
    )
    kept_tokens: Annotated[int, Field(ge=0)] = Field(
        65_536, description="most tokens whose keys and values a classifier keeps for its sessions"
    )
    queue_limit: Annotated[int, Field(ge=0, le=65536)] = Field(
        64, description="most calls that wait, per reward"
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
