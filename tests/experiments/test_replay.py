"""A replay against live runs with the same seeds: rounds, survivors, answer, score and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.replay import (
    NeverFits,
    Replayed,
    Replayer,
    Seen,
    Setting,
    highest_answer,
    replay,
)
from experiments.settings import Settings
from experiments.trajectories import OffGrid, Trajectories
from generator_service.local import LocalGenerator
from generator_service.toy import ToyGenerator
from orchestrator.composition import LIKELIHOOD
from orchestrator.scoring import LikelihoodScorer
from specrej.contracts import (
    Algorithm,
    Generation,
    GenerationRequest,
    Prompt,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scorer,
    Selection,
)
from tests.experiments.doubles import ITEM, PROMPT, LetterScorer, lived, tiny_engine, written
from tests.experiments.synthetic import made_of

N, MAX_TOKENS = 24, 28
TEXT_PROMPT = Prompt(text="a prompt of several words that all candidates share")
ALPHAS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99])
REWARDS: dict[str, Scorer] = {"letters": LetterScorer(), LIKELIHOOD: LikelihoodScorer()}
SCHEDULES = st.one_of(
    st.just(Schedule("memory", first=4)),
    st.builds(
        lambda tokens: Schedule("tokens", tokens=tuple(sorted(tokens))),
        st.sets(st.integers(1, 40), min_size=1, max_size=6),
    ),
    st.builds(Schedule, st.just("geometric"), st.just(()), st.integers(1, 16), st.floats(1.1, 4)),
)


def request(setting: Setting, sampling: Sampling, prompt: Prompt) -> GenerationRequest:
    selection = Selection(
        n=setting.n,
        alpha=setting.alpha,
        schedule=setting.schedule,
        algorithm=setting.algorithm,
        return_candidates=1,
    )
    return GenerationRequest(prompt, sampling, selection)


def check(found: Replayed, live: Generation, rounds: list[RoundCompleted]) -> None:
    """All that a replay tells is what happened."""
    assert found.answer == live.best.id
    assert found.score == live.best.score
    assert found.finish is live.best.finish
    assert found.answer_tokens == live.usage.answer_tokens
    assert found.generated_tokens == live.usage.generated_tokens
    assert len(found.rounds) == len(rounds)
    for mine, its in zip(found.rounds, rounds, strict=True):
        trace = its.trace
        assert mine.survivors == its.survivors
        for name in (
            "number", "decision_token", "ended_by", "num_started", "num_finished", "num_rejected",
            "num_live", "best_score", "generated_tokens", "alpha",
        ):  # fmt: skip
            assert getattr(mine, name) == getattr(trace, name), name


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 32),
    max_tokens=st.integers(1, 40),
    end_every=st.integers(2, 80),
    seed=st.integers(0, 1000),
    alpha=ALPHAS,
    schedule=SCHEDULES,
    reward=st.sampled_from(sorted(REWARDS)),
    algorithm=st.sampled_from(Algorithm),
)
async def test_a_replay_is_the_run_on_toys(
    n: int,
    max_tokens: int,
    end_every: int,
    seed: int,
    alpha: float,
    schedule: Schedule,
    reward: str,
    algorithm: Algorithm,
) -> None:
    """Candidates that end early, late and never, under every schedule; memory is plenty."""
    collected = Settings(
        n=32, max_tokens=max_tokens, grid=tuple(range(1, max_tokens + 1)), seed=seed
    )
    generator = ToyGenerator(end_every=end_every)
    trajectories = await written(generator, replace(collected, rewards=("letters",)))
    setting = Setting(n, alpha, schedule, reward, algorithm=algorithm)
    sampling = replace(collected.sampling(0), logprobs=False)
    live = await lived(request(setting, sampling, PROMPT), generator, REWARDS[reward])
    check(replay(trajectories, setting), *live)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalGenerator]:
    """With plenty of slots."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tiny_engine() as generator:
        yield generator
    torch.set_num_threads(num_threads)


def _collected(seed: int) -> Settings:
    # A letter that ends an answer, as the random model hardly ever does.
    return Settings(
        n=N,
        max_tokens=MAX_TOKENS,
        grid=tuple(range(1, MAX_TOKENS + 1)),
        rewards=("letters",),
        stop=("k",),
        seed=seed,
    )


@pytest.fixture(scope="module")
def models_own(engine: LocalGenerator) -> dict[int, Trajectories]:
    """By seed."""
    item = replace(ITEM, prompt=TEXT_PROMPT)
    return {seed: asyncio.run(written(engine, _collected(seed), item)) for seed in (3, 4)}


def test_the_tiny_models_answers_are_of_all_kinds(models_own: dict[int, Trajectories]) -> None:
    """Or the tests below would show little."""
    for made in models_own.values():
        assert 0 < made.finished.sum() < N
        assert len(set(made.num_tokens.tolist())) > 4


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, N),
    seed=st.sampled_from([3, 4]),
    alpha=ALPHAS,
    schedule=SCHEDULES,
    reward=st.sampled_from(sorted(REWARDS)),
)
def test_a_replay_is_the_run_on_a_real_engine(
    engine: LocalGenerator,
    models_own: dict[int, Trajectories],
    n: int,
    seed: int,
    alpha: float,
    schedule: Schedule,
    reward: str,
) -> None:
    setting = Setting(n, alpha, schedule, reward)
    wanted = request(setting, _collected(seed).sampling(0), TEXT_PROMPT)
    live = asyncio.run(lived(wanted, engine, REWARDS[reward]))
    check(replay(models_own[seed], setting), *live)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, N),
    spare_slots=st.integers(0, 400),
    alpha=ALPHAS,
    schedule=SCHEDULES,
    reward=st.sampled_from(sorted(REWARDS)),
)
def test_full_slots_end_replayed_rounds_where_they_end_live_ones(
    models_own: dict[int, Trajectories],
    n: int,
    spare_slots: int,
    alpha: float,
    schedule: Schedule,
    reward: str,
) -> None:
    """From the least capacity that is admitted on; slots of each round, and who is refused, too."""
    made = models_own[3]
    setting = Setting(n, alpha, schedule, reward, slots=1)
    with pytest.raises(NeverFits) as refused:
        replay(made, setting)
    slots = int(str(refused.value).split()[1]) + spare_slots
    wanted = request(setting, _collected(3).sampling(0), TEXT_PROMPT)
    with tiny_engine(slots) as generator:
        live, rounds = asyncio.run(lived(wanted, generator, REWARDS[reward]))
    found = replay(made, replace(setting, slots=slots))
    check(found, live, rounds)
    for mine, its in zip(found.rounds, rounds, strict=True):
        assert mine.session_slots == its.trace.session_slots
        assert mine.freed_slots == its.trace.freed_slots


def test_slots_do_become_full(models_own: dict[int, Trajectories]) -> None:
    """So that the test above is about something."""
    setting = Setting(N, 0.5, Schedule("memory", first=4), slots=160)
    ends = [each.ended_by for each in replay(models_own[3], setting).rounds]
    assert RoundEnd.SLOTS_FULL in ends


def test_a_subset_is_a_request_of_its_own(models_own: dict[int, Trajectories]) -> None:
    """For the bootstrap: ids stay those of the trajectories, one may be there several times."""
    made = models_own[3]
    rows = [5, 2, 5, 17, 9, 11]
    setting = Setting(0, 0.5, Schedule(first=4), "letters")
    found = replay(made, setting, candidates=rows)
    alone = replay(made.take(rows), setting)
    assert found.answer == rows[alone.answer]
    assert found.generated_tokens == alone.generated_tokens
    assert [each.num_live for each in found.rounds] == [each.num_live for each in alone.rounds]


def test_best_of_n_is_known_of_the_same_candidates(models_own: dict[int, Trajectories]) -> None:
    made = models_own[3]
    setting = Setting(16, 0.5, Schedule(first=4), "letters")
    found = replay(made, setting)
    full = replay(made, replace(setting, algorithm=Algorithm.BEST_OF_N))
    assert found.best_of_n_answer == full.answer
    assert found.best_of_n_score == full.score
    assert found.best_of_n_tokens == full.generated_tokens
    assert found.regret == full.highest - found.highest >= 0
    assert found.compute_ratio > 1
    assert len(full.scored_lengths) == 16
    assert sum(full.scored_lengths) == full.generated_tokens


def _thinned(made: Trajectories, every: int) -> Trajectories:
    """Only each so-manieth position of the grid."""
    columns = np.arange(every - 1, MAX_TOKENS, every)
    letters = made.rewards["letters"]
    thin = replace(letters, partial=letters.partial[:, columns])
    return replace(made, positions=made.positions[columns], rewards={"letters": thin})


def test_a_decision_token_off_the_grid_says_which_are_on_it(
    models_own: dict[int, Trajectories],
) -> None:
    thin = _thinned(models_own[3], 4)
    off = Setting(N, 0.5, Schedule("tokens", tokens=(6,)))
    with pytest.raises(OffGrid, match="token 6: the nearest on the grid are 4 and 8"):
        replay(thin, replace(off, reward="letters"))
    replay(thin, off)  # the likelihood needs no grid
    assert replay(thin, replace(off, schedule=Schedule("tokens", tokens=(8,)), reward="letters"))


def test_full_slots_between_two_positions_snap_only_where_that_is_wanted(
    models_own: dict[int, Trajectories],
) -> None:
    """A snapped round ends at the position before, and every request still ends."""
    thin = _thinned(models_own[3], 4)
    exact = Setting(N, 0.1, Schedule("memory", first=5), "letters", slots=160)
    with pytest.raises(OffGrid):
        replay(thin, exact)
    found = replay(thin, replace(exact, snap=True))
    full = [each for each in found.rounds if each.ended_by is RoundEnd.SLOTS_FULL]
    assert full
    assert all(each.decision_token % 4 == 0 for each in full)
    assert all(each.session_slots <= 160 for each in found.rounds)


def _first_full(made: Trajectories, setting: Setting) -> int | None:
    """Where full slots end the first round, if they do."""
    first = replay(made, setting).rounds[0]
    return first.decision_token if first.ended_by is RoundEnd.SLOTS_FULL else None


def test_snapping_is_to_the_position_before_and_never_for_the_likelihood(
    models_own: dict[int, Trajectories],
) -> None:
    """A position of the grid is its own. Guards against a snap past what the slots can hold."""
    made, thin = models_own[3], _thinned(models_own[3], 4)
    ends = set()
    for slots in range(140, 400, 6):
        setting = Setting(N, 0.3, Schedule("memory", first=4), "letters", slots)
        exact = _first_full(made, setting)
        snapped = _first_full(thin, replace(setting, snap=True))
        assert snapped == (None if exact is None else exact - exact % 4)
        ends.add(exact)
        own = replace(setting, reward=LIKELIHOOD)
        assert replay(thin, replace(own, snap=True)) == replay(made, own)
    assert {each % 4 for each in ends if each is not None} == {0, 1, 2, 3}


@pytest.mark.parametrize("slots", [0, 160])
def test_what_is_counted_follows_from_who_was_there(
    models_own: dict[int, Trajectories], slots: int
) -> None:
    """Texts and tokens that were scored, and tokens attended to, one by one."""
    made = models_own[3]
    setting = Setting(N, 0.4, Schedule("memory" if slots else "geometric", first=4), slots=slots)
    found = replay(made, setting)
    texts: list[int] = []
    attended = start = 0
    live: tuple[int, ...] = tuple(range(N))
    for each in found.rounds:
        lengths = [min(int(made.num_tokens[row]), each.decision_token) for row in live]
        texts += lengths
        attended += sum(before for length in lengths for before in range(start, length))
        live, start = each.survivors, each.decision_token
    assert len(found.rounds) > 2
    assert found.scored_lengths == tuple(texts)
    assert found.attended_tokens == attended


def test_a_policy_is_told_where_it_is_and_what_there_is_to_beat(
    models_own: dict[int, Trajectories],
) -> None:
    made = models_own[3]
    seen: list[Seen] = []

    class Nobody:
        def alpha(self, now: Seen) -> float:
            seen.append(now)
            return 0.0

    replay(made, Setting(N, 0.5, Schedule(first=4), "letters"), Nobody())
    assert [(each.number, each.decision_token, each.next_token) for each in seen] == [
        *((1, 4, 8), (2, 8, 16), (3, 16, MAX_TOKENS))
    ]
    for each in seen:
        ended = made.num_tokens <= each.decision_token
        finals = made.scores("letters").final[ended]
        assert each.max_tokens == MAX_TOKENS
        assert each.best_finished == max(finals.tolist(), default=-np.inf)
        assert len(each.ranked) == N
        assert len(each.live) == N - ended.sum()
    assert seen[-1].best_finished > -np.inf


def test_regret_is_about_rewards_not_about_who_is_complete() -> None:
    """The service answers with the complete one, if it is there; both found the highest score."""
    scores = np.zeros((4, 16))
    scores[:] = np.array([0.0, 5.0, 4.0, 3.0])[:, None]
    made = made_of(scores, np.array([16, 16, 16, 12]), positions=(8, 16))
    found = replay(made, Setting(4, 0.5, Schedule("tokens", tokens=(8,)), "walk"))
    assert (found.best_of_n_answer, found.best_of_n_score) == (3, 3)
    assert (found.answer, found.score) == (1, 5)
    assert (found.highest, found.best_of_n_highest, found.regret) == (5, 5, 0)
    assert highest_answer(made, "walk") == 1


def test_a_policy_sees_the_ranking_and_is_obeyed(models_own: dict[int, Trajectories]) -> None:
    seen: list[Seen] = []

    class Second:
        """Nobody in the first round, nearly everybody in the second."""

        def alpha(self, now: Seen) -> float:
            seen.append(now)
            return 0.0 if now.number == 1 else 0.9

    found = replay(models_own[3], Setting(N, 0.5, Schedule(first=2), "letters"), Second())
    assert [each.alpha for each in found.rounds[:2]] == [0.0, 0.9]
    assert found.rounds[0].num_rejected == 0
    assert found.rounds[1].num_live <= 2
    assert seen[0].asked == 0.5
    assert seen[0].decision_token == 2
    assert len(seen[0].ranked) == N
    assert len(seen[0].live) == N - found.rounds[0].num_finished


def test_more_candidates_than_were_written_are_refused(
    models_own: dict[int, Trajectories],
) -> None:
    with pytest.raises(ValueError, match="25 candidates of 24"):
        Replayer(models_own[3], "letters").run(Setting(25, reward="letters"))
