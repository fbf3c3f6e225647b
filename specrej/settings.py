"""How a service is configured: environment variables and flags, checked before anything starts.

Each service subclasses `ServiceSettings` in its own `settings.py`; the class docstring is the
manual and `python -m SERVICE --help` prints it.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServiceSettings(BaseSettings):
    """What all services share."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", cli_kebab_case=True, cli_hide_none_type=True
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(0, description="port to listen on; 0 picks a free one")
    reflection: bool = Field(True, description="serve gRPC reflection (turn off in production)")
    grace_s: Seconds = Field(30, description="seconds running calls may take to finish on SIGTERM")
    log_level: str = Field(
        "INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="least severe level logged"
    )
    otlp_endpoint: str = Field("", description="OTLP gRPC collector URL for traces; empty: none")


S = TypeVar("S", bound=ServiceSettings)


def load(settings: type[S], arguments: list[str] | None = None) -> S:
    """Settings from environment and flags (flags win); a bad value ends the process.

    Prints the name of each bad value and what is accepted to stderr, exits with 2.
    """
    try:
        return CliApp.run(settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for problem in error.errors():
            print(_describe(settings, problem), file=sys.stderr)
        raise SystemExit(2) from None
    except SettingsError as error:  # a variable that should be JSON and is not
        print(f"bad setting: {error}: {error.__cause__}", file=sys.stderr)
        raise SystemExit(2) from None


def _describe(settings: type[ServiceSettings], problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    variable = f"{settings.model_config.get('env_prefix', '')}{name}".upper()
    # Not the value itself: it may hold a password.
    return f"bad setting {name} ({variable}): {problem['msg']}"
