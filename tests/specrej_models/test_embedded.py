"""Placing an embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrej_models import embedded


def test_model_is_placed_whole_and_readable_by_others(tmp_path: Path) -> None:
    """Guards services of another user: scratch directories are private. A second run changes
    nothing, since a running service may have the files open."""
    directory = tmp_path / "deep" / "relevance"
    embedded.prepare(directory)
    assert directory.stat().st_mode & 0o055 == 0o055
    assert [*directory.parent.iterdir()] == [directory]
    before = directory.stat()
    embedded.prepare(directory)
    assert os.path.samestat(directory.stat(), before)


def test_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """Guards against half a model, or a user's files, being silently replaced."""
    mine = tmp_path / "relevance" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        embedded.prepare(mine.parent)
    assert [*tmp_path.iterdir(), *mine.parent.iterdir()] == [mine.parent, mine]
