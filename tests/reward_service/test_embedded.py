"""Placing the embedded relevance model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reward_service import embedded


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_the_model_is_placed_whole_and_readable_by_others(tmp_path: Path) -> None:
    """Guards services that run as another user: scratch directories are private."""
    directory = tmp_path / "deep" / "relevance"
    embedded.place(directory)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names(directory))
    assert directory.stat().st_mode & 0o055 == 0o055
    assert names(directory.parent) == ["relevance"]


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    """Guards against pulling a model from under a running service."""
    directory = tmp_path / "relevance"
    embedded.place(directory)
    before = directory.stat()
    embedded.place(directory)
    assert (directory.stat().st_ino, directory.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_files_are_copied_where_links_are_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    embedded.place(tmp_path / "relevance")
    assert (tmp_path / "relevance" / "model.safetensors").stat().st_nlink == 1


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "relevance").mkdir()
    embedded.place(tmp_path / "relevance")
    assert (tmp_path / "relevance" / "config.json").is_file()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Guards against half a model, or a user's files, being silently replaced."""
    mine = tmp_path / "relevance" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        embedded.place(mine.parent)
    assert names(mine.parent) == ["mine.txt"]
    assert names(tmp_path) == ["relevance"]
