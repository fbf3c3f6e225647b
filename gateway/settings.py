"""The gateway's settings."""

from __future__ import annotations

from itertools import starmap
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import CliImplicitFlag, SettingsConfigDict

from gateway.fields import Preset
from specrej.contracts import MAX_INT32, Selection, WeightedReward
from specrej.contracts.validation import MAX_PUBLIC_MESSAGE_BYTES, check_selection
from specrej.security import Credentials, check_credentials, is_loopback, may_send_token
from specrej.settings import Port, ProcessSettings, Seconds

PresetName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


def _named(value: object) -> object:
    """Names in a list are the served model's."""
    return dict.fromkeys(value, "") if isinstance(value, list) else value


class GatewaySettings(ProcessSettings):
    """The gateway: OpenAI's API over HTTP, on an orchestrator.

    Every setting is a flag (--max-body-bytes 65536) or an environment variable
    (SPECREJ_GATEWAY_MAX_BODY_BYTES=65536); flags win.

    presets is a JSON object of named selections, such as
      {"bon-32": {"n": 32, "algorithm": "best-of-n"},
       "careful": {"n": 64, "alpha": 0.3, "schedule": {"kind": "geometric", "first": 32},
                   "rewards": {"relevance": 1, "harmless": 0.5}}}
    A request selects one by the name of its model: MODEL:bon-32. One with stop_at needs rewards,
    its own or the request's.

    Tokens are not checked here: the orchestrator's tokens file decides. Without allow_anonymous,
    requests without a token end here, and all requests if the orchestrator has no tokens file.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_GATEWAY_")

    port: Port = Field(8000, description="port to listen on; 0 picks a free one")
    orchestrator_address: str = Field(
        "127.0.0.1:50050", pattern=r"^\S+$", description="the orchestrator, as host:port"
    )
    orchestrator_tls: CliImplicitFlag[bool] = Field(
        False, description="TLS to the orchestrator, by the system's authorities"
    )
    orchestrator_tls_ca: str = Field(
        "", description="PEM file of the authorities of its certificate; means TLS"
    )
    orchestrator_tls_cert: str = Field("", description="PEM file of this client's certificate")
    orchestrator_tls_key: str = Field("", description="PEM file of its key")
    orchestrator_allow_plaintext_token: CliImplicitFlag[bool] = Field(
        False,
        description="forward tokens in plaintext, too, to an orchestrator on another machine; else"
        " they are dropped there",
    )
    model_names: Annotated[dict[str, str], BeforeValidator(_named)] = Field(
        {},
        description="JSON list of other names of the model, or object of names and models;"
        " /v1/models lists them first",
    )
    presets: dict[PresetName, Preset] = Field(
        {
            "bon-32": {"n": 32, "algorithm": "best-of-n"},
            "sr-32": {"n": 32},
            "verify-16": {"n": 16, "waves": 4, "stop_at": 1.0},
            "vote-16": {"n": 16, "vote": {"extractor": "number"}},
        },
        validate_default=True,
        description="JSON object of selections by their names",
    )
    deadline_s: Seconds = Field(
        590,
        description="seconds that a request without timeout_s may take, below the 600 of OpenAI's"
        " clients, which repeat what they time out; the orchestrator's max_deadline_s shortens"
        " longer ones",
    )
    keep_alive_s: Seconds = Field(
        10, description="seconds without a chunk after which a stream has a comment"
    )
    max_body_bytes: int = Field(
        MAX_PUBLIC_MESSAGE_BYTES, ge=1024, le=2**30, description="most bytes of a request's body"
    )
    cors_origins: str = Field(
        "", description="origins, separated by commas, whose pages may call; empty: none"
    )

    @property
    def orchestrator_credentials(self) -> Credentials:
        """Credentials of the connection to the orchestrator; a token is that of each request."""
        return Credentials(
            tls=self.orchestrator_tls,
            tls_ca=self.orchestrator_tls_ca,
            tls_cert=self.orchestrator_tls_cert,
            tls_key=self.orchestrator_tls_key,
            allow_plaintext_token=self.orchestrator_allow_plaintext_token,
        )

    @property
    def forwards_tokens(self) -> bool:
        """Whether a token may be sent on the connection to the orchestrator."""
        return may_send_token(self.orchestrator_address, self.orchestrator_credentials)

    def needs_no_token(self, host: str) -> bool:
        """Whether requests to this `Host`, a name or address and perhaps a port, need no token.

        By default only on loopback, and only with a loopback name as `Host`: otherwise a web page
        whose own name resolves to this machine (DNS rebinding) could call this port.
        """
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        is_set = "allow_anonymous" in self.model_fields_set
        return self.serves_anonymous and (is_set or is_loopback(name))

    @field_validator("presets")
    @classmethod
    def _presets_are_valid(cls, presets: dict[str, Any]) -> dict[str, Any]:
        for name, preset in presets.items():
            given = {key: value for key, value in preset if value is not None}
            rewards = given.get("rewards", ())
            if isinstance(rewards, dict):
                rewards = tuple(starmap(WeightedReward, rewards.items()))
            selection = Selection(**{**given, "rewards": rewards})
            if problems := [*check_selection(selection, MAX_INT32, name)]:
                raise ValueError("; ".join(f"{v.field} {v.description}" for v in problems))
        return presets

    @model_validator(mode="after")
    def _orchestrator_can_be_called(self) -> Self:
        try:
            check_credentials(self.orchestrator_address, self.orchestrator_credentials)
        except (OSError, ValueError) as error:
            raise ValueError(f"orchestrator_*: {error}") from None
        return self
