"""Collections: their content, independence of chunks, and resumption."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.collect import collect, missing
from experiments.prompts import DEFAULT_PROMPTS, Item, read_prompts
from experiments.settings import Settings
from experiments.trajectories import Store, load
from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.contracts import Algorithm, GenerationRequest, Prompt, Selection, SessionSpec
from specrej.contracts.errors import Unavailable
from tests.experiments.doubles import collected, live_run, models, tiny_engine
from tests.experiments.test_trajectories import assert_equal
from tests.orchestrator.runs import PROMPT

SETTINGS = Settings(n=20, max_tokens=24, grid=(3, 8, 16, 24), rewards=("letters",), seed=5)
ITEMS = tuple(
    Item(name, number, Prompt.from_user(f"say {name}")) for number, name in enumerate("abc")
)


async def test_candidates_equal_those_of_best_of_n() -> None:
    """Ids, texts, lengths and scores of a live run without rejection."""
    generator = ToyGenerator(end_every=20)
    made = await collected(generator, SETTINGS)
    request = GenerationRequest(
        PROMPT,
        SETTINGS.sampling(0),
        Selection(n=20, algorithm=Algorithm.BEST_OF_N, return_candidates=20),
    )
    live, _ = await live_run(request, generator, LikelihoodScorer())
    for candidate in live.candidates:
        assert made.texts[candidate.id] == candidate.text
        assert made.num_tokens[candidate.id] == candidate.num_tokens
        assert made.final(LIKELIHOOD)[candidate.id] == candidate.score
        logprobs = made.logprobs[candidate.id]
        assert tuple(logprobs[~np.isnan(logprobs)]) == candidate.logprobs
        share = candidate.text.count("e") / len(candidate.text)
        assert made.final("letters")[candidate.id] == share
    assert made.prompt_tokens == 4
    assert 0 < made.finished.sum() < 20


async def test_prefixes_are_scored_on_the_grid() -> None:
    """NaN past an answer's end; the final score where it ends on the grid."""
    made = await collected(ToyGenerator(end_every=6), SETTINGS)
    partial, final = made.rewards["letters"].partial, made.rewards["letters"].final
    for row in range(20):
        words = made.texts[row].split()
        for column, position in enumerate(SETTINGS.grid):
            prefix = " ".join(words[:position])
            if made.num_tokens[row] < position:
                assert np.isnan(partial[row, column])
            else:
                assert partial[row, column] == prefix.count("e") / len(prefix)
        if made.num_tokens[row] in SETTINGS.grid:
            assert partial[row, SETTINGS.grid.index(made.num_tokens[row])] == final[row]
    assert set(made.num_tokens) & set(SETTINGS.grid), "no answer ended on the grid"


async def test_chunks_change_nothing_on_engine() -> None:
    """A chunk that is too large for the slots is reduced to what fits."""
    few = replace(SETTINGS, n=7)
    with tiny_engine() as plenty, tiny_engine(4 + 23 * 3) as little:
        whole = await collected(plenty, few)
        made = await collected(little, few)
    np.testing.assert_array_equal(made.num_tokens, whole.num_tokens)
    np.testing.assert_allclose(made.logprobs, whole.logprobs, atol=1e-4)
    assert made.texts == whole.texts


class FailsAtSecond(ToyGenerator):
    """Serves the first prompt only."""

    def __init__(self) -> None:
        super().__init__(end_every=20)

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[ToySession]:
        if spec.prompt != ITEMS[0].prompt:
            raise Unavailable("restarting", retry_after_s=0.001)
        async with super().open(spec) as session:
            yield session


async def test_collection_resumes_with_missing_prompts(tmp_path: Path) -> None:
    """Interrupted in the second prompt, it collects the second and third again."""
    generator = ToyGenerator(end_every=20)
    store = Store(tmp_path)
    with pytest.raises(Unavailable, match="restarting"):
        await collect(store, SETTINGS, ITEMS, models(FailsAtSecond()))
    assert missing(store, SETTINGS, ITEMS) == ITEMS[1:]
    await collect(store, SETTINGS, ITEMS, models(generator))
    assert missing(store, SETTINGS, ITEMS) == ()
    prompts = load(tmp_path)
    assert [prompt.prompt_id for prompt in prompts] == ["a", "b", "c"]
    assert [prompt.seed for prompt in prompts] == [5, 6, 7]
    for item, prompt in zip(ITEMS, prompts, strict=True):
        assert_equal(prompt, await collected(generator, SETTINGS, item))
    head = store.head()
    assert head is not None
    assert Settings.from_json(head["settings"]) == SETTINGS
    assert head["machine"]["cores"]


async def test_other_settings_prompts_or_models_are_refused(tmp_path: Path) -> None:
    """Guards against collections that mix them."""
    store, generator = Store(tmp_path), ToyGenerator()
    await collect(store, SETTINGS, ITEMS[:1], models(generator))
    with pytest.raises(ValueError, match="other settings"):
        missing(store, replace(SETTINGS, temperature=0.5), ITEMS)
    with pytest.raises(ValueError, match="other prompts with the ids a"):
        missing(store, SETTINGS, [replace(ITEMS[0], prompt=PROMPT)])
    with pytest.raises(ValueError, match="other models"):
        await collect(store, SETTINGS, ITEMS, models(generator, fingerprint="2"))
    assert [made.prompt_id for made in store] == ["a"]


def test_prompts_are_json_or_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    turns = '[{"role": "user", "content": "3"}]'
    lines = ['"one"', '{"prompt": "two"}', f'{{"id": "x", "messages": {turns}}}']
    for text in (f"[{', '.join(lines)}]", "\n".join(lines)):
        path.write_text(text)
        items = read_prompts([path])
        assert [item.id for item in items] == ["000", "001", "x"]
        assert [item.prompt.turns[-1].content for item in items] == ["one", "two", "3"]


def test_prompts_of_several_files_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Guards against equal seeds for the first prompts of two files."""
    path = tmp_path / "more.json"
    path.write_text('["one", "two"]')
    items = read_prompts([path, DEFAULT_PROMPTS])
    assert [item.number for item in items] == list(range(len(items)))
    assert [item.id for item in read_prompts([path, path])] == ["000", "001", "002", "003"]
    with pytest.raises(ValueError, match="ids must be unique: advert, "):
        read_prompts([DEFAULT_PROMPTS, DEFAULT_PROMPTS])
