"""Placing the embedded relevance model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reward_service import embedded


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_model_is_placed_whole_and_readable_by_others(tmp_path: Path) -> None:
    """Guards services of another user: scratch directories are private. A second run changes
    nothing, since a running service may have the files open."""
    directory = tmp_path / "deep" / "relevance"
    embedded.place(directory)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names(directory))
    assert directory.stat().st_mode & 0o055 == 0o055
    assert names(directory.parent) == ["relevance"]
    before = directory.stat()
    embedded.place(directory)
    assert os.path.samestat(directory.stat(), before)
    assert directory.stat().st_mtime_ns == before.st_mtime_ns


def test_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """Guards against half a model, or a user's files, being silently replaced."""
    mine = tmp_path / "relevance" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        embedded.place(mine.parent)
    assert names(mine.parent) == ["mine.txt"]
    assert names(tmp_path) == ["relevance"]
