"""The revision that `make mixed-versions` takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.mixed_versions import last_release


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
