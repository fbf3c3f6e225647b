"""Certificate and token files, and the credentials of clients."""

from __future__ import annotations

import ipaddress
import math
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from specrej.contracts.errors import InvalidRequest, Violation
from specrej.reloading_file import ReloadingFile

TOKEN_VARIABLE = "SPECREJ_TOKEN"

_PLAINTEXT = "a token would go to {} in plaintext: use TLS, or allow_plaintext_token"

# Values of SPECREJ_TLS.
_SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off", ""), False
)

# What HTTP allows in a bearer token (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


class Credentials(TypedDict, total=False):
    """A client's identity and the authorities it trusts; an empty value means none."""

    token: str  # sent with every call
    token_file: str | Path  # a file with the token, read again when it changes
    tls: bool  # trust the system's authorities; the next three imply TLS
    tls_ca: str | Path  # trust only these authorities
    tls_cert: str | Path  # the client's certificate, for mutual TLS
    tls_key: str | Path
    allow_plaintext_token: bool  # send the token to other machines without TLS


def credentials_from(environment: Mapping[str, str]) -> Credentials:
    """Credentials from environment variables: SPECREJ_TOKEN, SPECREJ_TLS_CA and so on.

    Raises:
        InvalidRequest: SPECREJ_TLS is neither true nor false.
    """

    def variable(name: str) -> str:
        return environment.get(f"SPECREJ_{name}", "")

    tls = _SWITCHES.get(variable("TLS").strip().lower())
    if tls is None:
        accepted = ", ".join(filter(None, _SWITCHES))
        raise InvalidRequest([Violation("SPECREJ_TLS", f"must be one of {accepted}")])
    return Credentials(
        token=environment.get(TOKEN_VARIABLE, ""),
        token_file=variable("TOKEN_FILE"),
        tls=tls,
        tls_ca=variable("TLS_CA"),
        tls_cert=variable("TLS_CERT"),
        tls_key=variable("TLS_KEY"),
    )


@dataclass(frozen=True, slots=True)
class PEM:
    """The contents of TLSFiles; the key is neither compared nor printed."""

    cert: bytes | None
    key: bytes | None = field(repr=False, compare=False)
    ca: bytes | None

    @property
    def expires(self) -> float:
        """The first end of a certificate of the chain, in seconds since the epoch."""
        if self.cert is None:
            return math.inf
        from cryptography import x509  # only servers report it

        chain = x509.load_pem_x509_certificates(self.cert)
        return min(certificate.not_valid_after_utc.timestamp() for certificate in chain)


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """Paths of a certificate chain, its key, and the trusted authorities."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path)

    def read(self) -> PEM:
        """Raises OSError or ValueError if a file is missing, is not PEM, or does not match."""
        if bool(self.cert) != bool(self.key):
            raise ValueError("a certificate and its key go together: one of them is missing")
        cert, key, ca = (p.read_bytes() if p else None for p in (self.cert, self.key, self.ca))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca is not None:
            _check_authorities(context, ca, self.ca)
        if self.cert and self.key:
            _check_pair(context, self.cert, self.key)
        return PEM(cert, key, ca)

    def watch(self) -> ReloadingFile[PEM]:
        """The current contents."""
        return ReloadingFile(self.paths, self.read)

    def server_context(self, watched: ReloadingFile[PEM]) -> ssl.SSLContext:
        """A server's context, which uses changed files of `watch` from the next connection on.

        With authorities, clients must have a certificate from one of them.
        """
        pem, latest = watched.get(), self._context()

        def current() -> ssl.SSLContext:
            nonlocal pem, latest
            if (changed := watched.get()) is not pem:
                with suppress(OSError):  # they are being replaced once more
                    pem, latest = changed, self._context()
            return latest

        context = _RenewedContext(ssl.PROTOCOL_TLS_SERVER)
        context.current = current
        return context

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        assert self.cert, "a server has a certificate"
        context.load_cert_chain(self.cert, self.key)
        if self.ca:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would outlive its client's certificate.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


class _RenewedContext(ssl.SSLContext):
    """Begins each connection in the `current` context.

    A change of the context during a handshake would leave the sessions where they were: clients of
    a removed authority could resume theirs without their certificates being verified again.
    """

    current: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.current().wrap_bio(*arguments, **options)


def _check_authorities(context: ssl.SSLContext, pem: bytes, path: Path | None) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path} holds no PEM certificates") from None


def _check_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        # Without a password, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key} is not the key of {cert}") from None
        raise ValueError(
            f"{cert} and {key} must be a PEM certificate and its key, without a password"
        ) from None


def tls_files(given: Credentials) -> TLSFiles | None:
    """The files of a client's TLS; None for plaintext."""
    cert, key, ca = (
        Path(path) if path else None
        for path in (given.get("tls_cert"), given.get("tls_key"), given.get("tls_ca"))
    )
    return TLSFiles(cert, key, ca) if given.get("tls") or cert or key or ca else None


def watch_token(given: Credentials) -> ReloadingFile[str] | None:
    """The current token to send; None: no token.

    Raises:
        OSError, ValueError: the token cannot be read or is malformed.
    """
    if token_file := given.get("token_file"):
        path = Path(token_file)
        return ReloadingFile((path,), partial(_read_token, path))
    if token := given.get("token"):
        return ReloadingFile((), partial(_checked_token, token, "the token"))
    return None


def _read_token(path: Path) -> str:
    return _checked_token(path.read_text("ascii", "replace").strip(), str(path))


def _checked_token(token: str, name: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{name} must be one bearer token: letters, digits and -._~+/=")
    return token


def check_credentials(address: str, given: Credentials) -> None:
    """Raises OSError or ValueError if these cannot be used, or may not be sent, to `address`."""
    files = tls_files(given)
    if files:
        files.read()
    if watch_token(given) and not may_send_token(address, given):
        raise ValueError(_PLAINTEXT.format(address))


def check_token(token: str, address: str, given: Credentials) -> None:
    """Raises ValueError if a call's own token is malformed, or may not be sent to `address`."""
    _checked_token(token, "the token")
    if not may_send_token(address, given):
        raise ValueError(_PLAINTEXT.format(address))


def may_send_token(address: str, given: Credentials) -> bool:
    """Whether no other machine can read a token on its way to `address`, or that is allowed."""
    return bool(tls_files(given) or is_local(address) or given.get("allow_plaintext_token"))


def is_local(address: str) -> bool:
    """Whether what is sent to `address` ("host:port") stays on this machine."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_use_proxy(url: str) -> bool:
    """Whether the environment's proxy may see a call of `url`: it is not for this machine."""
    return not is_loopback(urlsplit(url).hostname or "")


def system_authorities() -> bytes | None:
    """The authorities this system trusts; None: unknown, grpc uses its own."""
    bundle = ssl.get_default_verify_paths().cafile
    return Path(bundle).read_bytes() if bundle else None
