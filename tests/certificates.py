"""Real certificates and tokens files, put in place as operators do: by renaming."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a certificate and its key are."""

    cert: Path
    key: Path

    @property
    def settings(self) -> dict[str, str]:
        """Of a service that presents the certificate."""
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}


class Authority:
    """Signs certificates of this machine."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._directory = directory
        self.path = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.path))

    def issue(
        self,
        name: str = "server",
        *identities: str,
        expires: datetime | None = None,
        nameless: bool = False,
    ) -> Pair:
        """A new certificate and key in place of those of that name; `identities` are more names.
        `nameless`: with a subject and no alternative names."""
        names = () if nameless else ("localhost", "127.0.0.1", *identities)
        made = self._authority.issue_cert(*names, common_name=name, not_after=expires)
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        place(pair.key, made.private_key_pem.bytes())
        place(pair.cert, b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return pair


def place(path: Path, content: bytes | str) -> None:
    """Replace a file, or make it, at once."""
    written = path.with_name(f"{path.name}.new")
    written.write_bytes(content.encode() if isinstance(content, str) else content)
    written.replace(path)


def token_line(tenant: str, token: str, **fields: Any) -> str:
    """The line of a token in a tokens file."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return json.dumps({"tenant": tenant, "sha256": digest, **fields})
