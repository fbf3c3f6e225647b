"""Prompt files: JSON (a list) or JSON lines.

An item is a text, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}. The
latter two may have an "id".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrej.contracts import Message, Prompt

# The prompts of this repository, used by default.
DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt; `number` is its index among those of all files."""

    id: str
    number: int
    prompt: Prompt


def read_prompts(paths: Sequence[Path], limit: int = 0) -> tuple[Item, ...]:
    """The first `limit` prompts of these files, one file after the other; 0: all.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not valid; the message has the number of the item.
    """
    items: list[Item] = []
    for path in paths:
        values, first = _parse(path), len(items)
        if not values:
            raise ValueError(f"{path} holds no prompts")
        items += [_item(first + index, index, value, path) for index, value in enumerate(values)]
    ids = [item.id for item in items]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{paths[-1]}: ids must be unique: {', '.join(repeated)}")
    return tuple(items[: limit or None])


def _parse(path: Path) -> list[Any]:
    text = path.read_text("utf-8")
    try:
        if text.lstrip().startswith("["):
            whole = json.loads(text)
            return whole if isinstance(whole, list) else []
        # Not splitlines(), which also splits at characters that JSON strings may contain.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is neither JSON nor JSON lines: {error}") from None


def _item(number: int, index: int, value: Any, path: Path) -> Item:
    fields: Any = {"prompt": value} if isinstance(value, str) else value
    try:
        if "messages" in fields:
            turns = (
                Message(str(turn["role"]), str(turn["content"])) for turn in fields["messages"]
            )
            prompt = Prompt(messages=tuple(turns))
        else:
            prompt = Prompt.from_user(str(fields["prompt"]))
    except (KeyError, TypeError):
        prompt = None
    if prompt is None or not any(turn.text.strip() for turn in prompt.turns):
        raise ValueError(f'{path}: item {index + 1} must have a "prompt" or "messages"')
    return Item(str(fields.get("id", f"{number:03d}")), number, prompt)
