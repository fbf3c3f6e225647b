"""A reward for code: the share of a request's tests that it passes, in a sandbox.

The code is the first complete block of Python in the answer, or with `whole` all of the text, as
models write that complete a function. A text that may still become code that passes scores 1; once
its block is complete, its score is final.

Tests run in the interpreter of the code, which can forge their result: docs/rewards.md says how.
"""

from __future__ import annotations

import hashlib
import marshal
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from pydantic import Field, model_validator

from reward_service.reward import RemoteReward, distinct
from reward_service.sandbox import COMPILED, STARTED, TESTS_COMPILED, find_sandbox
from reward_service.specs import Resources, UnitTestsSpec
from reward_service.verifier import Data, read_data
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt, Scores
from specrej.contracts.errors import InvalidRequest, Unavailable, Violation
from specrej.threads import all_of

_KEPT = 4096  # results, by code and tests

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "py", "python", "python3")


class UnitTestsData(Data):
    """What a request gives.

    tests: scripts, each of which passes if it raises nothing; entry_point: a function of the code,
    with which each script's function `check` is called, as in HumanEval; prelude: code before the
    answer's, with `whole` the prompt's code that the text continues; whole: the text is code; all:
    the score is 1 if all tests pass and otherwise 0; compiles: no tests, only whether the code
    compiles.
    """

    tests: tuple[str, ...] = ()
    entry_point: str = Field("", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    prelude: str = ""
    whole: bool = False
    all: bool = False
    compiles: bool = False

    @model_validator(mode="after")
    def _has_tests_or_compiles(self) -> UnitTestsData:
        if bool(self.tests) == self.compiles:
            raise ValueError("must have either tests or compiles")
        return self

    def program_of(self, text: str, *, is_final: bool) -> str | None:
        """The program that the text will have whatever follows, if that is known."""
        if self.whole:
            return self.prelude + text if is_final else None
        code = code_of(text)
        return None if code is None else f"{self.prelude}\n{code}"


class UnitTestsReward(RemoteReward):
    """Scores by tests, at most `workers` programs at once, each in a sandbox of its own.

    Raises ValueError: no sandbox works here.
    """

    description = "The share of the request's tests that the answer's code passes, 0 to 1."
    sample_data = '{"tests": ["assert f() == 1"], "whole": true}'

    def __init__(self, spec: UnitTestsSpec, resources: Resources) -> None:
        self._sandbox = find_sandbox(spec)
        self.name = spec.name
        self.fingerprint = fingerprint.of_values(
            kind="tests",
            limits=[spec.wall_s, spec.cpu_s, spec.memory_mb],
            python=[*sys.version_info[:2]],
        )
        self._kept: OrderedDict[bytes, int] = OrderedDict()

    async def aclose(self) -> None:
        self._sandbox.close()

    async def answer(
        self, prompt: Prompt, candidates: Sequence[Candidate], data: str = ""
    ) -> Scores:
        """One score per candidate, 0 .. 1.

        Raises:
            InvalidRequest: the data, or a test in it, cannot be used.
            Unavailable: the sandbox did not start.
        """
        task = read_data(UnitTestsData, data, self.sample_data)
        finals = [candidate.finish is not None for candidate in candidates]
        pairs = zip(candidates, finals, strict=True)
        programs = [task.program_of(c.text, is_final=is_final) for c, is_final in pairs]
        unique, _ = distinct([program for program in programs if program is not None])
        scores = await all_of(map(partial(self._score, task), unique))
        known: dict[str | None, float] = dict(zip(unique, scores, strict=True))
        undecided = [0.0 if is_final else 1.0 for is_final in finals]
        return Scores(tuple(map(known.get, programs, undecided)))

    async def _score(self, task: UnitTestsData, program: str) -> float:
        tests, entry_point = task.tests, task.entry_point
        key = hashlib.sha256(marshal.dumps((program, tests, entry_point))).digest()
        steps = self._kept.get(key)
        if steps is None:
            steps = await self._run(program, tests, entry_point)
            self._kept[key] = steps
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        if task.compiles:
            return float(steps >= COMPILED)
        num_passed = max(0, steps - COMPILED)
        return float(num_passed == len(tests)) if task.all else num_passed / len(tests)

    async def _run(self, program: str, tests: Sequence[str], entry_point: str) -> int:
        try:
            steps = await self._sandbox.run(program, tests, entry_point)
        except OSError as error:
            raise Unavailable(f"reward {self.name}: no process can be started") from error
        if steps < STARTED:
            raise Unavailable(f"reward {self.name}: the sandbox did not start in time")
        if steps < TESTS_COMPILED:
            raise InvalidRequest([Violation("data.tests", "must be Python")])
        return steps


def code_of(text: str) -> str | None:
    """The first complete block of Python, or None; more text does not change it."""
    blocks = ((match[1], match[2]) for match in _BLOCK.finditer(text))
    return next((code for name, code in blocks if name.strip().lower() in _LANGUAGES), None)
