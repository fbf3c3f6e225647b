"""The secret behind the cache's keys and values. Standard library only."""

from __future__ import annotations

import hmac
from functools import partial
from pathlib import Path

from specrej.reloading_file import ReloadingFile

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096


class Secret:
    """Keyed hashes: HMAC-SHA256 with the secret in a file, which is read again when it changes.

    Without a file the key is empty: hashes then detect damage only, and are no protection.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Raises OSError or ValueError: the file cannot be used."""
        self._key = ReloadingFile((file,), partial(_read, file)) if file else None

    def hash(self, purpose: str, data: bytes) -> bytes:
        """32 bytes; equal data have unrelated hashes for different purposes."""
        key = self._key.get() if self._key else b""
        return hmac.digest(key, purpose.encode() + b"\0" + data, "sha256")


def _read(file: Path) -> bytes:
    secret = file.read_bytes().strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(f"{file} must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes")
    return secret
