"""Engines driven step by step in the test's own thread, and models that note what they are asked.

No thread, so no chance: a test says which commands come before which step.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from generator_service.engine import Engine, Model
from inference.attention import DecodeSegment, PrefillSegment, Segment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: prompt tokens it computed, rows it decoded per session, what came out."""

    num_prompt_tokens: int
    num_prompt_rows: int  # with those of prompts that are stored already
    rows: tuple[int, ...]
    logits: Tensor


class Recorder:
    """A model that notes every forward pass; the next one fails if `is_failing`."""

    def __init__(self, model: Model) -> None:
        self.shape, self.eos_ids = model.shape, model.eos_ids
        self.passes: list[Pass] = []
        self.is_failing = False
        self._model = model

    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        logits = self._model.forward(token_ids, positions, segments, last)
        if self.is_failing:
            self.is_failing = False
            raise RuntimeError("device lost")
        prompts = [segment for segment in segments if isinstance(segment, PrefillSegment)]
        self.passes.append(
            Pass(
                sum(segment.num_rows for segment in prompts if not segment.stored),
                sum(segment.num_rows for segment in prompts),
                tuple(s.num_rows for s in segments if isinstance(s, DecodeSegment)),
                logits,
            )
        )
        return logits

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return sum(each.num_prompt_tokens for each in self.passes)


def step(engine: Engine) -> bool:
    """What a turn of the engine's thread does, without waiting; whether there was work."""
    engine._drain()
    engine._admit_waiting()
    work = engine._pick()
    if work:
        engine._step(work)
    return bool(work)


def result(engine: Engine, future: Future[T], max_steps: int = 1000) -> T:
    """What a command returns; raises AssertionError if it takes more than `max_steps` steps."""
    engine._drain()
    for _ in range(max_steps):
        if future.done():
            break
        step(engine)
    assert future.done(), f"no result after {max_steps} steps"
    return future.result()
