"""The run loop on toys: deadlines, and backends that fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop.progress import WithinRounds
from orchestrator.loop.scoring import LikelihoodScorer, RequestScorer
from specrej import contracts as c
from specrej.contracts import errors
from tests.orchestrator.runs import (
    NEVER,
    PROMPT,
    FaultyGenerator,
    FaultyScorer,
    FixedScorer,
    answer,
    request,
)
from tests.world import HeldGenerator

lenient = partial(request, allow_degraded=True)


@pytest.mark.parametrize("algorithm", list(c.Algorithm))
# Long steps: the real time of a step must never reach what is left on the generator's clock.
@pytest.mark.parametrize("time_left_s", [400.0, 500.0, 2000.0])
async def test_short_deadlines_give_an_answer(algorithm: c.Algorithm, time_left_s: float) -> None:
    """The answer is in time, and flagged if the deadline changed it."""
    ten_percent = request(alpha=0.1, algorithm=algorithm, prefer_complete=True)
    planned = await answer(ten_percent, FaultyGenerator(10.0), FixedScorer())
    generator = FaultyGenerator(10.0)
    began_s = generator.clock()
    generation = await answer(ten_percent, generator, FixedScorer(), time_left_s=time_left_s)
    assert generator.clock() - began_s <= time_left_s
    assert generation.best.finish is c.FinishReason.STOP
    assert not generation.degraded
    assert generation.hurried == (time_left_s < 2000)
    if not generation.hurried:
        assert generation.candidates == planned.candidates
        assert generation.usage == planned.usage
        assert len(generation.rounds) == len(planned.rounds)
    assert generator.ledger.owned == 0


async def test_a_deadline_costs_best_of_n_no_more_candidates_than_it_must() -> None:
    """Guards against the request's alpha, which Best-of-N ignores, at a cut for the deadline."""
    generator = FaultyGenerator(10.0)
    best_of_n = request(alpha=0.9, algorithm=c.Algorithm.BEST_OF_N)
    generation = await answer(best_of_n, generator, FixedScorer(), time_left_s=550.0)
    first, last = generation.rounds
    assert 0.0 < first.alpha < 0.5 and last.alpha == 0.0
    assert len(generation.candidates) > 8


@pytest.mark.parametrize("allow_degraded", [True, False])
@pytest.mark.parametrize(
    ("token_s", "time_left_s", "num_answers", "changes"),
    [(10.0, 300.0, 8, {"min_answers": 8}), (100.0, 2000.0, 1, {"sampling": {"min_tokens": 60}})],
    ids=["fewer than promised", "none"],
)
async def test_a_deadline_before_the_answers_are_complete(
    token_s: float,
    time_left_s: float,
    num_answers: int,
    changes: dict[str, Any],
    allow_degraded: bool,
) -> None:
    """With `allow_degraded` the best texts so far are the answer. Guards against fewer answers than
    promised, and against a cut to fewer to be in time."""
    asked = request(allow_degraded=allow_degraded, **changes)
    generator = FaultyGenerator(token_s)
    began_s = generator.clock()
    answering = answer(asked, generator, FixedScorer(), time_left_s=time_left_s)
    if allow_degraded:
        generation = await answering
        assert generation.degradations == (c.Degradation.DEADLINE,)
        assert len(generation.candidates) >= num_answers
        if num_answers == 1:
            assert generation.best.finish is c.FinishReason.LENGTH
            assert 0 < generation.best.num_tokens <= 20
    else:
        with pytest.raises(errors.DeadlineExceeded):
            await answering
    assert generator.clock() - began_s <= time_left_s
    ample = await answer(asked, generator, FixedScorer(), time_left_s=7 * time_left_s)
    assert len(ample.candidates) >= num_answers and not ample.degraded
    assert generator.ledger.owned == 0


@pytest.mark.parametrize("breaks_at", [17, 20, 22])
async def test_a_generator_lost_within_a_round_causes_no_other_cut(breaks_at: int) -> None:
    """Guards against another answer than that of a run without the failure, and no word of it: a
    cut where the round broke off could reject all that were live."""
    num_answers, num_degraded = 0, 0
    for seed, allow_degraded in product(range(12), (False, True)):
        sent = request(alpha=0.5, sampling={"seed": seed}, allow_degraded=allow_degraded)
        generator = FaultyGenerator(0.01, breaks_at=breaks_at)
        options: dict[str, Any] = {"time_left_s": 600.0, "within": WithinRounds(lambda _: None)}
        plain = await answer(sent, FaultyGenerator(0.01), LikelihoodScorer(), time_left_s=600.0)
        try:
            got = await answer(sent, generator, LikelihoodScorer(), **options)
        except errors.Unavailable:
            continue
        if got.degraded:
            num_degraded += 1
            assert got.degradations == (c.Degradation.GENERATOR,)
            assert all(candidate in plain.candidates for candidate in got.candidates)
        else:
            num_answers += not allow_degraded
            assert got.candidates == plain.candidates
    assert num_answers < 12 and num_degraded > 0


@pytest.mark.parametrize("batch", [0, 1, 3])
async def test_a_hanging_reward_does_not_outlast_the_deadline(batch: int) -> None:
    """The clock stands still, so that only the limit of one wait counts."""
    options: dict[str, Any] = {"time_left_s": 0.5, "clock": lambda: 0.0}
    async with asyncio.timeout(30):
        generation = await answer(
            lenient(alpha=0.0), ToyGenerator(), FaultyScorer(batch), **options
        )
        strict = answer(request(alpha=0.0), ToyGenerator(), FaultyScorer(batch), **options)
        if batch < 3:
            with pytest.raises(TimeoutError):
                await strict
        else:  # candidates of earlier rounds are complete and scored
            scored = await strict
            assert scored.hurried and scored.candidates == generation.candidates
            traced = sum(trace.generated_tokens for trace in scored.rounds)
            assert traced == scored.usage.generated_tokens, "the round without scores, too"
    assert generation.degradations == ((c.Degradation.REWARD,) if batch < 3 else ())
    assert generation.hurried, "equal requests with more time must not get this answer"
    assert generation.best.finish is c.FinishReason.STOP


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("error", [errors.Unavailable("gone"), errors.RewardInvalid("not finite")])
async def test_the_likelihood_replaces_a_failing_reward(batch: int, error: Exception) -> None:
    """The answer is flagged, and no ranking has values of two kinds."""
    with pytest.raises(type(error)):
        await answer(request(), ToyGenerator(), FaultyScorer(batch, error))
    generation = await answer(lenient(), ToyGenerator(), FaultyScorer(batch, error))
    assert generation.degradations == (c.Degradation.REWARD,) and not generation.hurried
    assert all(one.rewards == (one.score,) for one in generation.candidates)
    assert all(one.score == pytest.approx(one.mean_logprob) for one in generation.candidates)
    if batch < 2:
        plain = await answer(request(), ToyGenerator(), LikelihoodScorer())
        assert generation.candidates == plain.candidates


async def test_the_likelihood_replaces_scores_whose_sum_overflows() -> None:
    """Guards against a failed request where finite raw scores give no finite score."""
    weighted = lenient(rewards=(c.WeightedReward("a", 2.0),))
    huge = FixedScorer(lambda candidate: -1.7e308 if candidate.id == 3 else 0.5)
    generation = await answer(weighted, ToyGenerator(), huge)
    assert generation.degradations == (c.Degradation.REWARD,)
    with pytest.raises(errors.RewardInvalid):
        await answer(replace(weighted, allow_degraded=False), ToyGenerator(), huge)


async def test_rewards_read_the_beginning_as_a_part_of_the_answers() -> None:
    """Guards against rewards that judge the second half of a sentence, and a prompt that ends with
    an assistant's turn, which their templates would close."""
    scoring = AsyncMock(return_value=c.Scores((0.5,)))
    scorer = MagicMock()
    scorer.return_value.__aenter__.return_value.score = scoring
    user = c.Message("user", "Why?")
    begun = c.Prompt((user, c.Message("assistant", "Because ")), continue_final=True)
    async with RequestScorer([scorer], begun) as session:
        await session.score([c.Candidate(0, "it rains.", 3, -1.0)])
    scorer.assert_called_once_with(c.Prompt((user,)))
    (batch,) = scoring.await_args_list
    assert [candidate.text for candidate in batch.args[0]] == ["Because it rains."]


async def test_a_failing_reward_cancels_the_others() -> None:
    """Guards against sessions that stay open at a backend after the request."""
    hanging, failing = FaultyScorer(1), FaultyScorer(1, errors.Unavailable("gone"))
    async with RequestScorer([hanging, failing], PROMPT) as session:
        with pytest.raises(errors.Unavailable):
            await session.score([c.Candidate(0, "one", 1, -1.0)])
        assert hanging.num_waited == 1, "the case did not occur"
        assert hanging.num_cancelled == 1


async def test_an_answer_has_the_fingerprints_of_all_versions_of_a_reward() -> None:
    """Guards against the fingerprint of one version on an answer made by two."""

    class ChangingScorer(FixedScorer):
        """Sends the next of its fingerprints with each batch."""

        fingerprints = cycle(("old", "new"))

        async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
            return replace(await super().score(candidates), fingerprint=next(self.fingerprints))

    scorer, of_one = ChangingScorer(), set[str]()
    generation = await answer(request(), ToyGenerator(), scorer)
    for name in ("old", "new"):
        scorer.fingerprints = cycle((name,))
        of_one.add((await answer(request(), ToyGenerator(), scorer)).reward_fingerprint)
    assert generation.reward_fingerprint == "+".join(sorted(of_one)) and len(of_one) == 2


@pytest.mark.parametrize("fault", [{"hangs_at": 17}, {"breaks_at": 17}], ids=["hangs", "breaks"])
async def test_a_failed_stride_leaves_those_before_it(fault: dict[str, Any]) -> None:
    """Guards against complete answers of a round that are lost with its last stride, and against a
    wait beyond the deadline: the clock stands still, so that only the limit of one wait counts."""
    whole = lenient(algorithm=c.Algorithm.BEST_OF_N)
    planned = await answer(whole, FaultyGenerator(), FixedScorer())
    complete = {one.id for one in planned.candidates if one.num_tokens <= 17}
    assert complete, "the case did not occur"
    generator = FaultyGenerator(**fault)
    async with asyncio.timeout(30):
        left = await answer(whole, generator, FixedScorer(), time_left_s=1.0)
    assert left.hurried == ("hangs_at" in fault)
    assert left.degradations == (() if left.hurried else (c.Degradation.GENERATOR,))
    assert {one.id for one in left.candidates if one.finish is c.FinishReason.STOP} == complete
    assert left.usage.generated_tokens > 17 * len(complete)
    # No candidate is complete, or the request allows no degradation.
    for sent, breaks_at in ((whole, 1), (replace(whole, allow_degraded=False), 17)):
        with pytest.raises(errors.Unavailable):
            await answer(sent, FaultyGenerator(breaks_at=breaks_at), FixedScorer())


async def test_forks_that_have_not_grown_are_no_answers() -> None:
    """Guards against several equal answers, copies of one survivor, instead of the second best."""
    forked = lenient(8, 64, schedule=c.Schedule(first=8), branching=c.Branching(8, 2))
    generator = FaultyGenerator(hangs_at=8, end_every=NEVER)
    got = await answer(forked, generator, FixedScorer(), time_left_s=1.0)
    assert c.Degradation.DEADLINE in got.degradations
    assert len(got.candidates) == 2 == len({one.text for one in got.candidates})


@pytest.mark.parametrize("is_last", [True, False])
async def test_failed_prunes_cost_no_round(is_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against complete answers that are lost with the last prune, and untraced rounds."""
    early, toy = lenient(schedule=c.Schedule(first=8)), ToyGenerator(end_every=12)
    scorer = FixedScorer(lambda candidate: float(is_last and candidate.finish is not None))
    planned, num_failed = await answer(early, toy, scorer), 0

    async def failing(
        session: ToySession, keep: Collection[int], forks: c.Forks = c.NO_FORKS
    ) -> None:
        nonlocal num_failed
        num_failed += 1
        assert bool(keep) is not is_last, "the case did not occur"
        raise errors.Unavailable("gone")

    monkeypatch.setattr(ToySession, "prune", failing)
    generation = await answer(early, toy, scorer)
    assert num_failed == 1 and generation.rounds[-1].num_rejected
    if is_last:
        assert generation.candidates == planned.candidates and not generation.degraded
        assert len(generation.rounds) == len(planned.rounds)
    else:
        assert generation.degradations == (c.Degradation.GENERATOR,)
        with pytest.raises(errors.Unavailable):
            await answer(replace(early, allow_degraded=False), toy, scorer)


@pytest.mark.parametrize("verb", ["prune", "close"])
async def test_a_backend_that_hangs_holds_no_answer(verb: str) -> None:
    """Guards against DEADLINE_EXCEEDED although answers are complete."""
    generator = HeldGenerator(end_every=24)
    generator.gates[verb].shut()
    running = answer(lenient(), generator, FixedScorer(), time_left_s=1.0)
    left = await asyncio.wait_for(running, 30)
    assert left.best.text
    assert left.hurried or verb == "close"
    assert not generator.toy.ledger.owned


@pytest.mark.parametrize("stop", [(), ("no such text",)])
async def test_streamed_text_is_in_the_answer_if_a_stride_hangs(stop: tuple[str, ...]) -> None:
    sent: list[Any] = []
    sampling = {"min_tokens": 60, "stop": stop}
    single = lenient(1, schedule=c.Schedule(first=8), sampling=sampling)
    generator, within = FaultyGenerator(hangs_at=30), WithinRounds(sent.append, progress=False)
    generation = await answer(single, generator, FixedScorer(), time_left_s=1.0, within=within)
    assert "".join(delta.text for delta in sent) == generation.best.text
    assert generation.usage.generated_tokens == 30


@pytest.mark.parametrize("time_left_s", [66.0, 72.0, 75.0, 78.0, 81.0, 84.0, 90.0])
async def test_a_round_without_scores_is_hurried(time_left_s: float) -> None:
    """Guards against stored answers whose candidates the deadline decided."""
    generator = FaultyGenerator(0.1)
    scored: list[int] = []

    class Stalls(FixedScorer):
        async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
            scored.append(max(candidate.num_tokens for candidate in candidates))
            generator.clock.now_s += 60.0 if len(scored) == 2 else 0.1
            return await super().score(candidates)

    planned = lenient(8, 128, sampling={"min_tokens": 128})
    made = await answer(planned, generator, Stalls(), time_left_s=time_left_s)
    rounds = [trace.decision_token for trace in made.rounds]
    assert made.hurried or made.degraded or rounds == [16, 32, 64, 128] == scored


class LostOnce(FaultyGenerator):
    """Is lost beyond `breaks_at` tokens. Its second session is opened by `again`, or as the first
    one was."""

    def __init__(self, breaks_at: int, **options: Any) -> None:
        super().__init__(breaks_at=breaks_at, error=c.GeneratorLost, **options)
        self.specs: list[c.SessionSpec] = []
        self.again: Callable[[c.SessionSpec], AbstractAsyncContextManager[Any]] = super().open

    def open(self, spec: c.SessionSpec) -> Any:
        self.specs.append(spec)
        if len(self.specs) == 1:
            return super().open(spec)
        self.breaks_at = NEVER
        return self.again(spec)


@pytest.mark.parametrize("breaks_at", [0, 8, 20])
@pytest.mark.parametrize("n", [0, 12])
async def test_a_request_that_loses_its_generator_starts_again(n: int, breaks_at: int) -> None:
    """With as many candidates, also where their number was left open, and with the same answer. No
    text is sent twice."""
    planned = request(n, 64, schedule=c.Schedule(first=8), alpha=0.7)
    undisturbed = await answer(planned, ToyGenerator(end_every=99), FixedScorer())
    generator, sent = LostOnce(breaks_at, end_every=99), list[Any]()
    within = WithinRounds(sent.append)
    generation = await answer(planned, generator, FixedScorer(), within=within)
    assert generation.candidates == undisturbed.candidates
    assert generation.usage == undisturbed.usage
    assert [spec.n for spec in generator.specs] == [n, undisturbed.n]
    deltas = [event for event in sent if isinstance(event, c.TextDelta)]
    text = "".join(delta.text for delta in deltas)
    assert text in ("", generation.best.text)
    positions = [event.num_tokens for event in sent if not isinstance(event, c.TextDelta)]
    assert positions == sorted(positions)
    assert generator.ledger.owned == 0


async def test_a_request_starts_again_once() -> None:
    """Guards against a prompt that crashes its generator and is then sent to all others."""
    generator = FaultyGenerator(breaks_at=8, error=c.GeneratorLost)
    with pytest.raises(errors.Unavailable):
        await answer(request(), generator, FixedScorer())
    assert generator.num_broken == 2


@pytest.mark.parametrize("shows_text", [False, True])
async def test_text_that_was_sent_is_not_taken_back(shows_text: bool) -> None:
    """Guards a reader's text against the draws of another model or another rounding."""
    single = request(1, 64, schedule=c.Schedule(first=8), sampling={"min_tokens": 64})
    generator, other = LostOnce(20), replace(single.sampling, seed=99)
    generator.again = lambda spec: ToyGenerator.open(generator, replace(spec, sampling=other))
    within = WithinRounds(lambda _: None) if shows_text else None
    answering = answer(single, generator, FixedScorer(), within=within)
    if shows_text:
        with pytest.raises(errors.Unavailable, match="text of the other one differs"):
            await answering
    else:
        of_other = await answer(replace(single, sampling=other), ToyGenerator(), FixedScorer())
        assert (await answering).best == of_other.best
    assert generator.ledger.owned == 0


@asynccontextmanager
async def refusing(error: Exception | None) -> AsyncIterator[None]:
    """An opening that raises an error, or without one waits for ever."""
    if error:
        raise error
    await asyncio.Event().wait()
    yield


@pytest.mark.parametrize(
    "error",
    [
        errors.Unavailable("away"),
        errors.Overloaded("full"),
        errors.InvalidRequest([errors.Violation("n", "too many")]),
        None,
    ],
    ids=lambda error: type(error).__name__,
)
async def test_complete_answers_remain_if_no_generator_is_left(error: Exception | None) -> None:
    """Within the deadline. Guards against INVALID_ARGUMENT because a generator was lost."""
    for allow_degraded in (True, False):
        generator = LostOnce(32, end_every=20)
        generator.again = lambda _: refusing(error)
        planned = request(alpha=0.0, allow_degraded=allow_degraded)
        answering = answer(
            planned, generator, FixedScorer(), time_left_s=math.inf if error else 1.0
        )
        if error and not allow_degraded:
            with pytest.raises(errors.Unavailable, match="no other one could answer"):
                await answering
            continue
        generation = await asyncio.wait_for(answering, 30)
        assert generation.hurried is (error is None)
        assert generation.degradations == ((c.Degradation.GENERATOR,) if error else ())
        assert generation.best.finish is c.FinishReason.STOP
        assert generator.ledger.owned == 0


async def test_a_request_starts_again_within_its_deadline() -> None:
    """Guards against a second run that plans with all of the time."""
    generator = LostOnce(32, token_s=1.0, end_every=NEVER)
    long, began_s = lenient(64, 64), generator.clock()
    generation = await answer(long, generator, FixedScorer(), time_left_s=80.0)
    assert generator.clock() - began_s <= 80 and len(generator.specs) == 2
    assert generation.hurried and generation.timings.total_ms <= 80e3
