"""Digests of model directories."""

from __future__ import annotations

from pathlib import Path

from specrej import fingerprint


def test_a_change_within_a_large_file_is_noticed(tmp_path: Path) -> None:
    """Guards against a merged adapter, which leaves the beginning and the end of a file as they
    are, that passes for the model it was merged into."""
    weights = tmp_path / "model.safetensors"
    plain = bytearray(20 << 20)
    plain[0], plain[-1] = b"az"
    weights.write_bytes(plain)
    before, sampled = fingerprint.of_directory(tmp_path), fingerprint.sample(weights)
    assert (len(sampled), sampled[0], sampled[-1]) == (4 << 20, *b"az")
    plain[5 << 20 : 6 << 20] = b"x" * (1 << 20)
    weights.write_bytes(plain)
    assert fingerprint.of_directory(tmp_path) != before
