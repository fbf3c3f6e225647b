"""The orchestrator's settings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from orchestrator.cache import Secret
from orchestrator.cache.redis_client import check_access
from specrej.contracts import DEFAULT_MAX_TOKENS, DEFAULT_N, MAX_INT32, Schedule, WeightedReward
from specrej.contracts.errors import Violation
from specrej.contracts.validation import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    MAX_PUBLIC_MESSAGE_BYTES,
    check_rewards,
    check_schedule,
)
from specrej.security import Credentials, check_credentials, is_loopback
from specrej.settings import MessageBytes, Port, Seconds, ServiceSettings

Addresses = Annotated[str, Field(pattern=r"^[^\s,]+:\d{1,5}(,[^\s,]+:\d{1,5})*$")]


class OrchestratorSettings(ServiceSettings):
    """The orchestrator: the public port and the run loop; holds no model.

    Every setting is a flag (--max-running 8) or an environment variable
    (SPECREJ_ORCHESTRATOR_MAX_RUNNING=8); flags win.

    default_rewards is a JSON list of rewards, such as
      [{"name": "helpful", "normalization": {"kind": "batch"}},
       {"name": "harmless", "weight": 0.5, "normalization": {"kind": "batch"}, "veto_below": -1}]
    Each has a weight (default 1), a normalization of kind none or batch (default none), and
    vetoes candidates with a raw value below veto_below (default: no veto).
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_ORCHESTRATOR_")

    port: Port = Field(50050, description="port to listen on; 0 picks a free one")
    max_message_bytes: MessageBytes = Field(
        MAX_PUBLIC_MESSAGE_BYTES, description="most bytes of a message that a client sends"
    )
    generator_address: Addresses = Field(
        "127.0.0.1:50051",
        description="host:port of the generators, separated by commas; a name means all its"
        " addresses",
    )
    reward_address: Addresses = Field(
        "127.0.0.1:50052", description="host:port of the reward services, in the same way"
    )
    backend_lost_s: Seconds = Field(
        10, description="seconds of silence after which a backend's sessions go elsewhere"
    )
    redis_url: str = Field(
        "",
        description="Redis for final answers, with redis-py's options such as"
        " rediss://USER@HOST:PORT?ssl_ca_certs=FILE; empty: no cache",
    )
    redis_password_file: str = Field(
        "", description="file with the password, read again for every new connection"
    )
    cache_secret_file: str = Field(
        "",
        description="file with the secret of the cache's keys and values, 32 to 4096 bytes, the"
        " same at all orchestrators of a Redis, read again when it changes; empty: none",
    )
    cache_ttl_s: Seconds = Field(3600, description="seconds an answer is kept, plus or minus 10 %")
    cache_timeout_s: Seconds = Field(0.25, description="seconds a call waits for Redis at most")
    max_running: Annotated[int, Field(ge=1)] = Field(
        8, description="requests that run at once; a quarter more of tenants with none running"
    )
    max_queued: Annotated[int, Field(ge=0)] = Field(
        64, description="requests that may wait, in equal parts for the tenants that do"
    )
    deadline_s: Seconds = Field(
        600, description="seconds a request may take whose client set no deadline"
    )
    max_deadline_s: Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        3600, description="seconds a request may take; longer deadlines are shortened to it"
    )
    least_bytes_s: Annotated[int, Field(ge=0, le=2**20)] = Field(
        1024,
        description="bytes a second that the client of a stream must read, after 30 s of waiting"
        " for it; else the call ends, once its run is over; 0: any",
    )
    backend_message_bytes: MessageBytes = Field(
        MAX_MESSAGE_BYTES, description="most bytes of a message to or from a backend"
    )
    backend_tls: CliImplicitFlag[bool] = Field(
        False, description="TLS to the backends, by the system's authorities"
    )
    backend_tls_ca: str = Field(
        "", description="PEM file of the authorities of the backends' certificates; means TLS"
    )
    backend_tls_cert: str = Field("", description="PEM file of this client's certificate")
    backend_tls_key: str = Field("", description="PEM file of its key")
    backend_token_file: str = Field("", description="file with the token to send to the backends")
    backend_allow_plaintext_token: CliImplicitFlag[bool] = Field(
        False, description="send the token to backends on other machines without TLS"
    )
    default_schedule: Schedule | None = Field(
        None,
        description="JSON of kind (memory, tokens, geometric), tokens, first, factor; such as "
        '{"kind": "geometric", "first": 32, "factor": 2}; absent: geometric by 2 from 16, or 64'
        " where the generator measured that a step hardly grows with its candidates",
    )
    default_n: Annotated[int, Field(ge=0, le=MAX_BATCH)] = Field(
        DEFAULT_N,
        description="candidates of requests that name no n; more where return_candidates,"
        " min_answers or branching need them, 1 at temperature 0; 0: as many as the slots hold",
    )
    default_max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] = Field(
        DEFAULT_MAX_TOKENS,
        description="most new tokens per candidate of requests that name no max_tokens; fewer where"
        " the prompt leaves less room in the context",
    )
    vote_extractors: dict[str, str] = Field(
        {}, description='JSON of functions for votes by name, such as {"unit": "my_votes:unit"}'
    )
    default_rewards: tuple[WeightedReward, ...] = Field(
        (),
        description="JSON list of the rewards of requests that name none, which are summed; empty:"
        " the reward service's first",
    )

    @field_validator("redis_password_file", "cache_secret_file")
    @classmethod
    def _is_a_file(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError("must be empty, or a file that is there")
        return path

    @field_validator("cache_secret_file")
    @classmethod
    def _secret_is_valid(cls, path: str) -> str:
        try:
            Secret(Path(path) if path else None)
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
        return path

    @model_validator(mode="after")
    def _redis_can_be_used(self) -> Self:
        check_access(self.redis_url, self.password_path)
        return self

    @property
    def password_path(self) -> Path | None:
        """The file with the password of Redis; None: there is none."""
        return Path(self.redis_password_file) if self.redis_password_file else None

    @property
    def exposes_cache(self) -> bool:
        """Whether Redis is on another machine and the cache has no secret."""
        host = urlsplit(self.redis_url).hostname
        return bool(host) and not self.cache_secret_file and not is_loopback(host or "")

    @property
    def backend_credentials(self) -> Credentials:
        return Credentials(
            token_file=self.backend_token_file,
            tls=self.backend_tls,
            tls_ca=self.backend_tls_ca,
            tls_cert=self.backend_tls_cert,
            tls_key=self.backend_tls_key,
            allow_plaintext_token=self.backend_allow_plaintext_token,
        )

    @model_validator(mode="after")
    def _deadlines_are_in_order(self) -> Self:
        if self.deadline_s > self.max_deadline_s:
            raise ValueError("deadline_s must be at most max_deadline_s")
        return self

    @model_validator(mode="after")
    def _backends_can_be_called(self) -> Self:
        for address in f"{self.generator_address},{self.reward_address}".split(","):
            try:
                check_credentials(address, self.backend_credentials)
            except (OSError, ValueError) as error:
                raise ValueError(f"backend_*: {error}") from None
        return self

    @field_validator("default_schedule")
    @classmethod
    def _schedule_is_valid(cls, schedule: Schedule | None) -> Schedule | None:
        _raise_if_any(check_schedule(schedule, "schedule") if schedule else ())
        return schedule

    @field_validator("default_rewards")
    @classmethod
    def _rewards_are_valid(cls, rewards: tuple[WeightedReward, ...]) -> tuple[WeightedReward, ...]:
        _raise_if_any(check_rewards(rewards, "rewards"))
        return rewards


def _raise_if_any(violations: Iterable[Violation]) -> None:
    """Raise ValueError, which pydantic reports, with all violations."""
    if problems := [f"{v.field} {v.description}" for v in violations]:
        raise ValueError("; ".join(problems))
