"""Collections: what they hold, that chunks change nothing, and that they can be gone on with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.backends import embedded, remote
from experiments.collect import CollectError, Watcher, collect, collect_prompt, missing
from experiments.flops import Sizes
from experiments.prompts import SHIPPED, Item, read_prompts
from experiments.settings import Settings, default_grid
from experiments.trajectories import Store, Trajectories, load
from generator_service.toy import ToyGenerator, ToySession
from orchestrator.composition import LIKELIHOOD
from orchestrator.scoring import LikelihoodScorer
from reward_service.toy import ToyReward
from specrej.contracts import (
    Algorithm,
    Candidate,
    GenerationRequest,
    Prompt,
    Sampling,
    Scores,
    ScoringSession,
    Selection,
)
from specrej.errors import InvalidRequest, RewardInvalid
from tests.experiments.doubles import ITEM, PROMPT, backends, lived, silent, tiny_engine, written
from tests.experiments.test_trajectories import assert_equal
from tests.orchestrator.services import generator_backend, reward_backend

SETTINGS = Settings(n=20, max_tokens=24, grid=(3, 8, 16, 24), rewards=("letters",), seed=5)
ITEMS = tuple(
    Item(name, number, Prompt.from_user(f"say {name}")) for number, name in enumerate("abc")
)


async def test_every_candidate_is_what_best_of_n_writes() -> None:
    """Ids, texts, ends and scores of a live run that rejects nobody."""
    generator = ToyGenerator(end_every=20)
    made = await written(generator, SETTINGS)
    request = GenerationRequest(
        PROMPT,
        SETTINGS.sampling(0),
        Selection(n=20, algorithm=Algorithm.BEST_OF_N, return_candidates=20),
    )
    live, _ = await lived(request, generator, LikelihoodScorer())
    for candidate in live.candidates:
        assert made.texts[candidate.id] == candidate.text
        assert made.num_tokens[candidate.id] == candidate.num_tokens
        assert made.scores(LIKELIHOOD).final[candidate.id] == candidate.score
        logprobs = made.logprobs[candidate.id]
        assert tuple(logprobs[~np.isnan(logprobs)]) == candidate.logprobs
        share = candidate.text.count("e") / len(candidate.text)
        assert made.scores("letters").final[candidate.id] == share
    assert made.prompt_tokens == 4
    assert 0 < made.finished.sum() < 20


async def test_prefixes_are_scored_on_the_grid_and_no_further() -> None:
    """NaN past an answer's end; where it ends on the grid, the score is the whole answer's."""
    made = await written(ToyGenerator(end_every=6), SETTINGS)
    partial, final = made.scores("letters").partial, made.scores("letters").final
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
    assert set(made.num_tokens) & set(SETTINGS.grid), "the case this test is about did not occur"


@pytest.mark.parametrize("chunk", [1, 7, 20, 1000])
async def test_chunks_change_nothing(chunk: int) -> None:
    """What a candidate says does not depend on the session it is in."""
    generator = ToyGenerator(end_every=20)
    assert_equal(
        await written(generator, SETTINGS, chunk=chunk), await written(generator, SETTINGS)
    )


async def test_chunks_change_nothing_on_a_real_engine() -> None:
    """Too large ones become smaller by themselves: as many as fit the slots."""
    with tiny_engine() as plenty, tiny_engine(4 + 23 * 6) as little:
        whole = await written(plenty, SETTINGS)
        made = await written(little, SETTINGS)
    np.testing.assert_array_equal(made.num_tokens, whole.num_tokens)
    np.testing.assert_allclose(made.logprobs, whole.logprobs, atol=1e-5)
    assert made.texts == whole.texts


async def test_every_session_reads_its_prompt_anew() -> None:
    """Guards against seconds that depend on who has read the prompt before."""
    salts: list[str] = []

    class Noting(ToyGenerator):
        @asynccontextmanager
        async def open(
            self,
            prompt: Prompt,
            n: int,
            sampling: Sampling,
            first_round_tokens: int,
            cache_salt: str = "",
            first_candidate: int = 0,
        ) -> AsyncIterator[ToySession]:
            salts.append(cache_salt)
            opening = super().open(
                prompt, n, sampling, first_round_tokens, cache_salt, first_candidate
            )
            async with opening as session:
                yield session

    await written(Noting(), SETTINGS, chunk=10)
    await written(Noting(), SETTINGS, chunk=10)
    assert len(salts) == 4
    assert len({*salts, ""}) == 5


async def test_a_prompt_that_never_fits_is_an_error() -> None:
    with tiny_engine(20) as generator, pytest.raises(InvalidRequest, match="KV slots"):
        await written(generator, SETTINGS)


async def test_progress_counts_every_candidate_token_once() -> None:
    """Those of answers that ended early too, as nothing is left to do for them."""
    settled: list[int] = []
    _, notes = await collect_prompt(
        ITEM, SETTINGS, backends(ToyGenerator(end_every=3)), settled.append, 7
    )
    assert sum(settled) == 20 * 24
    sessions = notes["sessions"]
    assert [(each["first"], each["size"]) for each in sessions] == [(0, 7), (7, 7), (14, 6)]
    assert all(lap["score_s"].keys() == {"letters"} for each in sessions for lap in each["laps"])


async def test_a_second_start_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    """Stopped in the middle of the second prompt, it writes the second and third again."""
    generator = ToyGenerator(end_every=20)
    store, told = Store(tmp_path), list[str]()

    class Stop(Exception):
        pass

    def advance(tokens: int) -> None:
        if told:
            raise Stop

    def done(item: Item, made: Trajectories, seconds: float) -> None:
        told.append(item.id)

    with pytest.raises(Stop):
        await collect(store, SETTINGS, ITEMS, backends(generator), Watcher(advance, done))
    assert [item.id for item in missing(store, SETTINGS, ITEMS)] == ["b", "c"]
    await collect(store, SETTINGS, ITEMS, backends(generator), silent())
    assert missing(store, SETTINGS, ITEMS) == ()
    kept = load(tmp_path)
    assert [each.prompt_id for each in kept] == ["a", "b", "c"]
    assert [each.seed for each in kept] == [5, 6, 7]
    for item, each in zip(ITEMS, kept, strict=True):
        assert_equal(each, await written(generator, SETTINGS, item))
    head = store.head()
    assert head is not None
    assert Settings.from_json(head["settings"]) == SETTINGS
    assert head["machine"]["cores"]


async def test_what_flops_are_counted_from_is_kept_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the reward that ships, which reads 256 tokens; a toy has no sizes."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", "toy")
    store, settings = Store(tmp_path), replace(SETTINGS, n=2, rewards=("relevance",))
    async with embedded(settings.rewards) as known:
        await collect(store, settings, ITEMS[:1], known, silent())
    head = store.head()
    assert head is not None
    kept = {name: Sizes(**each) for name, each in head["sizes"].items()}
    assert kept == known.sizes
    assert [(name, each.layers, each.max_tokens) for name, each in kept.items()] == [
        ("reward relevance", 6, 256)
    ]


async def test_a_collection_is_not_gone_on_with_otherwise(tmp_path: Path) -> None:
    """Other settings, models or prompts would make a mixture that nobody could read."""
    store, generator = Store(tmp_path), ToyGenerator()
    await collect(store, SETTINGS, ITEMS[:1], backends(generator), silent())
    with pytest.raises(CollectError, match="other settings"):
        missing(store, replace(SETTINGS, temperature=0.5), ITEMS)
    with pytest.raises(CollectError, match="other prompts by the ids a"):
        missing(store, SETTINGS, [replace(ITEMS[0], prompt=PROMPT)])
    with pytest.raises(CollectError, match="other models"):
        await collect(store, SETTINGS, ITEMS, backends(generator, fingerprint="2"), silent())
    assert [line["prompt_id"] for line in store.lines()] == ["a"]


async def test_rubbish_from_a_reward_is_never_kept(tmp_path: Path) -> None:
    class Broken:
        @asynccontextmanager
        async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
            yield self

        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            return Scores((float("nan"),) * len(candidates))

    store = Store(tmp_path)
    with pytest.raises(RewardInvalid):
        await collect(
            store,
            replace(SETTINGS, rewards=("broken",)),
            ITEMS,
            backends(ToyGenerator(), {"broken": Broken()}),
            silent(),
        )
    assert store.lines() == []


async def test_a_running_stack_is_as_good_as_models_in_this_process() -> None:
    """Over real gRPC: the same candidates, log-probabilities and scores."""
    async with (
        generator_backend(ToyGenerator()) as generator,
        reward_backend(ToyReward()) as reward,
    ):
        addresses = [f"127.0.0.1:{each.port}" for each in (generator, reward)]
        async with remote(("toy",), *addresses) as there:
            settings = replace(SETTINGS, rewards=("toy",))
            made, _ = await collect_prompt(ITEM, settings, there, lambda tokens: None, 7)
        with pytest.raises(ValueError, match="no such reward: other; there are toy"):
            async with remote(("other",), *addresses):
                pass
    here = await written(ToyGenerator(), SETTINGS)
    assert made.texts == here.texts
    np.testing.assert_array_equal(made.logprobs, here.logprobs)
    assert not np.isnan(made.scores("toy").final).any()


def test_the_default_grid_has_every_doubling_from_8() -> None:
    for max_tokens in (5, 8, 24, 128, 1000, 1024):
        grid = default_grid(max_tokens)
        assert grid[-1] == max_tokens
        assert list(grid) == sorted(set(grid))
        assert {8 * 2**i for i in range(8)} & set(range(max_tokens)) <= set(grid)
        Settings(max_tokens=max_tokens, grid=grid)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"n": 0}, "a candidate"),
        ({"grid": (8, 8, 128)}, "each once"),
        ({"grid": (0, 128)}, "from 1 on"),
        ({"grid": (8, 64)}, "end at 128"),
        ({"grid": ()}, "from 1 on"),
    ],
)
def test_settings_say_what_is_wrong(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings(**wrong)  # type: ignore[arg-type]


def test_every_prompt_has_a_seed_of_its_own() -> None:
    assert Settings(seed=7).sampling(3) == Sampling(max_tokens=128, seed=10, logprobs=True)


@pytest.mark.parametrize(
    "text",
    [
        '["one", {"prompt": "two"}, {"id": "x", "messages": [{"role": "user", "content": "3"}]}]',
        '"one"\n{"prompt": "two"}\n\n{"id": "x", "messages": [{"role": "user", "content": "3"}]}',
    ],
)
def test_prompts_are_json_or_json_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    items = read_prompts(path)
    assert [item.id for item in items] == ["000", "001", "x"]
    assert [item.prompt.turns[-1].content for item in items] == ["one", "two", "3"]
    assert [item.number for item in read_prompts(path, limit=2)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no prompts"),
        ("{", "neither JSON nor"),
        ('["", "x"]', "item 1 must have"),
        ('["x", {"text": "y"}]', "item 2 must have"),
        ("[3]", "item 1 must have"),
        ('[{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]', "once: a"),
    ],
)
def test_a_bad_prompt_file_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_prompts(path)


def test_the_projects_own_prompts_are_many_and_of_all_kinds() -> None:
    items = read_prompts(SHIPPED)
    assert len(items) >= 20
    assert any(item.prompt.turns[0].role == "system" for item in items)
