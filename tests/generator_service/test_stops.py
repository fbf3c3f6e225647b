"""Stop texts from the tokenizer to the answer, through a real engine on a model with a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from generator_service.engine import Engine
from generator_service.local import LocalGenerator, ModelCard
from generator_service.text import Text
from inference.attention import Segment
from inference.kv import KVShape
from specrej.contracts import Candidate, FinishReason, Prompt, Sampling

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")
END = 2  # <|im_end|>
VOCABULARY = 49152
PROMPT = Prompt(text="Once upon a time")

# Texts around a stop text; the characters of most lie in two tokens or more.
STOPS = ["é…", "…é", "🙂", "👩‍👩‍👧", "家族", "हि", "x🙂y", "\n\n", "é"]
BEFORE = "naïve 東京 🙃"  # its last character begins with the bytes of an emoji


Cut = Callable[[str], list[int]]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A row of logits is too little to share out."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def text() -> Text:
    return Text(tokenizer(), frozenset({END}))


def whole_tokens(text: str) -> list[int]:
    """As the tokenizer cuts it."""
    return list(tokenizer()(text)["input_ids"])


def torn_tokens(text: str) -> list[int]:
    """One token per byte where there is one: as no tokenizer cuts it, but a model may."""
    vocabulary = tokenizer().get_vocab()
    ids: list[int] = []
    for character in text:
        pieces = "".join(tokenizer().tokenize(character))  # one sign of the vocabulary per byte
        ids += (
            [vocabulary[sign] for sign in pieces]
            if all(sign in vocabulary for sign in pieces)
            else whole_tokens(character)
        )
    assert tokenizer().decode(ids) == text
    return ids


class Script:
    """A model that says the tokens of a script, whatever came before."""

    shape = KVShape(1, 1, 1, torch.float32, torch.device("cpu"))
    eos_ids = frozenset({END})

    def __init__(self, token_ids: Sequence[int], prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._prompt_tokens = prompt_tokens

    def forward(
        self, token_ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> Tensor:
        logits = torch.zeros(len(last), VOCABULARY)
        for row, at in enumerate(last):
            step = max(0, positions[at] + 1 - self._prompt_tokens)
            logits[row, self._token_ids[min(step, len(self._token_ids) - 1)]] = 50.0
        return logits


@contextmanager
def saying(text: Text, token_ids: Sequence[int]) -> Iterator[LocalGenerator]:
    """A generator whose candidates all say these tokens."""
    engine = Engine(Script(token_ids, len(text.encode(PROMPT))), 10_000)
    engine.start()
    try:
        yield LocalGenerator(engine, text, ModelCard("script", "", 8192, 8, VOCABULARY, 8, "cpu"))
    finally:
        engine.stop()
    assert engine.ledger.owned == 0


async def said(
    text: Text, token_ids: Sequence[int], sampling: Sampling, rounds: Sequence[int]
) -> list[Candidate]:
    """The first candidate at each decision token."""
    with saying(text, token_ids) as generator:
        async with generator.open(PROMPT, 2, sampling, 4) as session:
            found = []
            for until in rounds:
                one, other = (await session.extend(until)).candidates
                assert one.text == other.text
                found.append(one)
                if one.finish:
                    break
    return found


def completing(text: Text, token_ids: Sequence[int], stop: str) -> int:
    """How many tokens it takes until the stop text is there whole, by decoding everything."""
    return next(end for end in range(len(token_ids) + 1) if stop in text.decode(token_ids[:end]))


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("cut", [whole_tokens, torn_tokens])
def test_a_stop_text_over_token_borders_is_noticed_when_it_is_complete(
    text: Text, stop: str, cut: Cut
) -> None:
    """Not a token earlier, by its first bytes, and not later, by text that no one wants."""
    token_ids = cut(f"{BEFORE} {stop} and more")
    has_stopped = text.stops([stop])
    assert has_stopped
    end = completing(text, token_ids, stop)
    assert [has_stopped(token_ids[:at]) for at in range(end + 1)] == [False] * end + [True]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("cut", [whole_tokens, torn_tokens])
async def test_a_stop_text_ends_a_candidate_and_is_no_part_of_its_answer(
    text: Text, stop: str, cut: Cut
) -> None:
    """Through engine and rounds of one token each: no round may show a torn character either."""
    before, after = f"{BEFORE} ", " and more"
    token_ids = cut(before + stop + after)
    sampling = Sampling(max_tokens=len(token_ids), temperature=0.0, stop=("never", stop))
    *earlier, final = await said(text, token_ids, sampling, range(1, len(token_ids) + 1))
    assert final.num_tokens == completing(text, token_ids, stop)
    assert (final.finish, final.text) == (FinishReason.STOP, before)
    for candidate in earlier:
        assert candidate.finish is None
        assert (before + stop).startswith(candidate.text)


@pytest.mark.parametrize("almost", ["🙃", "👩‍👩‍👦", "é.", "家庭"])
async def test_what_only_begins_like_a_stop_text_does_not_end_a_candidate(
    text: Text, almost: str
) -> None:
    """Characters that share their first bytes with a stop text's are other characters."""
    token_ids = torn_tokens(f"{BEFORE} {almost} and more")
    stops = ("🙂", "👩‍👩‍👧", "é…", "家族")
    sampling = Sampling(max_tokens=len(token_ids), temperature=0.0, stop=stops)
    (final,) = await said(text, token_ids, sampling, [len(token_ids)])
    assert (final.finish, final.text) == (FinishReason.LENGTH, f"{BEFORE} {almost} and more")


async def test_a_stop_text_before_the_least_length_is_text_like_any_other(text: Text) -> None:
    """It does not count, says the wire: the answer used to be cut there all the same."""
    token_ids = whole_tokens("one STOP two three four STOP five")
    first = completing(text, token_ids, "STOP")
    sampling = Sampling(
        max_tokens=len(token_ids), temperature=0.0, stop=("STOP",), min_tokens=first + 2
    )
    (final,) = await said(text, token_ids, sampling, [len(token_ids)])
    assert (final.finish, final.text) == (FinishReason.STOP, "one STOP two three four ")
    assert final.num_tokens == len(token_ids) - 1


async def test_stop_texts_count_from_the_least_length_on(text: Text) -> None:
    """A stop text that only the last of the least tokens completes has not come too early."""
    token_ids = whole_tokens("one two three STOP five")
    first = completing(text, token_ids, "STOP")
    for min_tokens in (first - 1, first):
        sampling = Sampling(
            max_tokens=len(token_ids), temperature=0.0, stop=("STOP",), min_tokens=min_tokens
        )
        (final,) = await said(text, token_ids, sampling, [len(token_ids)])
        assert (final.finish, final.text) == (FinishReason.STOP, "one two three ")
        assert final.num_tokens == first
