"""How the orchestrator is configured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from orchestrator.composition import Composite, check_composites
from specrej.contracts import Schedule
from specrej.errors import Violation
from specrej.settings import Port, Seconds, ServiceSettings
from specrej.validation import check_schedule

Address = Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
_SCHEDULES = ("memory", "tokens", "geometric")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


class OrchestratorSettings(ServiceSettings):
    """The orchestrator: the public port; decides who goes on, holds no model.

    Every setting is a flag (--max-running 8) or an environment variable
    (SPECREJ_ORCHESTRATOR_MAX_RUNNING=8); flags win.

    composites is a JSON list of rewards that requests can ask for by one name, such as
      [{"name": "balanced", "rewards": [
        {"name": "helpful", "normalization": {"kind": "fixed", "mean": 0.2, "deviation": 1.1}},
        {"name": "harmless", "weight": 0.5, "normalization": {"kind": "batch"}, "veto_below": -1}
      ]}]
    Its rewards are those of the reward service, and likelihood; no composites. Each has a weight
    (1 if absent), a normalization of kind none, fixed or batch (none if absent), and vetoes what it
    gives less than veto_below (nothing if absent). A composite hides a reward of its name.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_ORCHESTRATOR_")

    port: Port = Field(50050, description="port to listen on; 0 picks a free one")
    generator_address: Address = Field("127.0.0.1:50051", description="host:port of the generator")
    reward_address: Address = Field(
        "127.0.0.1:50052", description="host:port of the reward service"
    )
    redis_url: str = Field("", description="Redis for final answers; empty: no cache")
    cache_ttl_s: Seconds = Field(3600, description="seconds an answer is kept, give or take 10 %")
    cache_timeout_s: Seconds = Field(0.25, description="seconds a call waits for Redis at most")
    max_running: Annotated[int, Field(ge=1)] = Field(8, description="requests that run at once")
    max_queued: Annotated[int, Field(ge=0)] = Field(64, description="requests that may wait")
    deadline_s: Seconds = Field(
        600, description="seconds a request may take whose client set no deadline"
    )
    default_schedule: Schedule = Field(
        Schedule(),
        description="JSON of kind (memory, tokens, geometric), tokens, first, factor; such as "
        '{"kind": "geometric", "first": 32, "factor": 2}',
    )
    composites: tuple[Composite, ...] = Field(
        (), description="JSON list of {name, rewards}: several rewards under one name"
    )
    default_reward: str = Field(
        "",
        description="reward or composite of requests that name none; empty: the reward service's "
        "first",
    )

    @field_validator("redis_url")
    @classmethod
    def _url_is_of_redis(cls, url: str) -> str:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is none
        if url and parts.scheme not in _REDIS_SCHEMES:
            raise ValueError(f"must be empty, or start with {':// or '.join(_REDIS_SCHEMES)}://")
        return url

    @field_validator("default_schedule")
    @classmethod
    def _schedule_is_valid(cls, schedule: Schedule) -> Schedule:
        if schedule.kind not in _SCHEDULES:
            raise ValueError(f"kind must be one of {', '.join(_SCHEDULES)}")
        _raise_if_any(check_schedule(schedule, "schedule"))
        return schedule

    @field_validator("composites")
    @classmethod
    def _composites_are_valid(cls, composites: tuple[Composite, ...]) -> tuple[Composite, ...]:
        _raise_if_any(check_composites(composites))
        return composites


def _raise_if_any(violations: Iterable[Violation]) -> None:
    """What is wrong, as pydantic wants to be told."""
    if problems := [f"{v.field} {v.description}" for v in violations]:
        raise ValueError("; ".join(problems))
