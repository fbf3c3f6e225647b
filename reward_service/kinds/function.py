"""A reward that is a Python function, named by its dotted path such as "my_rewards:brevity".

Its arguments are the prompt (`specrej.Prompt`) and a list of responses; it returns a number for
each, higher is better. If it has a parameter `finished`, it gets a list of booleans by that name:
whether each response ended by itself. If it has a parameter `data`, it gets the request's JSON for
this reward, decoded, or None.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from reward_service.reward import Reward
from reward_service.specs import FunctionSpec, Resources
from specrej import fingerprint
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import RewardInvalid


class FunctionReward(Reward):
    """Scores by a Python function. Raises ValueError: there is no such function."""

    def __init__(self, spec: FunctionSpec, resources: Resources) -> None:
        path = spec.function
        self._function, digest = import_function(path)
        self._takes_finished = _has_parameter(self._function, "finished")
        self.takes_data = _has_parameter(self._function, "data")
        description = inspect.getdoc(self._function) or f"The values of {path}."
        self.name = spec.name
        self.fingerprint = fingerprint.of_values(kind="function", path=path, file=digest)
        self.description = description.split("\n")[0]

    def open_with(self, prompt: Prompt, data: str) -> tuple[Prompt, str]:
        return prompt, data

    def score(self, session: Any, candidates: Sequence[Candidate]) -> Scores:
        prompt, data = session if self.takes_data else (session, "")
        finished = [candidate.finish is FinishReason.STOP for candidate in candidates]
        options: dict[str, Any] = {"finished": finished} if self._takes_finished else {}
        if self.takes_data:
            options["data"] = json.loads(data) if data else None
        values = self._function(prompt, [candidate.text for candidate in candidates], **options)
        try:
            if isinstance(values, (Mapping, Set, str, bytes)):
                raise TypeError  # can be iterated, but not as one number per text in order
            return Scores(tuple(float(value) for value in values))
        except (TypeError, ValueError, OverflowError) as error:
            text = f"reward {self.name} did not return numbers"
            raise RewardInvalid(text, metadata={"reward": self.name}) from error


def import_function(path: str) -> tuple[Callable[..., Any], str]:
    """The function, and a digest of its module's file: answers that were cached before an edit are
    not used after it.

    Raises:
        ValueError: there is no such function.
    """
    try:
        function: Any = resolve_name(path)
    except Exception as error:  # anything that the module's own code raises
        raise ValueError(f"function {path}: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise ValueError(f"function {path}: cannot be called")
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    return function, fingerprint.of_file(Path(file)) if file else ""


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # some functions written in C have no signature
        return False
