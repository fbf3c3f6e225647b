"""Digests of model directories."""

from __future__ import annotations

from pathlib import Path

from specrej import fingerprint


def test_a_change_within_a_large_file_is_noticed(tmp_path: Path) -> None:
    """Guards against a merged adapter, which leaves the beginning and the end of a file as they
    are, that passes for the model it was merged into."""
    weights = tmp_path / "model.safetensors"
    plain = bytearray(20 << 20)
    weights.write_bytes(plain)
    before, whole = fingerprint.of_directory(tmp_path), len(fingerprint.sample(weights))
    plain[5 << 20 : 6 << 20] = b"x" * (1 << 20)
    weights.write_bytes(plain)
    assert fingerprint.of_directory(tmp_path) != before
    assert whole == 4 << 20
    assert fingerprint.sample(weights).endswith(bytes(1 << 16))


def test_a_small_file_counts_whole(tmp_path: Path) -> None:
    """Guards against samples of files whose every byte is read in no time."""
    (tmp_path / "config.json").write_bytes(b"{}" * (1 << 20))
    assert fingerprint.sample(tmp_path / "config.json") == b"{}" * (1 << 20)
