"""An engine on tiny models that tests drive step by step in their own thread, and its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from generator_service.engine.commands import OpenCommand, PrefixBatch
from generator_service.engine.engine import Engine, Model
from generator_service.engine.model import CausalLM
from generator_service.engine.session import Session
from specrej.contracts import Sampling
from specrej_models.attention import DecodeSegment, PrefillSegment, Segment
from tests.generator_service import tiny

T = TypeVar("T")

PROMPT = [1, *(5 + 7 * i % 80 for i in range(16))]
ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)
MODEL = CausalLM(tiny.build(), tiny.END_IDS)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: prompt tokens it computed, rows it decoded per session, its logits."""

    num_prompt_tokens: int
    num_prompt_rows: int  # with those of prompts that are stored already
    rows: tuple[int, ...]
    logits: Tensor


class Recorder:
    """A model that records every forward pass; the next one fails if `is_failing`."""

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
                logits.clone(),
            )
        )
        return logits

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return sum(step.num_prompt_tokens for step in self.passes)


def steps(engine: Engine, count: int = 1000, until: Callable[[], bool] = lambda: False) -> None:
    """Take up to `count` steps: fewer if the condition holds or nothing is left to compute."""
    for _ in range(count):
        if until() or not engine.step():
            return


def result(engine: Engine, future: Future[T]) -> T:
    """A future's result; raises AssertionError if 1,000 steps do not suffice."""
    steps(engine, until=future.done)
    assert future.done(), "no result"
    return future.result()


def opened(engine: Engine, command: OpenCommand) -> Session:
    """A session that is admitted or waits."""
    return engine.open(engine.new_session(command))


def admitted(
    engine: Engine,
    prompt: Sequence[int] = PROMPT,
    n: int = 3,
    sampling: Sampling = ENDLESS,
    first: int = 8,
) -> int:
    """The id of a session that has its slots; nothing of its prompt is read yet."""
    session = opened(engine, OpenCommand(prompt, n, sampling, first))
    assert session.opened.result(0)
    return session.id


def grown(engine: Engine, session_id: int, until: int = 24) -> PrefixBatch:
    """A round to its end."""
    return result(engine, engine.extend(session_id, until))


def tokens_of(batch: PrefixBatch) -> dict[int, tuple[int, ...]]:
    return {prefix.id: tuple(prefix.token_ids) for prefix in batch.prefixes}


def alone(
    prompt: Sequence[int] = PROMPT, n: int = 3, sampling: Sampling = ENDLESS
) -> dict[int, tuple[int, ...]]:
    """The candidates' tokens in an engine of their own."""
    engine = Engine(MODEL, 20_000)
    return tokens_of(grown(engine, admitted(engine, prompt, n, sampling), sampling.max_tokens))
