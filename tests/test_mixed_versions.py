"""`make mixed-versions` by one of its cases, and the revision that it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.mixed_versions import failures, last_release, unpack


async def test_an_orchestrator_of_the_last_commit_works_with_this_tree(tmp_path: Path) -> None:
    """Guards against a schema that parts of two versions read differently. The orchestrator calls
    both backends and is called by client and gateway."""
    unpack("HEAD", tmp_path)
    assert await failures(tmp_path, ["orchestrator"]) == []


def test_the_base_is_the_last_release(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=first")
    git("tag", "other")
    assert last_release(tmp_path) == "HEAD"
    git("tag", "v0.1.0")
    git("commit", "--quiet", "--allow-empty", "--message=second")
    assert last_release(tmp_path) == "v0.1.0"
