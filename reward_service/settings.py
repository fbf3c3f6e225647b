"""The reward service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from reward_service.specs import ClassifierSpec, RelevanceSpec, Resources, RewardSpec
from specrej.contracts.validation import MAX_BATCH
from specrej.settings import Port, Seconds, ServiceSettings
from specrej_models.hub import embedded_models


class RewardSettings(ServiceSettings):
    """The reward service scores prefixes and answers.

    Set by flags, or by environment variables named SPECREJ_REWARD_ and the setting's name.

    rewards is a JSON list; the first is the default of requests that name none. The kinds are
    classifier, relevance, function, http, toy, answer, checks, schema, call, tests and judge;
    docs/rewards.md says what each is for, and its options. An example:
    [{"name": "helpful", "kind": "classifier", "directory": "/models/helpful"}].

    Each reward computed here has a thread of its own, which computes batches of all sessions
    together. At most queue_limit calls per reward wait or run; further ones are refused with
    RESOURCE_EXHAUSTED.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_REWARD_")

    port: Port = Field(50052, description="port to listen on; 0 picks a free one")
    rewards: tuple[RewardSpec, ...] = Field(
        (
            RelevanceSpec(name="relevance", directory=embedded_models() / "relevance"),
            ClassifierSpec(
                name="harmless",
                directory=embedded_models() / "SmolLM2-135M-Instruct",
                head_file=Path(__file__).with_name("harmless.safetensors"),
            ),
        ),
        description="JSON list of rewards; the first is the default",
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="CPU threads torch uses; 0 leaves the choice to torch"
    )
    max_batch: Annotated[int, Field(ge=1, le=MAX_BATCH)] = Field(
        1024, description="most responses or candidates per call"
    )
    token_budget: Annotated[int, Field(ge=512)] = Field(
        2048, description="most tokens per forward pass, padding included"
    )
    kept_tokens: Annotated[int, Field(ge=1)] = Field(
        65_536, description="most tokens of keys and values that a causal reward keeps"
    )
    queue_limit: Annotated[int, Field(ge=1, le=65536)] = Field(
        64, description="most calls per reward that wait or run"
    )
    # Between two batches a whole round is generated, with Best-of-N whole answers: so the lease is
    # longer than the orchestrator's default deadline. Keepalive detects a dead peer sooner.
    lease_s: Seconds = Field(
        900, description="seconds a session's peer may be silent before it loses the session"
    )
    deadline_s: Seconds = Field(
        3600, description="seconds a call may take if its client set no deadline"
    )

    @property
    def resources(self) -> Resources:
        """For each of the rewards."""
        return Resources(self.device, self.threads, self.token_budget, self.kept_tokens)

    @field_validator("rewards")
    @classmethod
    def _at_least_one_each_name_once(
        cls, rewards: tuple[RewardSpec, ...]
    ) -> tuple[RewardSpec, ...]:
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ValueError("must have at least 1 reward, each name once")
        return rewards
