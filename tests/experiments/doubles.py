"""Models for experiments: toys, and a real engine on a tiny model with letters for tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from experiments.collect import collect_prompt
from experiments.models import Models
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.trajectories import Trajectories
from generator_service.engine.engine import Engine
from generator_service.engine.generator import LocalGenerator
from generator_service.engine.model import CausalLM
from generator_service.engine.text import Text
from generator_service.engine.thread import EngineThread
from specrej.contracts import (
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    RewardDescription,
    RoundCompleted,
    Scorer,
    SlotGauge,
)
from specrej_models.probe import ChatTemplate
from tests.generator_service import tiny
from tests.orchestrator.runs import PROMPT, LetterScorer, events_of

ITEM = Item("four", 0, PROMPT)
_END = 2


class Letters:
    """A tokenizer: every generated token is a letter, every word of a prompt a token."""

    chat_template = "the contents alone"
    added_tokens_decoder: Mapping[int, Any] = {}

    def apply_chat_template(
        self, conversations: Sequence[Sequence[dict[str, str]]], **_: Any
    ) -> list[str]:
        return [" ".join(turn["content"] for turn in turns) for turns in conversations]

    def add_tokens(self, _: Sequence[str], *, special_tokens: bool) -> None:
        """It has no control tokens."""

    def convert_tokens_to_ids(self, _: str) -> int:
        return -1

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.decode([token_id])

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[5 + len(word) for word in text.split()] for text in texts]}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("a") + number % 26) for number in token_ids)


def models(
    generator: Generator, scorers: Mapping[str, Scorer] | None = None, fingerprint: str = "1"
) -> Models:
    """The generator, by default with the reward "letters"."""
    scorers = {"letters": LetterScorer("e")} if scorers is None else scorers
    gauge = SlotGauge(1, 0, 0)
    description = GeneratorDescription("double", fingerprint, 4096, 1024, 97, 1, "none", gauge)
    rewards = tuple(RewardDescription(name, "1", "") for name in scorers)
    return Models(generator, description, scorers, rewards)


@cache
def _model() -> CausalLM:
    return CausalLM(tiny.build(), frozenset({_END}))


@contextmanager
def tiny_engine(capacity: int = 100_000) -> Iterator[LocalGenerator]:
    """A real engine on a tiny random Llama."""
    engine = EngineThread(Engine(_model(), capacity))
    engine.start()
    card = GeneratorDescription(
        "tiny", "1", 256, 1024, tiny.VOCABULARY, 8, "cpu", SlotGauge(0, 0, 0), auto_candidates=64
    )
    try:
        letters = Letters()
        template = ChatTemplate(letters, tiny.VOCABULARY)
        yield LocalGenerator(engine, Text(letters, frozenset({_END}), template), card)
    finally:
        engine.stop()
    engine.engine.check_integrity()
    assert engine.engine.ledger.owned == 0


async def collected(
    generator: Generator, settings: Settings, item: Item = ITEM, chunk: int = 1024
) -> Trajectories:
    """All candidates of a prompt, to their ends."""
    return await collect_prompt(item, settings, models(generator), chunk)


async def live_run(
    request: GenerationRequest, generator: Generator, scorer: Scorer
) -> tuple[Generation, list[RoundCompleted]]:
    """The result and the rounds of a live run."""
    *events, last = await events_of(request, generator, scorer)
    assert isinstance(last, Finished)
    return last.generation, [event for event in events if isinstance(event, RoundCompleted)]
