"""The answers of `make bench-answer` so far, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answer_points import Answer, Case, complete, differences, points
from benchmarks.harness import provenance


@dataclass(slots=True)
class Record:
    """All answers of one file, and the reasons of cases that are not available.

    settings: what all answers have in common. versions: of peers that have answered.
    sparse: systems that answer some of the prompts only.
    """

    path: Path
    sparse: Collection[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    unavailable: dict[Case, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def resume(self, settings: Mapping[str, Any]) -> None:
        """Continue the file, if it exists; what was not available is tried again.

        Raises:
            ValueError: it has other settings, or none.
        """
        self.settings = settings
        if not self.path.exists():
            return
        stored = _parsed(self.path)
        theirs = stored.get("settings", {})
        if other := [name for name in settings if theirs.get(name) != settings[name]]:
            raise ValueError(
                f"{self.path} has answers with another {', '.join(other)}: move it away, or give"
                " another --out"
            )
        self.answers += [Answer(**answer) for answer in stored["answers"]]
        self.versions |= stored["versions"]

    @property
    def compared(self) -> list[Answer]:
        """The answers that points and differences are of."""
        return complete(self.answers, self.unavailable, self.sparse)

    def result(self) -> dict[str, Any]:
        """The content of the JSON line."""
        measured = points(self.compared)
        return {
            "prompts": max((point.prompts for point in measured), default=0),
            "max_tokens": self.settings["max_tokens"],
            "points": [asdict(point) for point in measured],
            "paired": [asdict(difference) for difference in differences(self.compared)],
            "unavailable": {f"{name} n={n}": why for (name, n), why in self.unavailable.items()},
        }

    def store(self) -> None:
        """Write the result and all answers in one step: an interruption leaves a whole file."""
        content = {
            **self.result(),
            **provenance(),
            "reward": self.settings["reward"],
            "settings": self.settings,
            "versions": self.versions,
            "answers": [asdict(answer) for answer in self.answers],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        new.replace(self.path)


def _parsed(path: Path) -> dict[str, Any]:
    """Raises ValueError, with the file's name, if it is not JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; move it away") from None
    return content
