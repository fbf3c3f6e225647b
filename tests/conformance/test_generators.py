"""The contract of every generator: the own engine, vLLM, toys, each also over the network.

Leaving a session's context frees all it holds; the fixture checks that after each test.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from generator_service.engine.commands import ReportRate
from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Overloaded, SpecrejError
from tests.conformance import conftest
from tests.conformance.sessions import ENDLESS, Tokens, add, ids, to_the_end, whole, without_cuts
from tests.conformance.subjects import CAPACITY, ENDING, PROMPT, Subject
from tests.images import image
from tests.reward_service.tiny import CONTEXT

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOUND_S = 60.0
# Draws that depend on the tokens before them.
ADJUSTED = replace(
    ENDLESS,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=(c.TokenBias(5, 3.0),),
    min_p=0.001,
)
# Its texts could end at any word, but for min_tokens.
STRUCTURED = c.Sampling(
    max_tokens=24, seed=3, min_tokens=24, structured_output=c.Regex("[a-z]+( [a-z]+)*")
)
IN_ALL_WAYS = pytest.mark.parametrize(
    "sampling", [ENDLESS, ADJUSTED, STRUCTURED], ids=["plain", "adjusted", "structured"]
)


@conftest.also_streams
async def test_a_round_ends_at_its_decision_token(subject: Subject) -> None:
    async with subject.generator.open(c.SessionSpec(PROMPT, 5, ENDLESS, 8)) as session:
        assert session.n == 5
        assert session.prompt_tokens > 0 or not subject.has_ids
        first = await session.extend(8)
        assert (first.ended_by, first.num_tokens) == (c.RoundEnd.DECISION_TOKEN, 8)
        assert ids(first.candidates) == [0, 1, 2, 3, 4]
        assert {(one.num_tokens, one.finish) for one in first.candidates} == {(8, None)}
        assert {len(one.new_token_ids) for one in first.candidates} == {8 * subject.has_ids}
        again = await session.extend(8)  # nothing is left to do
        assert (again.ended_by, again.num_tokens) == (c.RoundEnd.DECISION_TOKEN, 8)
        assert {len(one.new_token_ids) for one in again.candidates} == {0}
        last = await session.extend(24)
        assert (last.ended_by, last.num_tokens) == (c.RoundEnd.ALL_FINISHED, 24)
        assert {one.num_tokens for one in last.candidates} == {24}
        assert {len(one.new_token_ids) for one in last.candidates} == {16 * subject.has_ids}


@conftest.also_streams
async def test_rounds_without_live_candidates_are_empty(subject: Subject) -> None:
    async with subject.generator.open(c.SessionSpec(PROMPT, 3, ENDLESS, 8)) as session:
        await session.extend(24)
        ended = await session.extend(24)
        assert (ended.candidates, ended.ended_by) == ((), c.RoundEnd.ALL_FINISHED)
    async with subject.generator.open(c.SessionSpec(PROMPT, 5, ENDLESS, 8)) as session:
        await session.extend(8)
        assert (await session.prune([])).freed_slots > 0
        ended = await session.extend(24)
        assert (ended.candidates, ended.ended_by) == ((), c.RoundEnd.ALL_FINISHED)


@conftest.all_but("llama-text", "gateway", "endpoint")
@pytest.mark.parametrize("sampling", [ENDLESS, replace(ENDLESS, logprobs=True, stop=("qq",))])
async def test_parts_of_a_round_and_its_end_are_the_round(
    subject: Subject, sampling: c.Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tokens and texts that are sent twice, lost or taken back where one candidate
    is left, which is a fork where there are forks."""
    conftest.skip_if_refused(subject, sampling)
    monkeypatch.setattr(ReportRate, "_PAUSE_S", 0.0)
    spec, ends, parts = c.SessionSpec(PROMPT, 4, sampling, 8), list[c.Candidate](), list[c.Round]()
    forks = {4: 2} if subject.can_fork(sampling) else {}
    followed = max(forks, default=2)
    for report in (None, parts.append):
        async with subject.generator.open(spec) as session:
            await session.extend(6, report)
            assert not any(part.candidates for part in parts)
            await session.prune([followed] if report else [2, 3], forks)
            ended = await session.extend(24, report)
            ends.append(next(one for one in ended.candidates if one.id == followed))
    grown = [one for part in parts for one in part.candidates]
    assert {one.id for one in grown} == {followed} and {part.num_live for part in parts} >= {1}
    texts = [*(one.text for one in grown), ends[1].text]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    whole = replace(
        ends[1],
        new_token_ids=tuple(i for one in [*grown, ends[1]] for i in one.new_token_ids),
        new_logprobs=tuple(p for one in [*grown, ends[1]] for p in one.new_logprobs),
    )
    if subject.is_exact:
        assert whole == ends[0]
    assert len(whole.new_token_ids) == 18 * subject.has_ids


@conftest.also_streams
async def test_a_cut_frees_slots_at_once(subject: Subject) -> None:
    """And ends requests of streams; between rounds of requests none runs."""
    before = (await subject.generator.describe()).slots
    async with subject.generator.open(c.SessionSpec(PROMPT, 6, ENDLESS, 8)) as session:
        grown = (await session.extend(8)).slots
        assert grown.capacity == before.capacity
        assert before.owned < grown.session <= grown.owned <= grown.capacity
        pruned = await session.prune([0, 4])
        assert pruned.freed_slots > 0
        assert pruned.slots.owned == grown.owned - pruned.freed_slots
        assert pruned.slots.session == grown.session - pruned.freed_slots
        await has_owned(subject, pruned.slots.owned)
        await conftest.runs_at_most(subject, 0 if subject.can_fork(ENDLESS) else 2)
        assert ids((await session.extend(9)).candidates) == [0, 4]
        assert (await session.prune([0, 4, 77])).freed_slots == 0  # no such candidate
    await has_owned(subject, before.owned)


async def has_owned(subject: Subject, slots: int) -> None:
    """Check the owned slots."""
    assert (await subject.generator.describe()).slots.owned == slots


@conftest.also_streams
@IN_ALL_WAYS
async def test_a_cut_changes_no_survivor(subject: Subject, sampling: c.Sampling) -> None:
    """In place: the tokens of a run without cuts in one round, wherever rounds end; of one with
    equal rounds where draws depend on their borders."""
    rounds = [3, 8, 17, 24]
    conftest.skip_if_refused(subject, sampling)
    expected = await without_cuts(subject, 8, sampling, rounds)
    async with subject.generator.open(c.SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens, finished = await to_the_end(session, rounds, cut=True)
    assert {n: one.finish for n, one in finished.items()} == {0: c.FinishReason.LENGTH}
    assert len(tokens[0]) == 24 or not subject.has_ids
    if not subject.is_exact:
        return
    for number, made in tokens.items():
        assert made == expected[number][: len(made)]
    if not subject.draws_by_round(sampling):
        async with subject.generator.open(c.SessionSpec(PROMPT, 8, sampling, 8)) as session:
            assert (await to_the_end(session, [1, 2, 3, 16, 23, 24]))[0] == expected


@conftest.also_streams
@IN_ALL_WAYS
async def test_a_fork_continues_its_parent(subject: Subject, sampling: c.Sampling) -> None:
    """It has its parent's tokens, then draws of its own, whatever is beside it; survivors have the
    tokens of a run without forks. The parent of one is rejected. Streams refuse forks."""
    rounds = [8, 9, 24]
    conftest.skip_if_refused(subject, sampling)
    before = (await subject.generator.describe()).slots
    expected = await without_cuts(subject, 4, sampling, rounds)
    parents = {4: 0, 6: 2, 9: 1}
    made, refused = (parents, ()) if subject.can_fork(sampling) else ({}, tuple(parents))
    async with subject.generator.open(c.SessionSpec(PROMPT, 4, sampling, 8)) as session:
        tokens = add({}, await session.extend(8))
        pruned = await session.prune([0, 2], parents)
        assert (pruned.refused, pruned.freed_slots > 0) == (refused, True)
        await has_owned(subject, pruned.slots.owned)
        tokens |= {number: tokens[parent] for number, parent in made.items()}
        for until_tokens in rounds[1:]:
            ended = await session.extend(until_tokens)
            assert ids(ended.candidates) == [0, 2, *made]
            add(tokens, ended)
    await has_owned(subject, before.owned)
    async with subject.generator.open(c.SessionSpec(PROMPT, 4, sampling, 8)) as session:
        again = add({}, await session.extend(8))
        await session.prune([], parents)
        again |= {number: again[parent] for number, parent in made.items()}
        for until_tokens in rounds[1:]:
            ended = await session.extend(until_tokens)
            assert ids(ended.candidates) == [*made]
            add(again, ended)
    assert len({tokens[number] for number in tokens}) == len(tokens)
    if subject.is_exact:
        assert {n: tokens[n] for n in (0, 2)} == {n: expected[n] for n in (0, 2)}
        assert all(tokens[n][:8] == expected[parent][:8] for n, parent in made.items())
        assert {n: tokens[n] for n in made} == {n: again[n] for n in made}


@conftest.also_remote_own
async def test_a_fork_of_a_fork_and_its_text(subject: Subject) -> None:
    """Texts and log-probabilities are of all tokens, also of those before the forks."""
    sampling = replace(ENDLESS, logprobs=True)
    async with subject.generator.open(c.SessionSpec(PROMPT, 3, sampling, 4)) as session:
        first = {one.id: one for one in (await session.extend(4)).candidates}
        await session.prune([0], {3: 0})
        second = {one.id: one for one in (await session.extend(8)).candidates}
        await session.prune([3], {5: 3, 7: 0})
        third = {one.id: one for one in (await session.extend(12)).candidates}
    assert sorted(third) == [3, 5, 7]
    for number, line in {3: [0, 3, 3], 5: [0, 3, 5], 7: [0, 0, 7]}.items():
        rounds = [made[i] for made, i in zip((first, second, third), line, strict=True)]
        logprobs = sum((part.new_logprobs for part in rounds), ())
        assert third[number].logprob == pytest.approx(sum(logprobs), abs=1e-3)
        assert third[number].num_tokens == len(logprobs) == 12
        assert third[number].text.startswith(second[line[1]].text.rstrip("\ufffd"))


async def test_forks_without_room_or_parent_are_refused(subject: Subject) -> None:
    """Guards against forks in slots that are full, and against forks of nothing."""
    sampling = c.Sampling(max_tokens=150, seed=5, ignore_eos=True)
    async with subject.generator.open(c.SessionSpec(PROMPT, 12, sampling, 4)) as session:
        ended = await session.extend(150)
        assert ended.ended_by is c.RoundEnd.SLOTS_FULL
        live = ids(ended.candidates)
        forks = {12 + index: parent for index, parent in enumerate([*live, 77])}
        pruned = await session.prune(live, forks)
        assert (pruned.freed_slots, pruned.refused) == (0, tuple(forks))
        assert pruned.slots.session == ended.slots.session
        assert (await session.prune(live[:1], {40: 77})).refused == (40,)
        made = await session.prune([], {50: live[0], 51: live[0]})
        assert (made.refused, made.freed_slots > 0) == ((), True)
        assert ids((await session.extend(ended.num_tokens + 1)).candidates) == [50, 51]


@conftest.also_endpoint
async def test_equal_seeds_give_equal_tokens(subject: Subject) -> None:
    """Salts change no token."""
    made = await whole(subject.generator, 4, ENDING, salt="one")
    again = await whole(subject.generator, 4, ENDING, salt="other")
    if subject.is_exact:
        assert [(one.text, one.finish) for one in made] == [(one.text, one.finish) for one in again]
        assert [one.logprob for one in made] == pytest.approx(
            [one.logprob for one in again], abs=1e-3
        )
    first = subject.generator.open(c.SessionSpec(PROMPT, 2, ENDING, 4, first_id=2))
    async with first as session:
        later = await session.extend(ENDING.max_tokens)
    assert [one.id for one in later.candidates] == [2, 3]
    if subject.is_exact:
        assert [one.text for one in later.candidates] == [one.text for one in made[2:]], (
            "of a later wave"
        )
    other = await whole(subject.generator, 4, replace(ENDING, seed=99))
    assert [one.text for one in made] != [one.text for one in other]
    assert len({one.text for one in made}) == 4


async def test_what_nobody_reads_changes_no_token(subject: Subject) -> None:
    """Without log-probabilities, which some generators then leave out."""
    made = await whole(subject.generator, 4, ENDING)
    spec = c.SessionSpec(PROMPT, 4, ENDING, 4, without_likelihood=True)
    async with subject.generator.open(spec) as session:
        again = (await session.extend(ENDING.max_tokens)).candidates
    if subject.is_exact:
        assert [one.text for one in again] == [one.text for one in made]
    for one, other in zip(again, made, strict=True):
        assert (
            one.logprob == 0
            or not subject.is_exact
            or one.logprob == pytest.approx(other.logprob, abs=1e-3)
        )


async def test_full_slots_end_a_round_and_a_cut_makes_progress(subject: Subject) -> None:
    sampling = c.Sampling(max_tokens=150, seed=5, ignore_eos=True)
    async with subject.generator.open(c.SessionSpec(PROMPT, 12, sampling, 4)) as session:
        live, reached, num_full = 12, 0, 0
        while live:
            ended = await session.extend(150)
            assert ended.slots.owned <= CAPACITY
            if ended.ended_by is c.RoundEnd.ALL_FINISHED:
                break
            assert ended.ended_by is c.RoundEnd.SLOTS_FULL
            assert ended.num_tokens > reached, "the cut made no progress"
            reached, num_full = ended.num_tokens, num_full + 1
            again = await session.extend(150)
            assert (again.ended_by, again.num_tokens) == (c.RoundEnd.SLOTS_FULL, reached)
            kept = ids(ended.candidates)[::4]
            live = len(kept)
            await session.prune(kept)
        assert num_full >= 1
        assert [one.num_tokens for one in ended.candidates] == [150] * live


async def test_n_zero_opens_as_many_as_fit(subject: Subject) -> None:
    most = (await subject.generator.describe()).max_candidates
    async with subject.generator.open(c.SessionSpec(PROMPT, 0, ENDLESS, 8)) as session:
        assert 1 < session.n <= most
        ended = await session.extend(8)
        assert ended.ended_by is c.RoundEnd.DECISION_TOKEN
        assert ids(ended.candidates) == list(range(session.n))


async def test_a_session_that_never_fits_is_refused(subject: Subject) -> None:
    sampling = c.Sampling(max_tokens=150, ignore_eos=True)
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(c.SessionSpec(PROMPT, 30, sampling, 150)):
            pass
    assert refused.value.reason == "SLOTS_EXCEEDED"
    assert int(refused.value.metadata["needed"]) > int(refused.value.metadata["capacity"])
    most = int(refused.value.metadata["candidates"])
    assert 1 <= most < 30
    async with subject.generator.open(c.SessionSpec(PROMPT, most, sampling, 150)) as session:
        assert (await session.extend(150)).ended_by is c.RoundEnd.ALL_FINISHED


@conftest.also_remote_own
async def test_images_are_refused_by_their_paths(subject: Subject) -> None:
    """No generator here has a model that takes them. Parts of text alone are text."""
    turns = (
        c.Message("user", "Why?"),
        c.Message("user", parts=(c.TextPart("Is "), image(), image())),
    )
    with pytest.raises(InvalidRequest) as refused:
        await subject.generator.check(c.SessionSpec(c.Prompt(turns), 2, ENDLESS, 8))
    paths = [f"prompt.messages[1].parts[{index}]" for index in (1, 2)]
    assert [one.field for one in refused.value.violations] == paths
    assert not (await subject.generator.describe()).takes_images
    text = c.Message("user", parts=(c.TextPart("Is it "), c.TextPart("so?")))
    prompts = c.Prompt((text,)), c.Prompt.from_user("Is it so?")
    numbers = []
    for prompt in prompts:
        async with subject.generator.open(c.SessionSpec(prompt, 1, ENDLESS, 8)) as session:
            await session.extend(24)
            numbers.append(session.prompt_tokens)
    assert numbers[0] == numbers[1]


@conftest.also_remote_own
async def test_a_session_beyond_the_context_is_refused(subject: Subject) -> None:
    if subject.is_toy:
        pytest.skip("a toy has no context")
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(
            c.SessionSpec(PROMPT, 2, c.Sampling(max_tokens=CONTEXT - 10), 8)
        ):
            pass
    assert refused.value.reason == "CONTEXT_EXCEEDED"
    fitted = c.SessionSpec(PROMPT, 1, replace(ENDLESS, max_tokens=CONTEXT), 1, fits_context=True)
    async with subject.generator.open(fitted) as session:
        longest = CONTEXT - session.prompt_tokens
        assert session.max_tokens == longest
        (candidate,) = (await session.extend(longest)).candidates
        assert (candidate.num_tokens, candidate.finish) == (longest, c.FinishReason.LENGTH)
    made = await whole(subject.generator, 1, c.Sampling(max_tokens=longest, ignore_eos=True))
    assert made[0].num_tokens == longest


@conftest.also_streams
@pytest.mark.parametrize("command", ["open", "extend", "prune"])
async def test_a_cancelled_command_leaves_nothing(subject: Subject, command: str) -> None:
    """A caller may be cancelled at any moment; other sessions are not affected."""
    long = c.Sampling(max_tokens=150, seed=5, ignore_eos=True)
    expected = await without_cuts(subject, 2, ENDLESS)
    begun = asyncio.Event()

    async def run() -> None:
        if command == "open":
            begun.set()
        async with subject.generator.open(c.SessionSpec(PROMPT, 5, long, 4)) as session:
            await session.extend(2)
            begun.set()
            if command == "prune":
                await session.prune([1, 3], {5: 1, 6: 3})  # streams refuse these
            await session.extend(150)

    running = asyncio.create_task(run())
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
    other = asyncio.create_task(without_cuts(subject, 2, ENDLESS))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await other == expected) >= subject.is_exact


@conftest.also_streams
async def test_sessions_do_not_change_each_other(subject: Subject) -> None:
    """Rounds of both at the same time, cuts in between."""
    samplings, rounds = [replace(ENDLESS, seed=seed) for seed in (3, 8)], [4, 12, 24]
    expected = [await without_cuts(subject, 6, sampling, rounds) for sampling in samplings]

    async def cut(sampling: c.Sampling) -> Tokens:
        async with subject.generator.open(c.SessionSpec(PROMPT, 6, sampling, 4)) as session:
            return (await to_the_end(session, rounds, cut=True))[0]

    made = await asyncio.gather(*(cut(sampling) for sampling in samplings))
    for tokens, alone in zip(made, expected, strict=True):
        assert len(tokens[0]) == 24 or not subject.has_ids
        for number, token_ids in tokens.items():
            assert token_ids == alone[number][: len(token_ids)] or not subject.is_exact


async def test_a_session_that_does_not_fit_now_is_refused_or_waits(subject: Subject) -> None:
    """The first takes all slots; the next is admitted once it is closed."""
    large = c.Sampling(max_tokens=100, ignore_eos=True)
    refusals: list[SpecrejError] = []

    async def second() -> None:
        try:
            await whole(subject.generator, 6, large, first_round_tokens=100)
        except Overloaded as error:
            refusals.append(error)

    async with subject.generator.open(c.SessionSpec(PROMPT, 6, large, 100)) as session:
        waiting = asyncio.create_task(second())
        ended = await session.extend(100)
        assert [one.num_tokens for one in ended.candidates] == [100] * 6
    async with asyncio.timeout(BOUND_S):
        await waiting
    assert len(refusals) <= subject.is_toy
    await second()
    assert len(refusals) <= subject.is_toy
