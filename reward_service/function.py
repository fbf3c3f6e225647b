"""A reward that is a Python function, named by its dotted path such as "my_rewards:brevity".

It is called with the prompt (`specrej.Prompt`) and a list of responses, and returns a number
for each, higher is better. It gets texts as they are, finished or not.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from reward_service.reward import WholeBatchReward
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scores
from specrej.errors import RewardInvalid

# What can be iterated, but not text by text in the order asked.
_NO_SEQUENCES = (Mapping, Set, str, bytes)


class FunctionReward(WholeBatchReward):
    """Raises ValueError: there is no such function."""

    def __init__(self, name: str, path: str) -> None:
        self._function = _find(path)
        told = inspect.getdoc(self._function) or f"What {path} says."
        super().__init__(name, _fingerprint(path), told.split("\n")[0])

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        values = self._function(prompt, [candidate.text for candidate in candidates])
        try:
            if isinstance(values, _NO_SEQUENCES):
                raise TypeError
            return Scores(tuple(float(value) for value in values))
        except (TypeError, ValueError, OverflowError) as error:
            text = f"reward {self.name} returned no numbers"
            raise RewardInvalid(text, metadata={"reward": self.name}) from error


def _find(path: str) -> Callable[[Prompt, list[str]], Sequence[float]]:
    module_name, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(f"function {path}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ValueError(f"function {path}: cannot be called")
    function: Callable[[Prompt, list[str]], Sequence[float]] = found
    return function


def _fingerprint(path: str) -> str:
    """With the module's file: whoever edits it gets new answers, not cached ones."""
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    digest = fingerprint.of_file(Path(file)) if file else ""
    return fingerprint.of_values(kind="function", path=path, file=digest)
