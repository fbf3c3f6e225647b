"""Stored values: what is written is read again, and anything else is rejected."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache import Secret
from orchestrator.cache.answers import MAX_BYTES, mac, pack, unpack
from specrej.contracts import Generation, TokenLogprob, TopLogprobs
from tests.orchestrator.caching import SECRET, generation


def packed(generation: Generation) -> bytes:
    return pack(generation, "k", SECRET)


def unpacked(value: object) -> Generation:
    return unpack("k", value, SECRET)


def sealed(stream: bytes) -> bytes:
    """The value of a stream, with a valid MAC."""
    return mac("k", stream, SECRET) + stream


def text_in(value: bytes) -> bytes:
    """The JSON in a value."""
    return zlib.decompress(value[32:])


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.text(), _FLOATS, st.lists(_FLOATS, max_size=5), st.binary(max_size=5))
def test_any_finite_answer_survives_packing(
    text: str, score: float, logprobs: list[float], token: bytes
) -> None:
    """Guards against rounded numbers, altered texts or lost tokens, such as half a character."""
    answer = generation(text, score)
    ids = tuple(range(len(logprobs)))
    top = tuple(TopLogprobs((TokenLogprob(i, token, logprobs[i]),)) for i in ids)
    best = replace(
        answer.best,
        token_ids=ids,
        logprobs=tuple(logprobs),
        tokens=(token,) * len(ids),
        top_logprobs=top,
    )
    answer = replace(answer, candidates=(best,))
    assert unpacked(packed(answer)) == answer


def test_a_value_of_another_length_is_rejected() -> None:
    """Guards against half an answer, and bytes after it: every other length is rejected."""
    value = packed(generation())
    for wrong in (value + b"\0", *(value[:length] for length in range(len(value)))):
        with pytest.raises(ValueError):
            unpacked(wrong)


def test_a_value_is_bound_to_its_key_and_secret(tmp_path: Path) -> None:
    """Guards against an answer that another program wrote, or moved to another key."""
    secrets = [SECRET]
    for number in range(2):
        file = tmp_path / f"secret-{number}"
        file.write_bytes(bytes([65 + number]) * 32)
        secrets.append(Secret(file))
    entry = generation()
    for writer in secrets:
        value = pack(entry, "k", writer)
        for reader in secrets:
            for key in ("k", "other"):
                if (reader, key) == (writer, "k"):
                    assert unpack(key, value, reader) == entry
                else:
                    with pytest.raises(ValueError, match="another"):
                        unpack(key, value, reader)


def _altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A value whose JSON is changed."""
    stored = json.loads(text_in(packed(generation())))
    change(stored[0])
    return sealed(zlib.compress(json.dumps(stored).encode()))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(more=1),
        lambda e: e.update(candidates=[]),
        lambda e: e.pop("usage"),
        lambda e: e["candidates"][0].update(score=float("nan")),
        lambda e: e["candidates"][0].update(score=None),
        lambda e: e["candidates"][0].update(finish="other"),
        lambda e: e["candidates"][0].update(token_ids=["7"]),
        lambda e: e["candidates"][0].update(logprobs=[float("-inf")]),
        lambda e: e["candidates"][0].update(vetoed=1),
    ],
)
def test_a_wrong_value_is_rejected(change: Callable[[dict[str, Any]], object]) -> None:
    """Guards against missing answers and infinite numbers."""
    assert unpacked(_altered(lambda e: None)) == generation()
    with pytest.raises(ValueError):
        unpacked(_altered(change))


def test_decompression_is_bounded() -> None:
    """Guards against a megabyte that inflates to a gigabyte in memory."""
    bomb = sealed(zlib.compress(b"\0" * (64 << 20)))
    assert len(bomb) < MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too large"):
            unpacked(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_the_size_limit_is_the_same_for_reading_and_writing() -> None:
    """Guards against a value of the permitted size that can be written but never read."""
    num_others = len(text_in(packed(generation(""))))
    answer = generation("x" * (MAX_BYTES - num_others))
    assert unpacked(packed(answer)) == answer
    with pytest.raises(ValueError):
        packed(generation(answer.best.text + "x"))
