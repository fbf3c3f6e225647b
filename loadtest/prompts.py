"""Prompts from a text file with one prompt per line."""

from __future__ import annotations

from pathlib import Path

OWN_PROMPTS = Path(__file__).with_name("prompts.txt")


def read_prompts(path: Path = OWN_PROMPTS) -> tuple[str, ...]:
    """The file's lines without blank lines and lines that begin with "#".

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no prompt.
    """
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts
