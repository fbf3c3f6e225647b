"""What is stored for an answer: packed, bounded, and checked when it is read. Knows no Redis."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.keys import FORMAT_VERSION, Keys
from specrej.contracts import Generation

COMPRESS_ABOVE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Envelope:
    """An answer as it is stored.

    The key goes along, so that a value under a wrong key is found out; so does the family's, so
    that no index can pass it off as an answer to something else.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )
    version: int
    key: str
    family: str  # its index's key; empty: none
    returned: int  # candidates that were asked for; there may be fewer
    stored_at: float  # seconds since the epoch, on the clock of whoever stored it
    generation: Generation


_ENVELOPE = TypeAdapter(Envelope)


def enclosed(keys: Keys, generation: Generation, stored_at: float) -> Envelope:
    """An answer in its envelope."""
    index, returned = (keys.family.key, keys.family.return_candidates) if keys.family else ("", 1)
    return Envelope(FORMAT_VERSION, keys.answer, index, returned, stored_at, generation)


def pack(envelope: Envelope, max_bytes: int) -> bytes:
    """A value to store: JSON in a zlib stream, at most `max_bytes` of either.

    The stream's first bytes mark how hard it is compressed (not at all up to 1 KiB) and its last
    ones are a checksum, so that short and long values are read, and checked, in one way.

    Raises:
        ValueError: too large, not finite, or otherwise not readable again.
    """
    text = _ENVELOPE.dump_json(envelope)
    _ENVELOPE.validate_json(text)  # numbers that are not finite can be written, but never read
    # The fastest level: this runs on the event loop.
    stored = zlib.compress(text, level=1 if len(text) > COMPRESS_ABOVE_BYTES else 0)
    if max(len(text), len(stored)) > max_bytes:
        raise ValueError(f"{len(text)} bytes, {max_bytes} allowed")
    return stored


def unpack(key: str, stored: object, max_bytes: int) -> Envelope:
    """What is in a stored value; never unpacks more than `max_bytes`.

    Raises:
        ValueError: anything else than a whole value of this format, stored under this key.
    """
    if not isinstance(stored, bytes) or len(stored) > max_bytes:
        raise ValueError("not a value of this cache")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stored, max_bytes + 1)
    except zlib.error as error:
        raise ValueError("corrupt") from error
    if not inflater.eof or inflater.unused_data or len(text) > max_bytes:
        raise ValueError("truncated, too large or followed by something else")
    envelope = _ENVELOPE.validate_json(text)
    if (envelope.version, envelope.key) != (FORMAT_VERSION, key):
        raise ValueError("stored under another key")
    if not envelope.generation.candidates:
        raise ValueError("no answer in it")
    return envelope
