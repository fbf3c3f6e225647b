"""The flags of a client's credentials, the same for every command that calls a server."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from specrej.credentials import TOKEN_VARIABLE, Credentials


def _flag(name: str, variable: str | None, text: str) -> Any:
    return typer.Option(name, envvar=variable, help=text, rich_help_panel="Credentials")


_TokenFile = Annotated[
    Path | None,
    _flag(
        "--token-file",
        "SPECREJ_TOKEN_FILE",
        f"File of the token to send; or set {TOKEN_VARIABLE} to the token itself.",
    ),
]
_TLS = Annotated[bool, _flag("--tls", "SPECREJ_TLS", "Use TLS and trust the system's authorities.")]
_CA = Annotated[
    Path | None,
    _flag("--tls-ca", "SPECREJ_TLS_CA", "Use TLS and trust the authorities in this PEM file."),
]
_Cert = Annotated[
    Path | None, _flag("--tls-cert", "SPECREJ_TLS_CERT", "Show the certificate in this PEM file.")
]
_Key = Annotated[Path | None, _flag("--tls-key", "SPECREJ_TLS_KEY", "PEM file of its key.")]
_Plaintext = Annotated[
    bool,
    _flag("--allow-plaintext-token", None, "Send the token without TLS to other machines, too."),
]


def _credentials(
    token_file: _TokenFile = None,
    tls: _TLS = False,
    tls_ca: _CA = None,
    tls_cert: _Cert = None,
    tls_key: _Key = None,
    allow_plaintext_token: _Plaintext = False,
) -> Credentials:
    return Credentials(
        # Never a flag: anybody on the machine reads those.
        token=os.environ.get(TOKEN_VARIABLE, ""),
        token_file=token_file or "",
        tls=tls,
        tls_ca=tls_ca or "",
        tls_cert=tls_cert or "",
        tls_key=tls_key or "",
        allow_plaintext_token=allow_plaintext_token,
    )


def takes_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags; its keyword `credentials` is what they say."""
    own = inspect.signature(command, eval_str=True)
    flags = tuple(inspect.signature(_credentials, eval_str=True).parameters.values())

    @wraps(command)
    def with_flags(**given: Any) -> None:
        said = {flag.name: given.pop(flag.name) for flag in flags}
        command(**given, credentials=_credentials(**said))

    others = [each for each in own.parameters.values() if each.name != "credentials"]
    with_flags.__signature__ = own.replace(parameters=[*others, *flags])  # type: ignore[attr-defined]
    return with_flags
