"""The secret behind the cache's keys and values, and sealed values. Standard library only."""

from __future__ import annotations

import hmac
import zlib
from functools import partial
from pathlib import Path

from specrej.reloading_file import ReloadingFile

MIN_SECRET_BYTES, MAX_SECRET_BYTES = 32, 4096
COMPRESS_ABOVE_BYTES = 1024
_MAC_BYTES = 32


class Secret:
    """Keyed hashes: HMAC-SHA256 with the secret in a file, which is read again when it changes.

    Without a file the key is empty: hashes then detect damage only, and are no protection.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Raises OSError or ValueError: the file cannot be used."""
        self._key = file and ReloadingFile((file,), partial(_read, file))
        self._keyed = b"", hmac.new(b"", digestmod="sha256")  # the latest key and its first block

    def hash(self, purpose: str, data: bytes) -> bytes:
        """32 bytes; equal data have unrelated hashes for different purposes."""
        key = self._key.get() if self._key else b""
        keyed = self._keyed  # read once: large answers are sealed in threads
        if key != keyed[0]:
            keyed = self._keyed = key, hmac.new(key, digestmod="sha256")
        digest = keyed[1].copy()
        digest.update(purpose.encode() + b"\0" + data)
        return digest.digest()


def _read(file: Path) -> bytes:
    secret = file.read_bytes().strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(f"{file} must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes")
    return secret


def seal(text: bytes, key: str, secret: Secret, max_bytes: int) -> bytes:
    """The value to store under `key`: a MAC of key and stream, then the text in that zlib stream.

    Up to 1 KiB the stream is not compressed. Both sizes are limited to `max_bytes`.

    Raises:
        ValueError: the text is too large.
    """
    # Level 1 is the fastest that compresses: this may run on the event loop.
    stream = zlib.compress(text, level=1 if len(text) > COMPRESS_ABOVE_BYTES else 0)
    if max(len(text), _MAC_BYTES + len(stream)) > max_bytes:
        raise ValueError(f"{len(text)} bytes, {max_bytes} allowed")
    return mac(key, stream, secret) + stream


def unseal(key: str, stored: object, secret: Secret, max_bytes: int) -> bytes:
    """The text in a stored value; decompresses at most `max_bytes`.

    Raises:
        ValueError: not a whole value, stored under this key with this secret.
    """
    if not isinstance(stored, bytes) or len(stored) > max_bytes:
        raise ValueError("not a string of an allowed size")
    stream = stored[_MAC_BYTES:]
    if not hmac.compare_digest(stored[:_MAC_BYTES], mac(key, stream, secret)):
        raise ValueError("corrupt, stored under another key or with another secret")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stream, max_bytes + 1)
    except zlib.error as error:
        raise ValueError("corrupt") from error
    if not inflater.eof or inflater.unused_data or len(text) > max_bytes:
        raise ValueError("truncated, too large or followed by other bytes")
    return text


def mac(key: str, stream: bytes, secret: Secret) -> bytes:
    """The MAC of a stream under `key`, which has the format's version and contains no NUL."""
    return secret.hash("answer", key.encode() + b"\0" + stream)
