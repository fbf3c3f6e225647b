"""Backends for experiments: toys, and a real engine on a tiny model whose tokens are letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from experiments.backends import Backends
from experiments.collect import Watcher, collect_prompt
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.trajectories import Trajectories
from generator_service.engine import Engine
from generator_service.local import LocalGenerator, ModelCard
from generator_service.model import CausalLM
from generator_service.text import Text
from orchestrator.run import run
from specrej.contracts import (
    Candidate,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    Prompt,
    RewardDescription,
    RoundCompleted,
    Scorer,
    Scores,
    ScoringSession,
    SlotGauge,
)
from tests.generator_service import tiny

PROMPT = Prompt.from_user("four words of prompt")
ITEM = Item("four", 0, PROMPT)
_END = 2


class LetterScorer:
    """The share of one letter: prefixes' scores wander, and many are equal."""

    def __init__(self, letter: str = "e") -> None:
        self._letter = letter
        self.num_sessions = 0

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        self.num_sessions += 1
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(c.text.count(self._letter) / max(1, len(c.text)) for c in candidates))


class Letters:
    """A tokenizer: every token is a letter, every word of a prompt a token."""

    chat_template = "the contents alone"

    def apply_chat_template(self, turns: Sequence[dict[str, str]], **_: Any) -> str:
        return " ".join(turn["content"] for turn in turns)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [5 + len(word) for word in text.split()]}

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("a") + number % 26) for number in token_ids)


def backends(
    generator: Generator, scorers: Mapping[str, Scorer] | None = None, fingerprint: str = "1"
) -> Backends:
    """The generator, with a reward by letters if nothing else is said."""
    scorers = {"letters": LetterScorer()} if scorers is None else scorers
    gauge = SlotGauge(1, 0, 0)
    model = GeneratorDescription("double", fingerprint, 4096, 1024, 97, 1, "none", gauge)
    rewards = tuple(RewardDescription(name, "1", "") for name in scorers)
    return Backends(generator, model, scorers, rewards)


@contextmanager
def tiny_engine(capacity: int = 100_000) -> Iterator[LocalGenerator]:
    """A real engine on a tiny random Llama."""
    engine = Engine(CausalLM(tiny.build()), capacity)
    engine.start()
    card = ModelCard("tiny", "1", 256, 1024, tiny.VOCABULARY, 8, "cpu")
    try:
        yield LocalGenerator(engine, Text(Letters(), frozenset({_END})), card)
    finally:
        engine.stop()
    engine.check_integrity()
    assert engine.ledger.owned == 0


def silent() -> Watcher:
    """Nobody watches."""
    return Watcher(lambda tokens: None, lambda item, trajectories, seconds: None)


async def written(
    generator: Generator, settings: Settings, item: Item = ITEM, chunk: int = 1024
) -> Trajectories:
    """All candidates of a prompt, to their ends."""
    made, _ = await collect_prompt(item, settings, backends(generator), lambda tokens: None, chunk)
    return made


async def lived(
    request: GenerationRequest, generator: Generator, scorer: Scorer
) -> tuple[Generation, list[RoundCompleted]]:
    """A live run."""
    async with aclosing(run(request, generator, scorer)) as events:
        seen: list[Event] = [event async for event in events]
    last = seen[-1]
    assert isinstance(last, Finished)
    return last.generation, [event for event in seen if isinstance(event, RoundCompleted)]
