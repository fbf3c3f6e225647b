"""Tokens with tenants and roles, certificates, and the credentials of clients.

A tokens file has one JSON object per line, blank lines and lines that begin with # apart:

    {"tenant": "acme", "sha256": "<hex SHA-256 of the token>", "roles": ["generate"]}

The file holds digests only, so that reading it grants no access. Roles are `generate` (the
default), `gateway` (generate for the tenant that the metadata names) and `admin` (describe only).
One line of a tenant may also have its `weight`, 1 by default: its part of the capacity is in
proportion to it where several tenants wait.
A line may have `"expires": "2030-12-31T23:59:59Z"` (ISO 8601), the end of its token's validity.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
import secrets
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit

from specrej.contracts.errors import InvalidRequest, PermissionDenied, Unauthenticated, Violation
from specrej.reloading_file import ReloadingFile

TENANT_METADATA = "specrej-tenant"
TOKEN_METADATA = "authorization"
_SCHEME = "bearer "
_CERTIFIED_NAMES = "x509_subject_alternative_name"

OURS = "/specrej."
_HEALTH = "/grpc.health.v1.Health/"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = {"tenant", "sha256", "roles", "weight", "expires"}
_LEAST_WEIGHT = 0.01

TOKEN_VARIABLE = "SPECREJ_TOKEN"

_PLAINTEXT = "a token would go to {} in plaintext: use TLS, or allow_plaintext_token"

# Values of SPECREJ_TLS.
_SWITCHES = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off", ""), False
)

# What HTTP allows in a bearer token (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")

Metadata = Iterable[tuple[str, str | bytes]]


class Role(StrEnum):
    """What a token permits."""

    GENERATE = "generate"
    GATEWAY = "gateway"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """A call's tenant and roles. Tenants share neither cached answers nor prompt prefixes."""

    tenant: str = ""
    roles: frozenset[Role] = frozenset()
    weight: float = 1.0


# Set by the interceptor for the task of a call and the tasks it starts.
_caller: ContextVar[Caller] = ContextVar("specrej_caller")
_ANONYMOUS = Caller()


def current_caller() -> Caller:
    """The caller of the call that this task serves."""
    return _caller.get(_ANONYMOUS)


def set_caller(caller: Caller) -> None:
    """Set the caller for the rest of this task."""
    _caller.set(caller)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a tokens file."""

    tenant: str
    roles: frozenset[Role]
    weight: float
    expires: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokens file: its lines by the SHA-256 digest of their token, and weights by tenant.

    A tenant's weight is that of any of its lines.
    """

    entries: Mapping[bytes, Entry]
    weights: Mapping[str, float]


class Access:
    """Admits calls by the peer's certificate, token and role; without a tokens file, any token."""

    def __init__(
        self, tokens_file: Path | None = None, allowed_clients: Collection[str] = ()
    ) -> None:
        """`allowed_clients`: names of certificates, one of which a peer must have; empty: any.

        Raises OSError or ValueError: the file cannot be read.
        """
        self.allowed_clients = frozenset(allowed_clients)
        self._tokens: ReloadingFile[Tokens] | None = None
        if tokens_file:
            self._tokens = ReloadingFile((tokens_file,), partial(read_tokens, tokens_file))

    def check_peer(self, method: str, identity: Mapping[str, Iterable[bytes]]) -> None:
        """Check the certificate of a call's peer, grpc's `auth_context`; health accepts any.

        Raises:
            PermissionDenied: it has none of the allowed names.
        """
        names = {name.decode(errors="replace") for name in identity.get(_CERTIFIED_NAMES, ())}
        if not (names & self.allowed_clients or method.startswith(_HEALTH)):
            raise PermissionDenied("the client's certificate has none of the allowed names")

    def admit(self, method: str, metadata: Metadata) -> Caller:
        """The caller of `method`, "/package.Service/Method".

        Raises:
            Unauthenticated: a missing, unknown or expired token.
            PermissionDenied: the token lacks the role.
            InvalidRequest: two tenants.
        """
        given = tuple(metadata)
        if method.startswith(_HEALTH):
            return _ANONYMOUS  # probes have no tokens
        if not self._tokens:
            return Caller(_tenant_of(given))
        tokens = self._tokens.get()
        entry = _find(tokens, _token_of(given))
        needed = _roles_for(method)
        if not entry.roles & needed:
            names = ", ".join(sorted(needed))
            raise PermissionDenied(
                "the token lacks the role for this call", metadata={"roles": names}
            )
        named = _tenant_of(given)
        tenant = entry.tenant
        if Role.GATEWAY in entry.roles:
            tenant = named or tenant
        return Caller(tenant, entry.roles, tokens.weights.get(tenant, 1.0))


def _roles_for(method: str) -> frozenset[Role]:
    """`generate` calls need a role; describe and reflection accept any valid token."""
    if method.startswith(OURS) and not method.endswith("/Describe"):
        return frozenset((Role.GENERATE, Role.GATEWAY))
    return frozenset(Role)


def _tenant_of(metadata: Metadata) -> str:
    tenants = [str(value) for key, value in metadata if key == TENANT_METADATA]
    if len(tenants) > 1:
        raise InvalidRequest([Violation(TENANT_METADATA, "must be given once")])
    return tenants[0] if tenants else ""


def _token_of(metadata: Metadata) -> str:
    values = [str(value) for key, value in metadata if key == TOKEN_METADATA]
    if len(values) != 1 or not values[0].lower().startswith(_SCHEME):
        raise Unauthenticated("a token is needed: metadata authorization, Bearer TOKEN")
    return values[0][len(_SCHEME) :].strip()


def _find(tokens: Tokens, token: str) -> Entry:
    # Not in constant time: what the duration could reveal is about digests, not about tokens.
    known = tokens.entries.get(_digest(token))
    if known is None:
        raise Unauthenticated("unknown token")
    if time.time() >= known.expires:
        raise Unauthenticated("the token has expired")
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def read_tokens(path: Path) -> Tokens:
    """What a tokens file has; an empty file is valid and admits no call.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is invalid; the message has its number and quotes nothing.
    """
    lines = enumerate(path.read_text("utf-8", "replace").split("\n"), 1)
    entries: dict[bytes, Entry] = {}
    weights: dict[str, float] = {}
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            digest, entry = _entry(line)
            weight = entry.weight
            if entries.setdefault(digest, entry) is not entry:
                raise ValueError("the same token twice")
            if weight != 1 and weights.setdefault(entry.tenant, weight) != weight:
                raise ValueError("two weights of one tenant")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return Tokens(entries, weights)


def _entry(line: str) -> tuple[bytes, Entry]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not given.keys() <= _FIELDS:
        raise ValueError(f"must be a JSON object of {', '.join(sorted(_FIELDS))}")
    tenant, digest, expires = (given.get(key) for key in ("tenant", "sha256", "expires"))
    if not isinstance(tenant, str) or not tenant:
        raise ValueError("tenant must be a name")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("sha256 must be 64 hex digits")
    end = math.inf if expires is None else time_of(expires)
    return bytes.fromhex(digest), Entry(
        tenant, _roles(given.get("roles")), _weight(given.get("weight", 1.0)), end
    )


def time_of(given: Any) -> float:
    """Seconds since the epoch of a time in ISO 8601, with its zone.

    Raises:
        ValueError: it is not such a time.
    """
    with suppress(TypeError, ValueError):
        end = datetime.fromisoformat(given)
        if end.tzinfo:
            return end.timestamp()
    raise ValueError("expires must be a time as 2030-12-31T23:59:59Z")


def _roles(given: object) -> frozenset[Role]:
    if given is None:
        return frozenset((Role.GENERATE,))
    if not isinstance(given, list) or not given or not all(role in list(Role) for role in given):
        raise ValueError(f"roles must be a list of {', '.join(Role)}")
    return frozenset(Role(role) for role in given)


def _weight(weight: Any) -> float:
    if type(weight) not in (int, float) or not _LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT:
        raise ValueError(f"weight must be from {_LEAST_WEIGHT} to {1 / _LEAST_WEIGHT:g}")
    return float(weight)


def new_token(tenant: str, roles: Iterable[Role] = (), expires: str = "") -> tuple[str, str]:
    """A new token, and its line for a tokens file; `expires` is in ISO 8601, empty: never."""
    token = secrets.token_urlsafe(32)
    line: dict[str, object] = {"tenant": tenant, "sha256": _digest(token).hex()}
    if names := sorted(set(roles)):
        line["roles"] = names
    if expires:
        line["expires"] = expires
    return token, json.dumps(line)


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
            try:
                context.load_verify_locations(cadata=ca.decode("ascii", "replace"))
            except (ssl.SSLError, ValueError):
                raise ValueError(f"{self.ca} holds no PEM certificates") from None
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
