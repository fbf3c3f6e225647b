"""Prompt files: JSON (a list) or JSON lines.

An item is a text, {"prompt": text} or {"messages": [{"role": ..., "content": ...}, ...]}; an "id"
may come with the latter two. Knows nothing of what is done with prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrej.contracts import Message, Prompt

# The project's own.
SHIPPED = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a file; `number` is its place there, from 0."""

    id: str
    number: int
    prompt: Prompt


def read_prompts(path: Path, limit: int = 0) -> tuple[Item, ...]:
    """The prompts of a file, the first `limit` of them if that is not 0.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file; says which item is wrong.
    """
    plain = _plain(path)
    if not plain:
        raise ValueError(f"{path} holds no prompts")
    items = [_item(number, each, path) for number, each in enumerate(plain)]
    names = [item.id for item in items]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: ids must be there once: {', '.join(repeated)}")
    return tuple(items[: limit or None])


def _plain(path: Path) -> list[Any]:
    text = path.read_text("utf-8")
    try:
        if text.lstrip().startswith("["):
            whole = json.loads(text)
            return whole if isinstance(whole, list) else []
        # Not splitlines: JSON may hold other characters that end a line for it.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is neither JSON nor JSON lines: {error}") from None


def _item(number: int, plain: Any, path: Path) -> Item:
    item = {"prompt": plain} if isinstance(plain, str) else plain
    try:
        prompt = _prompt(item)
    except (KeyError, TypeError):
        prompt = None
    if prompt is None or not any(turn.content.strip() for turn in prompt.turns):
        raise ValueError(f'{path}: item {number + 1} must have a "prompt" or "messages"')
    return Item(str(item.get("id", f"{number:03d}")), number, prompt)


def _prompt(item: dict[str, Any]) -> Prompt:
    if "messages" not in item:
        return Prompt.from_user(str(item["prompt"]))
    turns = (Message(str(turn["role"]), str(turn["content"])) for turn in item["messages"])
    return Prompt(messages=tuple(turns))
