"""Replays compared with live runs of the same seeds: rounds, survivors, answer and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.replay import Replayed, Setting, replay
from experiments.settings import Settings
from experiments.trajectories import Trajectories
from generator_service.toy import ToyGenerator
from orchestrator.loop.composition import LIKELIHOOD
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.contracts import (
    Generation,
    GenerationRequest,
    Prompt,
    RoundCompleted,
    Sampling,
    Schedule,
    Scorer,
    Selection,
)
from tests.experiments.doubles import ITEM, collected, live_run, tiny_engine
from tests.experiments.synthetic import from_scores
from tests.orchestrator.runs import PROMPT, LetterScorer

N, MAX_TOKENS = 24, 28
TEXT_PROMPT = Prompt(text="a prompt of several words that all candidates share")
ALPHAS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99])
REWARDS: dict[str, Scorer] = {"letters": LetterScorer("e"), LIKELIHOOD: LikelihoodScorer()}
SCHEDULES = st.one_of(
    st.just(Schedule("memory", first=4)),
    st.builds(
        lambda tokens: Schedule("tokens", tokens=tuple(sorted(tokens))),
        st.sets(st.integers(1, 40), min_size=1, max_size=6),
    ),
    st.builds(Schedule, first=st.integers(1, 16), factor=st.floats(1.1, 4)),
)


def request(setting: Setting, sampling: Sampling, prompt: Prompt) -> GenerationRequest:
    selection = Selection(
        n=setting.n,
        alpha=setting.alpha,
        schedule=setting.schedule,
    )
    return GenerationRequest(prompt, sampling, selection)


def check(replayed: Replayed, live: Generation, rounds: list[RoundCompleted]) -> None:
    """The result and the rounds of a replay equal those of the live run."""
    assert replayed.answer == live.best.id
    assert replayed.score == live.best.score
    assert replayed.finish is live.best.finish
    assert replayed.generated_tokens == live.usage.generated_tokens
    assert len(replayed.rounds) == len(rounds)
    for actual, expected in zip(replayed.rounds, rounds, strict=True):
        assert actual.survivors == expected.survivors
        for name in ("decision_token", "num_started", "generated_tokens"):
            assert getattr(actual, name) == getattr(expected.trace, name), name


def held_slots(made: Trajectories, replayed: Replayed, n: int) -> list[int]:
    """Slots at the end of each round, before its cut; the newest token is not stored yet."""
    held, live = [], np.arange(n)
    for played in replayed.rounds:
        num_grown = int((made.num_tokens[live] > played.decision_token).sum())
        held.append(made.prompt_tokens + num_grown * (played.decision_token - 1))
        live = np.array(played.survivors, dtype=np.int64)
    return held


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 32),
    max_tokens=st.integers(1, 40),
    end_every=st.integers(2, 80),
    seed=st.integers(0, 1000),
    alpha=ALPHAS,
    schedule=SCHEDULES,
    reward=st.sampled_from(sorted(REWARDS)),
)
async def test_replay_equals_live_run_on_toys(
    n: int,
    max_tokens: int,
    end_every: int,
    seed: int,
    alpha: float,
    schedule: Schedule,
    reward: str,
) -> None:
    """Candidates that end early, late and never, under every schedule, with unlimited slots."""
    of_collection = Settings(
        n=32, max_tokens=max_tokens, grid=tuple(range(1, max_tokens + 1)), seed=seed
    )
    generator = ToyGenerator(end_every=end_every)
    trajectories = await collected(generator, replace(of_collection, rewards=("letters",)))
    setting = Setting(n, alpha, schedule, reward)
    sampling = replace(of_collection.sampling(0), logprobs=False)
    live = await live_run(request(setting, sampling, PROMPT), generator, REWARDS[reward])
    check(replay(trajectories, setting), *live)


ENGINE_SETTINGS = Settings(
    n=N,
    max_tokens=MAX_TOKENS,
    grid=tuple(range(1, MAX_TOKENS + 1)),
    rewards=("letters",),
    stop=("k",),  # the random model hardly ever generates its end token
    seed=3,
)


@pytest.fixture(scope="module")
def made() -> Iterator[Trajectories]:
    """Trajectories of a real engine; answers end at different lengths."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tiny_engine() as generator:
        item = replace(ITEM, prompt=TEXT_PROMPT)
        made = asyncio.run(collected(generator, ENGINE_SETTINGS, item))
    assert 0 < made.finished.sum() < N
    assert len(set(made.num_tokens.tolist())) > 4
    yield made
    torch.set_num_threads(num_threads)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, N),
    spare_slots=st.integers(0, 400) | st.just(10_000),
    alpha=ALPHAS,
    schedule=SCHEDULES,
    reward=st.sampled_from(sorted(REWARDS)),
)
def test_replay_equals_live_run_on_engine(
    made: Trajectories,
    n: int,
    spare_slots: int,
    alpha: float,
    schedule: Schedule,
    reward: str,
) -> None:
    """From the smallest capacity that admits the request; slots of each round are equal too."""
    setting = Setting(n, alpha, schedule, reward, slots=1)
    with pytest.raises(ValueError, match="needs") as refused:
        replay(made, setting)
    slots = int(str(refused.value).split()[1]) + spare_slots
    wanted = request(setting, ENGINE_SETTINGS.sampling(0), TEXT_PROMPT)
    with tiny_engine(slots) as generator:
        live, rounds = asyncio.run(live_run(wanted, generator, REWARDS[reward]))
    replayed = replay(made, replace(setting, slots=slots))
    check(replayed, live, rounds)
    assert held_slots(made, replayed, n) == [round_.trace.session_slots for round_ in rounds]


def test_replay_includes_best_of_n_of_the_same_candidates(made: Trajectories) -> None:
    setting = Setting(16, 0.5, Schedule(first=4), "letters")
    replayed = replay(made, setting)
    full = replay(made, replace(setting, alpha=0.0))
    assert replayed.best_of_n_tokens == full.generated_tokens
    assert replayed.regret == full.score - replayed.score >= 0
    assert replayed.best_of_n_tokens > replayed.generated_tokens
    with pytest.raises(ValueError, match="25 candidates of 24"):
        replay(made, replace(setting, n=25))


def _thinned(made: Trajectories, every: int) -> Trajectories:
    """With every n-th position of the grid only."""
    columns = np.arange(every - 1, MAX_TOKENS, every)
    letters = made.rewards["letters"]
    thin = replace(letters, partial=letters.partial[:, columns])
    return replace(made, positions=made.positions[columns], rewards={"letters": thin})


def _first_full(made: Trajectories, setting: Setting) -> int | None:
    """The position at which full slots end the first round, or None. There is no other cut."""
    end = replay(made, setting).rounds[0].decision_token
    return end if end < made.num_tokens[: setting.n].max() else None


def test_snap_is_to_the_position_before_except_for_likelihood(made: Trajectories) -> None:
    """Guards against a snap past the capacity; a position on the grid stays."""
    thin = _thinned(made, 4)
    ends = set()
    for slots in range(140, 400, 6):
        setting = Setting(N, 0.3, Schedule("memory", first=4), "letters", slots)
        exact = _first_full(made, setting)
        snapped = _first_full(thin, setting)
        assert snapped == (None if exact is None else exact - exact % 4)
        ends.add(exact)
        replayed = replay(thin, setting)
        assert max(held_slots(thin, replayed, N)) <= slots
        own = replace(setting, reward=LIKELIHOOD)
        assert replay(thin, own) == replay(made, own)
    assert {length % 4 for length in ends if length is not None} == {0, 1, 2, 3}


def test_a_lost_best_answer_is_regretted() -> None:
    """Finals 0 5 4 3; the cut at 8 keeps the last two. Of equal scores the first is the answer."""
    scores = np.ones((4, 16)) * np.array([0.0, 5.0, 4.0, 4.0])[:, None]
    scores[1, :8] = 0.0
    made = from_scores(scores, np.array([16, 16, 16, 16]), positions=(8, 16))
    replayed = replay(made, Setting(4, 0.5, Schedule("tokens", tokens=(8,)), "walk"))
    assert (replayed.answer, replayed.score, replayed.best_of_n_score) == (2, 4, 5)
    assert replayed.regret == 1
    assert [round_.survivors for round_ in replayed.rounds] == [(2, 3), ()]
