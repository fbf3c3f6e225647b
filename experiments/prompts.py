"""Prompt files: JSON (a list) or JSON lines.

An item is a text, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}. The
latter two may have an "id".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrej.contracts import Message, Prompt

# The prompts of this repository, used by default.
DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a file; `number` is its index there."""

    id: str
    number: int
    prompt: Prompt


def read_prompts(path: Path, limit: int = 0) -> tuple[Item, ...]:
    """The first `limit` prompts of a file; 0: all.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not valid; the message has the number of the item.
    """
    values = _parse(path)
    if not values:
        raise ValueError(f"{path} holds no prompts")
    items = [_item(number, value, path) for number, value in enumerate(values)]
    ids = [item.id for item in items]
    if repeated := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: ids must be unique: {', '.join(repeated)}")
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


def _item(number: int, value: Any, path: Path) -> Item:
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
    if prompt is None or not any(turn.content.strip() for turn in prompt.turns):
        raise ValueError(f'{path}: item {number + 1} must have a "prompt" or "messages"')
    return Item(str(fields.get("id", f"{number:03d}")), number, prompt)
