"""Rewards that check texts by a request's data; imports none of their libraries.

A score is in [0, 1]. That of an unfinished text is an upper bound of what any longer text can
score: 1 while nothing is decided. So a veto never rejects a candidate that would have passed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from reward_service.reward import Reward, Task
from reward_service.specs import Resources, Spec
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scores
from specrej.contracts.errors import InvalidRequest, Violation

MAX_CHARACTERS = 1 << 20  # longer texts score 0

# The score of a text, and whether it is final.
Judge = Callable[[str, bool], float]


class Data(BaseModel):
    """What a request gives a verifier."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


D = TypeVar("D", bound=Data)


class Verifier(Reward):
    """Scores texts by the data of their request; a session is its judge."""

    takes_data = True
    token_budget = 1 << 16  # characters
    is_isolated = False  # whether final texts are checked in another process
    data_type: type[Data]

    def __init__(self, spec: Spec, resources: Resources) -> None:
        kind = self.data_type.__name__
        self.name = spec.name
        self.fingerprint = fingerprint.of_values(kind=kind, version=1)

    @abstractmethod
    def prepare(self, data: Any) -> Judge:
        """The judge of a request with this data. Raises InvalidRequest."""

    def open_with(self, prompt: Prompt, data: str) -> Judge:
        return self.prepare(read_data(self.data_type, data, self.sample_data))

    def begin(self, session: Judge, candidates: Sequence[Candidate]) -> Task:
        """A piece for each different text."""
        keys = [(candidate.text, candidate.finish is not None) for candidate in candidates]
        values: dict[tuple[str, bool], float] = {}

        def compute(text: str, is_final: bool) -> None:
            fits = len(text) <= MAX_CHARACTERS
            values[text, is_final] = session(text, is_final) if fits else 0.0

        def cost(text: str, is_final: bool) -> int:
            # A pass takes one text that another process checks, so that sessions take turns.
            return self.token_budget if self.is_isolated and is_final else 1 + len(text)

        pieces = ((cost(*key), partial(compute, *key)) for key in dict.fromkeys(keys))
        return Task(pieces, lambda _: Scores(tuple(values[key] for key in keys)))


def read_data(data_type: type[D], data: str, sample: str) -> D:
    """The data of a request. Raises InvalidRequest."""
    if not data:
        raise InvalidRequest([Violation("data", f"is required, such as {sample}")])
    try:
        return data_type.model_validate_json(data)
    except ValidationError as error:
        raise InvalidRequest(violations_of(error, "data")) from None


def violations_of(error: ValidationError, path: str) -> list[Violation]:
    """What is wrong with data, without its values and without names that it made up."""
    violations = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        is_unknown = item["type"] == "extra_forbidden"
        where = item["loc"][:-1] if is_unknown else item["loc"]
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
        text = "has an unknown field" if is_unknown else item["msg"]
        violations.append(Violation(path + "".join(steps), text))
    return violations


def invalid(path: str, text: str) -> InvalidRequest:
    return InvalidRequest([Violation(path, text)])
