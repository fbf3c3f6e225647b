"""Settings of a service: environment variables and flags, checked before anything starts.

Each service subclasses `ServiceSettings` in its own `settings.py`, the gateway `ProcessSettings`;
the class docstring is the manual and `python -m SERVICE --help` prints it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliImplicitFlag,
    SettingsConfigDict,
    SettingsError,
)

from specrej.contracts.validation import MAX_MESSAGE_BYTES
from specrej.security import Credentials, TLSFiles, is_loopback, read_tokens, tls_files

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MessageBytes = Annotated[int, Field(ge=1024, le=2**31 - 1)]


class ProcessSettings(BaseSettings):
    """The settings that all services have, whatever their protocol."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_hide_none_type=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(0, description="port to listen on; 0 picks a free one")
    grace_s: Seconds = Field(30, description="seconds running calls may take to finish on SIGTERM")
    drain_s: Annotated[float, Field(ge=0, le=600)] | None = Field(
        None,
        description="seconds to go on serving after SIGTERM, NOT_SERVING to health checks, so that"
        " balancers notice; left out: 5, on loopback 0",
    )
    log_level: str = Field(
        "INFO",
        pattern="^(DEBUG|INFO|WARNING|ERROR)$",
        description="least severe level logged; libraries log from WARNING on",
    )
    log_error_text: CliImplicitFlag[bool] = Field(
        False, description="log the text of unexpected errors, which may quote prompts"
    )
    log_format: Literal["text", "json"] = Field("text", description="plain text or JSON lines")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="OTLP gRPC collector URL for traces and metrics, http: or https:; empty: none",
    )
    metrics_port: Port = Field(0, description="HTTP port of a Prometheus endpoint; 0: none")
    health_port: Port = Field(
        0, description="plaintext port of health checks alone, for probes; 0: none"
    )
    tls_cert: str = Field("", description="PEM file of the certificate chain; empty: plaintext")
    tls_key: str = Field("", description="PEM file of its key")
    tls_client_ca: str = Field(
        "", description="PEM file of authorities; clients must have a certificate from one of them"
    )
    allowed_clients: str = Field(
        "",
        pattern=r"^([^\s,]+(,[^\s,]+)*)?$",
        description="names, separated by commas, of which a client's certificate must have one as a"
        " subject alternative name; empty: every certificate of tls_client_ca",
    )
    allow_anonymous: CliImplicitFlag[bool] = Field(
        False, description="serve callers without tokens or certificates; the default on loopback"
    )
    private_network: CliImplicitFlag[bool] = Field(
        False,
        description="only the edge and other services reach this port; else a warning says at the"
        " start that it must not be public",
    )

    @property
    def drain_seconds(self) -> float:
        """`drain_s`, or its default."""
        if self.drain_s is not None:
            return self.drain_s
        return 0.0 if is_loopback(self.host) else 5.0

    @property
    def serves_anonymous(self) -> bool:
        """`allow_anonymous`, or its default."""
        is_set = "allow_anonymous" in self.model_fields_set
        return self.allow_anonymous if is_set else is_loopback(self.host)

    @property
    def tls_files(self) -> TLSFiles | None:
        """None: plaintext."""
        given = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_client_ca}
        return tls_files(Credentials(**given))

    @property
    def allowed_names(self) -> tuple[str, ...]:
        """Names of client certificates; empty: any."""
        return tuple(name for name in self.allowed_clients.split(",") if name)

    @model_validator(mode="after")
    def _tls_can_be_used(self) -> Self:
        if files := self.tls_files:
            if not files.cert:
                raise ValueError("tls_cert and tls_key are needed for TLS")
            _check(files.read)
        if self.allowed_clients and not self.tls_client_ca:
            raise ValueError("allowed_clients needs tls_client_ca")
        return self


class ServiceSettings(ProcessSettings):
    """The settings that all gRPC services have."""

    reflection: bool = Field(True, description="serve gRPC reflection (turn off in production)")
    stuck_s: Seconds = Field(
        120,
        description="seconds that a step, a command or a text of a model's threads may take before"
        " health is NOT_SERVING",
    )
    tokens_file: str = Field(
        "",
        description="JSON lines of tenant, sha256, roles, expires, weight; all calls"
        " except health need a token",
    )
    max_message_bytes: MessageBytes = Field(
        MAX_MESSAGE_BYTES, description="most bytes of a message that a client sends"
    )
    max_calls: int = Field(
        2048, ge=1, le=2**20, description="calls that run at once, and streams of a connection"
    )

    @property
    def tokens_path(self) -> Path | None:
        """None: no tokens."""
        return Path(self.tokens_file) if self.tokens_file else None

    @field_validator("tokens_file")
    @classmethod
    def _tokens_can_be_read(cls, path: str) -> str:
        if path:
            _check(lambda: read_tokens(Path(path)))
        return path

    @model_validator(mode="after")
    def _callers_are_restricted(self) -> Self:
        if self.tokens_file and self.allow_anonymous:
            raise ValueError("allow_anonymous has no effect with tokens_file: remove one of them")
        if not (self.tokens_file or self.tls_client_ca or self.serves_anonymous):
            raise ValueError(
                f"{self.host} would be open to all callers: set tokens_file or tls_client_ca,"
                " or allow_anonymous if that is intended"
            )
        return self


def _check(read: Callable[[], object]) -> None:
    """Call `read`; an OSError becomes the ValueError that pydantic reports."""
    try:
        read()
    except OSError as error:
        raise ValueError(str(error)) from None


S = TypeVar("S", bound=ProcessSettings)


def load(settings: type[S], arguments: list[str] | None = None) -> S:
    """Settings from environment and flags (flags win); a bad value ends the process.

    Prints the name of each bad value and what is accepted to stderr, exits with 2. Variables with
    the prefix of the service that are no setting are printed and ignored: another version may
    have them.
    """
    for name in _unknown_variables(settings):
        print(f"ignored: {name} is no setting of this version", file=sys.stderr)
    try:
        return CliApp.run(settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        problems = [_describe(settings, problem) for problem in error.errors()]
    except SettingsError as error:  # a variable that is not valid JSON
        problems = [f"bad setting: {error}: {error.__cause__}"]
    except RecursionError:
        problems = ["bad setting: JSON that is nested too deeply"]
    print(*problems, sep="\n", file=sys.stderr)
    raise SystemExit(2)


def _unknown_variables(settings: type[ProcessSettings]) -> list[str]:
    prefix = settings.model_config.get("env_prefix", "")
    names = {f"{prefix}{name}".upper() for name in settings.model_fields}
    given = (name for name in os.environ if prefix and name.upper().startswith(prefix))
    return sorted(name for name in given if name.upper() not in names)


def _describe(settings: type[ProcessSettings], problem: Any) -> str:
    if not problem["loc"]:  # of several settings, named in the message
        prefix = settings.model_config.get("env_prefix", "")
        return f"bad settings ({prefix}...): {problem['msg'].removeprefix('Value error, ')}"
    name = ".".join(str(part) for part in problem["loc"])
    variable = f"{settings.model_config.get('env_prefix', '')}{name}".upper()
    # Not the value itself: it may hold a password.
    return f"bad setting {name} ({variable}): {problem['msg']}"
