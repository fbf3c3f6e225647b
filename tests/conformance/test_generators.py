"""The contract of every generator: the own engine, vLLM, toys, each also over the network.

Leaving a session's context frees all it holds; the fixture checks that after each test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from specrej.contracts import (
    Candidate,
    FinishReason,
    Generator,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Round,
    RoundEnd,
    Sampling,
    Session,
    SessionSpec,
    StartedCandidate,
    StructuredOutput,
    TokenBias,
)
from specrej.errors import InvalidRequest, Overloaded, SpecrejError
from tests.conformance.conftest import Started
from tests.conformance.subjects import CAPACITY, HAS_VLLM, PROMPT, Subject
from tests.reward_service.tiny import CONTEXT
from tests.serving import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BOUND_S = 60.0
ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)
# Of 8 candidates some end by themselves and some are cut off, with the model as with the toy.
ENDING = Sampling(max_tokens=60, seed=4)

# Draws that depend on the tokens before them.
ADJUSTED = replace(
    ENDLESS,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=(TokenBias(5, 3.0),),
    min_p=0.001,
    bad_words=("delta", "birch cloud", "e", "ab"),
)
# Its texts could end at any word, but for min_tokens.
STRUCTURED = Sampling(
    max_tokens=24, seed=3, min_tokens=24, structured_output=Regex("[a-z]+( [a-z]+)*")
)
IN_ALL_WAYS = pytest.mark.parametrize(
    "sampling", [ENDLESS, ADJUSTED, STRUCTURED], ids=["plain", "adjusted", "structured"]
)
WORDS = Regex("(amber|birch)( cloud| delta){0,3}")
LIST = Grammar('start: "fjord" (" " word){0,2}\nword: "grove" | /heath/')
SIZE = {"type": "integer", "minimum": 0, "maximum": 120}
SCHEMA = {
    "type": "object",
    "properties": {"n": SIZE, "of": {"enum": ["x", "yy"]}},
    "required": ["n"],
    "additionalProperties": False,
}
OUTPUTS = (WORDS, LIST, JsonSchema(json.dumps(SCHEMA)), JsonObject())

Tokens = dict[int, tuple[int, ...]]


def ids(candidates: Sequence[Candidate]) -> list[int]:
    return [candidate.id for candidate in candidates]


def add(tokens: Tokens, ended: Round) -> Tokens:
    """Candidates' tokens, collected from the new tokens of each round."""
    for candidate in ended.candidates:
        tokens[candidate.id] = tokens.get(candidate.id, ()) + candidate.new_token_ids
        assert len(tokens[candidate.id]) == candidate.num_tokens
    return tokens


async def whole(
    generator: Generator,
    n: int,
    sampling: Sampling,
    *,
    first_candidate: int = 0,
    salt: str = "",
    first_round_tokens: int = 8,
    min_answers: int = 1,
) -> tuple[Candidate, ...]:
    """All candidates, in one round."""
    async with generator.open(
        SessionSpec(
            PROMPT,
            n,
            sampling,
            first_round_tokens,
            salt,
            first_candidate,
            min_answers=min_answers,
        )
    ) as session:
        ended = await session.extend(sampling.max_tokens)
        assert ended.ended_by is RoundEnd.ALL_FINISHED
        return ended.candidates


async def tokens_in_one_round(
    generator: Generator, n: int, sampling: Sampling, first_candidate: int = 0
) -> Tokens:
    """All candidates' tokens, in one round."""
    made = await whole(generator, n, sampling, first_candidate=first_candidate)
    return {candidate.id: candidate.new_token_ids for candidate in made}


async def to_the_end(
    session: Session, rounds: Collection[int], cut: bool = False
) -> tuple[Tokens, dict[int, FinishReason]]:
    """Tokens and finishes over several rounds; with `cut`, every other one is rejected in each."""
    tokens: Tokens = {}
    finishes: dict[int, FinishReason] = {}
    for until_tokens in rounds:
        ended = await session.extend(until_tokens)
        add(tokens, ended)
        live = [c.id for c in ended.candidates if c.finish is None]
        for candidate in ended.candidates:
            assert candidate.id not in finishes, "a finished candidate came back"
            if candidate.finish:
                finishes[candidate.id] = candidate.finish
        await session.prune(live[::2] if cut else live)
    return tokens, finishes


async def test_a_round_ends_at_its_decision_token(subject: Subject) -> None:
    async with subject.generator.open(SessionSpec(PROMPT, 5, ENDLESS, 8)) as session:
        assert session.n == 5
        assert session.prompt_tokens > 0
        first = await session.extend(8)
        assert (first.ended_by, first.num_tokens) == (RoundEnd.DECISION_TOKEN, 8)
        assert ids(first.candidates) == [0, 1, 2, 3, 4]
        assert {(c.num_tokens, len(c.new_token_ids), c.finish) for c in first.candidates} == {
            (8, 8, None)
        }
        again = await session.extend(8)  # nothing is left to do
        assert (again.ended_by, again.num_tokens) == (RoundEnd.DECISION_TOKEN, 8)
        assert {len(c.new_token_ids) for c in again.candidates} == {0}
        last = await session.extend(24)
        assert (last.ended_by, last.num_tokens) == (RoundEnd.ALL_FINISHED, 24)
        assert {(c.num_tokens, len(c.new_token_ids)) for c in last.candidates} == {(24, 16)}


async def test_every_candidate_is_accounted_for(subject: Subject) -> None:
    """Live ones in each round, finished ones in the round they finish in and never again."""
    async with subject.generator.open(SessionSpec(PROMPT, 8, ENDING, 8)) as session:
        _, finishes = await to_the_end(session, [1, 2, 7, 8, 30, 60])
        assert sorted(finishes) == list(range(8))


async def test_rounds_without_live_candidates_are_empty(subject: Subject) -> None:
    async with subject.generator.open(SessionSpec(PROMPT, 3, ENDLESS, 8)) as session:
        await session.extend(24)
        ended = await session.extend(24)
        assert (ended.candidates, ended.ended_by) == ((), RoundEnd.ALL_FINISHED)
    async with subject.generator.open(SessionSpec(PROMPT, 5, ENDLESS, 8)) as session:
        await session.extend(8)
        await session.prune([])
        ended = await session.extend(24)
        assert (ended.candidates, ended.ended_by) == ((), RoundEnd.ALL_FINISHED)


async def test_a_cut_frees_slots_at_once(subject: Subject) -> None:
    before = (await subject.generator.describe()).slots
    async with subject.generator.open(SessionSpec(PROMPT, 6, ENDLESS, 8)) as session:
        grown = (await session.extend(8)).slots
        assert subject.is_fleet or grown.capacity == before.capacity
        assert before.owned < grown.session <= grown.owned <= grown.capacity
        pruned = await session.prune([0, 4])
        assert pruned.freed_slots > 0
        assert pruned.slots.owned == grown.owned - pruned.freed_slots
        assert pruned.slots.session == grown.session - pruned.freed_slots
        await has_owned(subject, pruned.slots.owned)
        assert ids((await session.extend(9)).candidates) == [0, 4]
        assert (await session.prune([0, 4, 77])).freed_slots == 0  # no such candidate
    await has_owned(subject, before.owned)


async def has_owned(subject: Subject, slots: int) -> None:
    """Check the owned slots; a fleet's description is up to a poll old."""

    async def is_equal() -> bool:
        return (await subject.generator.describe()).slots.owned == slots

    if subject.is_fleet:
        await until(is_equal)
    else:
        assert await is_equal()


@IN_ALL_WAYS
async def test_a_cut_changes_no_survivor(subject: Subject, sampling: Sampling) -> None:
    """In place: the tokens of a run without cuts in one round, wherever rounds end."""
    expected = await tokens_in_one_round(subject.generator, 8, sampling)
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens, finishes = await to_the_end(session, [3, 8, 17, 24], cut=True)
    assert finishes == {0: FinishReason.LENGTH}
    assert {number: len(made) for number, made in tokens.items()}[0] == 24
    for number, made in tokens.items():
        assert made == expected[number][: len(made)]
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        assert (await to_the_end(session, [1, 2, 3, 16, 23, 24]))[0] == expected


@IN_ALL_WAYS
async def test_a_fork_continues_its_parent(subject: Subject, sampling: Sampling) -> None:
    """It has its parent's tokens, then those that a candidate of its id draws; survivors have the
    tokens of a run without forks. The parent of one is rejected."""
    before = (await subject.generator.describe()).slots  # of a fleet up to a poll old
    expected = await tokens_in_one_round(subject.generator, 4, sampling)
    parents = {4: 0, 6: 2, 9: 1}
    async with subject.generator.open(SessionSpec(PROMPT, 4, sampling, 8)) as session:
        tokens = add({}, await session.extend(8))
        pruned = await session.prune([0, 2], parents)
        assert (pruned.refused, pruned.freed_slots > 0) == ((), True)
        await has_owned(subject, pruned.slots.owned)
        tokens |= {number: tokens[parent] for number, parent in parents.items()}
        for until_tokens in (9, 24):
            ended = await session.extend(until_tokens)
            assert ids(ended.candidates) == [0, 2, 4, 6, 9]
            add(tokens, ended)
    await has_owned(subject, before.owned)
    assert {number: tokens[number] for number in (0, 2)} == {n: expected[n] for n in (0, 2)}
    started = tuple(StartedCandidate(n, expected[p][:8], 0.0) for n, p in parents.items())
    spec = SessionSpec(PROMPT, 3, sampling, 9, started=started)
    async with subject.generator.open(spec) as session:
        rest = {c.id: c.new_token_ids for c in (await session.extend(24)).candidates}
    assert {n: tokens[n] for n in parents} == {
        n: expected[p][:8] + rest[n] for n, p in parents.items()
    }
    assert len({tokens[number] for number in tokens}) == len(tokens)


async def test_a_fork_of_a_fork_and_its_text(subject: Subject) -> None:
    """Texts and log-probabilities are of all tokens, also of those before the forks."""
    sampling = replace(ENDLESS, logprobs=True)
    async with subject.generator.open(SessionSpec(PROMPT, 3, sampling, 4)) as session:
        first = {c.id: c for c in (await session.extend(4)).candidates}
        await session.prune([0], {3: 0})
        second = {c.id: c for c in (await session.extend(8)).candidates}
        await session.prune([3], {5: 3, 7: 0})
        third = {c.id: c for c in (await session.extend(12)).candidates}
    assert sorted(third) == [3, 5, 7]
    for number, line in {3: [0, 3, 3], 5: [0, 3, 5], 7: [0, 0, 7]}.items():
        rounds = [made[i] for made, i in zip((first, second, third), line, strict=True)]
        logprobs = sum((part.new_logprobs for part in rounds), ())
        assert third[number].logprob == pytest.approx(sum(logprobs), abs=1e-3)
        assert third[number].num_tokens == len(logprobs) == 12
        assert third[number].text.startswith(second[line[1]].text.rstrip("\ufffd"))


async def test_forks_without_room_or_parent_are_refused(subject: Subject) -> None:
    """Guards against forks in slots that are full, and against forks of nothing."""
    sampling = Sampling(max_tokens=150, seed=5, ignore_eos=True)
    async with subject.generator.open(SessionSpec(PROMPT, 12, sampling, 4)) as session:
        ended = await session.extend(150)
        assert ended.ended_by is RoundEnd.SLOTS_FULL
        live = ids(ended.candidates)
        forks = {12 + index: parent for index, parent in enumerate([*live, 77])}
        pruned = await session.prune(live, forks)
        assert (pruned.freed_slots, pruned.refused) == (0, tuple(forks))
        assert pruned.slots.session == ended.slots.session
        assert (await session.prune(live[:1], {40: 77})).refused == (40,)
        made = await session.prune([], {50: live[0], 51: live[0]})
        assert (made.refused, made.freed_slots > 0) == ((), True)
        assert ids((await session.extend(ended.num_tokens + 1)).candidates) == [50, 51]


async def test_promised_answers_are_never_out_of_room(subject: Subject) -> None:
    """Guards against full slots while no more candidates than promised are live."""
    sampling = Sampling(max_tokens=150, seed=5, ignore_eos=True)
    # Each part of a split session must have the room: all survivors may be there.
    least = 1 if subject.is_split else 3
    spec = SessionSpec(PROMPT, 12, sampling, 4, min_answers=least)
    async with subject.generator.open(spec) as session:
        ended = await session.extend(150)
        assert ended.ended_by is RoundEnd.SLOTS_FULL
        live = ids(ended.candidates)[-least:]
        await session.prune(live)
        ended = await session.extend(150)
        assert (ended.ended_by, ids(ended.candidates)) == (RoundEnd.ALL_FINISHED, live)
    if not subject.is_fleet:
        with pytest.raises(InvalidRequest, match="min_answers"):
            await whole(subject.generator, 0, sampling, min_answers=30)


async def test_equal_seeds_give_equal_tokens(subject: Subject) -> None:
    """Salts change no token."""
    made = await whole(subject.generator, 4, ENDING, salt="one")
    again = await whole(subject.generator, 4, ENDING, salt="other")
    assert [(c.text, c.finish) for c in made] == [(c.text, c.finish) for c in again]
    assert [c.logprob for c in made] == pytest.approx([c.logprob for c in again], abs=1e-3)
    other = await whole(subject.generator, 4, replace(ENDING, seed=99))
    assert [c.text for c in made] != [c.text for c in other]
    assert len({c.text for c in made}) == 4


async def test_a_candidate_is_the_same_in_any_session(subject: Subject) -> None:
    """A request can be split over several generators."""
    together = await tokens_in_one_round(subject.generator, 6, ENDLESS)
    apart = await tokens_in_one_round(subject.generator, 2, ENDLESS, first_candidate=3)
    assert apart == {number: together[number] for number in (3, 4)}
    async with subject.generator.open(SessionSpec(PROMPT, 3, ENDLESS, 8, "", 1000)) as session:
        assert ids((await session.extend(4)).candidates) == [1000, 1001, 1002]
        await session.prune([1001])
        assert ids((await session.extend(8)).candidates) == [1001]


@IN_ALL_WAYS
async def test_a_session_goes_on_from_given_tokens(subject: Subject, sampling: Sampling) -> None:
    """They are neither drawn again nor reported, and their log-probability is kept."""
    expected = await tokens_in_one_round(subject.generator, 6, sampling)
    started = tuple(StartedCandidate(i, expected[i][:8], -4.0) for i in (2, 5))
    async with subject.generator.open(
        SessionSpec(PROMPT, 2, sampling, 9, started=started)
    ) as session:
        at_start = (await session.extend(8)).candidates
        assert [(c.id, c.num_tokens, c.new_token_ids, c.logprob) for c in at_start] == [
            (2, 8, (), -4.0),
            (5, 8, (), -4.0),
        ]
        ended = await session.extend(24)
        assert {c.id: c.new_token_ids for c in ended.candidates} == {
            i: expected[i][8:] for i in (2, 5)
        }
        assert all(c.logprob < -4.0 for c in ended.candidates)


async def test_given_tokens_are_kept_where_others_would_be_drawn(subject: Subject) -> None:
    """Guards a survivor's text against the rounding of another batch."""
    expected = await tokens_in_one_round(subject.generator, 6, ENDLESS)
    given = StartedCandidate(5, expected[2][:8], 0.0)
    spec = SessionSpec(PROMPT, 1, ENDLESS, 9, started=(given,))
    async with subject.generator.open(spec) as session:
        (candidate,) = (await session.extend(24)).candidates
    assert len(candidate.new_token_ids) == 16
    (other,) = await whole(subject.generator, 1, replace(ENDLESS, max_tokens=8), first_candidate=2)
    assert candidate.text.startswith(other.text[:-1])
    assert subject.is_toy or candidate.new_token_ids != expected[5][8:]


async def test_candidates_stop_or_are_cut_off(subject: Subject) -> None:
    made = await whole(subject.generator, 8, ENDING)
    for candidate in made:
        if candidate.finish is FinishReason.LENGTH:
            assert candidate.num_tokens == ENDING.max_tokens
        else:
            assert 0 < candidate.num_tokens <= ENDING.max_tokens
    assert {candidate.finish for candidate in made} == set(FinishReason)


@pytest.mark.parametrize(
    "changes", [{"ignore_eos": True}, {"min_tokens": 60}, {"ignore_eos": True, "max_tokens": 1}]
)
async def test_no_candidate_ends_early(subject: Subject, changes: dict[str, int | bool]) -> None:
    sampling = replace(ENDING, **changes)  # type: ignore[arg-type]
    made = await whole(subject.generator, 8, sampling)
    assert {(c.finish, c.num_tokens) for c in made} == {(FinishReason.LENGTH, sampling.max_tokens)}


async def test_min_tokens_counts_from_the_first_over_rounds(subject: Subject) -> None:
    """Guards against a minimum that begins anew in each round."""
    sampling = replace(ENDING, min_tokens=20)
    lengths = [c.num_tokens for c in await whole(subject.generator, 8, sampling)]
    assert 20 <= min(lengths) < 60
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens, _ = await to_the_end(session, [5, 10, 15, 25, 60])
    assert [len(tokens[number]) for number in range(8)] == lengths


async def test_stop_texts_end_a_candidate_before_them(subject: Subject) -> None:
    if subject.is_toy:
        pytest.skip("a toy has no stop texts")
    made = await whole(subject.generator, 4, ENDLESS)
    text = made[0].text
    stop = next(c for at, c in enumerate(text) if at > 2 and c.isascii() and text.index(c) == at)
    sampling = replace(ENDLESS, stop=(stop,))
    async with subject.generator.open(SessionSpec(PROMPT, 4, sampling, 8)) as session:
        ended = await session.extend(24)
        first = ended.candidates[0]
        assert (first.finish, first.text) == (FinishReason.STOP, text.partition(stop)[0])
        assert first.num_tokens < 24
        for candidate, endless in zip(ended.candidates, made, strict=True):
            assert candidate.text == endless.text.partition(stop)[0]
            assert candidate.new_token_ids == endless.new_token_ids[: candidate.num_tokens]


async def test_adjustments_change_draws_as_defined(subject: Subject) -> None:
    """Each alone. A toy always draws its first word, so for it no token is below min_p."""

    async def drawn(n: int = 8, **changes: Any) -> list[tuple[int, ...]]:
        sampling = replace(ENDLESS, max_tokens=8 if subject.is_toy else 60, **changes)
        return [c.new_token_ids for c in await whole(subject.generator, n, sampling)]

    def num_distinct(made: list[tuple[int, ...]]) -> int:
        return sum(len(set(tokens)) for tokens in made)

    plain = await drawn()
    token = Counter(chain(*plain)).most_common(1)[0][0]
    assert token not in chain(*await drawn(logit_bias=(TokenBias(token, -100.0),)))
    assert {*chain(*await drawn(logit_bias=(TokenBias(token, 100.0),)))} == {token}
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        changes: dict[str, Any] = {penalty: 2.0}
        assert num_distinct(await drawn(**changes)) > num_distinct(plain), penalty
    if not subject.is_toy:
        assert {*await drawn(min_p=1.0)} == {*await drawn(1, temperature=0.0)}


async def test_bad_words_never_appear(subject: Subject) -> None:
    """Words of one token and of several, over rounds; texts have them without."""
    texts = [c.text for c in await whole(subject.generator, 8, replace(ENDLESS, max_tokens=60))]
    if subject.is_toy:
        words = [*texts[0].split()[:1], " ".join(texts[1].split()[3:5])]
    else:  # bytes are tokens
        readable = [c for c in texts[0] if c.isascii() and c.isprintable() and c != " "]
        words = [
            readable[0],
            next(t[i : i + 2] for t in texts for i in range(40) if printable(t, i)),
        ]
    assert all(any(word in text for text in texts) for word in words)
    sampling = replace(ENDLESS, max_tokens=60, bad_words=tuple(words))
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        for until_tokens in (1, 2, 9, 60):
            ended = await session.extend(until_tokens)
    assert len(ended.candidates) == 8
    assert not [word for word in words for c in ended.candidates if word in c.text]


def printable(text: str, at: int) -> bool:
    """Whether two characters are of one byte each, and neither is a space."""
    part = text[at : at + 2]
    return len(part) == 2 and part.isascii() and part.isprintable() and " " not in part


async def test_stop_tokens_end_a_candidate(subject: Subject) -> None:
    """Its text is without them; they do not count before min_tokens, and do with ignore_eos."""
    made = await whole(subject.generator, 4, ENDLESS)
    # The first token that candidate 0 has from its third token on.
    tokens = made[0].new_token_ids
    at = next(i for i in range(3, 24) if tokens[i] not in tokens[:i])
    sampling = replace(ENDLESS, stop_token_ids=(tokens[at],))
    ended = await whole(subject.generator, 4, sampling)
    assert (ended[0].finish, ended[0].num_tokens) == (FinishReason.STOP, at + 1)
    before = await whole(subject.generator, 1, replace(ENDLESS, max_tokens=at))
    assert ended[0].text == before[0].text
    for candidate, endless in zip(ended, made, strict=True):
        assert candidate.new_token_ids == endless.new_token_ids[: candidate.num_tokens]
        stops = [token_id in sampling.stop_token_ids for token_id in candidate.new_token_ids]
        assert any(stops) == (candidate.finish is FinishReason.STOP) == stops[-1]
    late = await whole(subject.generator, 4, replace(sampling, min_tokens=at + 1))
    assert tokens[at] not in late[0].new_token_ids[: at + 1]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.kind)
async def test_answers_conform_to_a_structured_output(
    subject: Subject, output: StructuredOutput
) -> None:
    """All that end by themselves, also after cuts and as forks, which have their parents' states;
    survivors have the tokens of a run without cuts."""
    sampling = Sampling(max_tokens=60, seed=6, structured_output=output)
    if subject.is_toy and output.kind.startswith("json"):
        assert await refused_fields(subject, output) == ["sampling.structured_output"]
        return
    expected = {c.id: c for c in await whole(subject.generator, 8, sampling)}
    complete = [c for c in expected.values() if c.finish is FinishReason.STOP]
    assert complete
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens: Tokens = {}
        for round_, until_tokens in enumerate((1, 2, 4, 9, 60)):
            ended = await session.extend(until_tokens)
            add(tokens, ended)
            complete += [c for c in ended.candidates if c.finish is FinishReason.STOP]
            live = [c.id for c in ended.candidates if c.finish is None]
            forks = {100 * (round_ + 1) + at: parent for at, parent in enumerate(live[:2])}
            await session.prune(live[::2], forks)
            tokens |= {number: tokens[parent] for number, parent in forks.items()}
    for number, made in tokens.items():
        assert number >= 100 or made == expected[number].new_token_ids[: len(made)]
    assert not [c.text for c in complete if not conforms(c.text, output)]


def conforms(text: str, output: StructuredOutput) -> bool:
    if isinstance(output, (JsonObject, JsonSchema)):
        schema = SCHEMA if isinstance(output, JsonSchema) else {"type": "object"}
        jsonschema.validate(json.loads(text), schema)
        return True
    pattern = output.pattern if isinstance(output, Regex) else "fjord( grove| heath){0,2}"
    return bool(re.fullmatch(pattern, text))


async def test_a_structured_output_comes_before_other_limits(subject: Subject) -> None:
    """Where it allows one token, that one is drawn. Guards against rows without a token."""
    sampling = Sampling(
        *(60, 1.0, 0, 1.0, (), 3), min_tokens=50, bad_words=("amber",), min_p=1.0,
        structured_output=Regex("amber"),
    )  # fmt: skip
    made = await whole(subject.generator, 2, sampling)
    assert {(c.text, c.finish) for c in made} == {("amber", FinishReason.STOP)}


async def refused_fields(subject: Subject, output: StructuredOutput) -> list[str]:
    sampling = Sampling(max_tokens=9, structured_output=output)
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(SessionSpec(PROMPT, 2, sampling, 8)):
            pass
    return [violation.field for violation in refused.value.violations]


async def test_outputs_that_are_not_supported_are_refused(subject: Subject) -> None:
    """Before slots are taken, with the path; work without end among them."""
    schemas = ('{"type": "array", "uniqueItems": true}', '{"type": "array", "maxItems": 999999999}')
    for schema in schemas:
        fields = await refused_fields(subject, JsonSchema(schema))
        assert fields == ["sampling.structured_output.json_schema.schema"]
    assert await refused_fields(subject, Regex("a(?=b)")) == [
        "sampling.structured_output.regex.pattern"
    ]
    assert await refused_fields(subject, Grammar("begin: ")) == [
        "sampling.structured_output.grammar.lark"
    ]


async def test_logprobs_are_reported_if_requested(subject: Subject) -> None:
    async with subject.generator.open(
        SessionSpec(PROMPT, 4, replace(ENDLESS, logprobs=True), 8)
    ) as session:
        logprobs: dict[int, list[float]] = {number: [] for number in range(4)}
        for until_tokens in (8, 9, 24):
            for candidate in (await session.extend(until_tokens)).candidates:
                assert len(candidate.new_logprobs) == len(candidate.new_token_ids)
                assert all(-50 < logprob < 0 for logprob in candidate.new_logprobs)
                logprobs[candidate.id] += candidate.new_logprobs
                assert candidate.logprob == pytest.approx(sum(logprobs[candidate.id]), abs=1e-3)
    assert {c.new_logprobs for c in await whole(subject.generator, 4, ENDLESS)} == {()}


async def test_the_most_probable_tokens_are_reported_if_requested(subject: Subject) -> None:
    """As many of each step, best first, over rounds, with the bytes of each token."""
    sampling = replace(ENDLESS, top_k=3, temperature=2.0, logprobs=True, top_logprobs=5)
    async with subject.generator.open(SessionSpec(PROMPT, 4, sampling, 8)) as session:
        texts: dict[int, bytes] = {}
        for until_tokens in (8, 9, 24):
            ended = await session.extend(until_tokens)
            texts |= {text.token_id: text.token for text in ended.token_texts}
            for c in ended.candidates:
                assert {*c.new_token_ids, *c.new_top_token_ids} <= texts.keys()
                count = len(c.new_token_ids)
                assert len(c.new_top_token_ids) == len(c.new_top_logprobs) == 5 * count
                for at, (token, logprob) in enumerate(
                    zip(c.new_token_ids, c.new_logprobs, strict=True)
                ):
                    step = slice(5 * at, 5 * at + 5)
                    ids, values = c.new_top_token_ids[step], c.new_top_logprobs[step]
                    assert len({*ids}) == 5
                    assert list(values) == sorted(values, reverse=True)
                    assert values[ids.index(token)] == pytest.approx(logprob, abs=1e-4)
            await session.prune([c.id for c in ended.candidates][1:])
    assert all(texts.values())
    plain = await whole(subject.generator, 4, replace(ENDLESS, logprobs=True))
    assert {(c.new_top_token_ids, c.new_top_logprobs) for c in plain} == {((), ())}


async def test_the_likeliest_token_is_the_same_for_all(subject: Subject) -> None:
    if subject.is_toy:
        pytest.skip("a toy has no likeliest token")
    greedy = await tokens_in_one_round(subject.generator, 1, replace(ENDLESS, temperature=0.0))
    made = await tokens_in_one_round(subject.generator, 3, replace(ENDLESS, top_k=1))
    assert set(made.values()) == {greedy[0]}


async def test_full_slots_end_a_round_and_a_cut_makes_progress(subject: Subject) -> None:
    sampling = Sampling(max_tokens=150, seed=5, ignore_eos=True)
    async with subject.generator.open(SessionSpec(PROMPT, 12, sampling, 4)) as session:
        live, reached, num_full = 12, 0, 0
        while live:
            ended = await session.extend(150)
            assert ended.slots.owned <= CAPACITY
            if ended.ended_by is RoundEnd.ALL_FINISHED:
                break
            assert ended.ended_by is RoundEnd.SLOTS_FULL
            assert ended.num_tokens > reached, "the cut made no progress"
            reached, num_full = ended.num_tokens, num_full + 1
            again = await session.extend(150)
            assert (again.ended_by, again.num_tokens) == (RoundEnd.SLOTS_FULL, reached)
            # Some of each part: a part that is full and loses no candidate makes no progress.
            kept = ids(ended.candidates)[::4]
            live = len(kept)
            await session.prune(kept)
        assert num_full >= 1
        assert [c.num_tokens for c in ended.candidates] == [150] * live


async def test_n_zero_opens_as_many_as_fit(subject: Subject) -> None:
    most = (await subject.generator.describe()).max_candidates
    async with subject.generator.open(SessionSpec(PROMPT, 0, ENDLESS, 8)) as session:
        assert 1 < session.n <= most
        ended = await session.extend(8)
        assert ended.ended_by is RoundEnd.DECISION_TOKEN
        assert ids(ended.candidates) == list(range(session.n))


async def test_a_session_that_never_fits_is_refused(subject: Subject) -> None:
    sampling = Sampling(max_tokens=150, ignore_eos=True)
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(SessionSpec(PROMPT, 30, sampling, 150)):
            pass
    assert refused.value.reason == "SLOTS_EXCEEDED"
    if not subject.is_fleet:
        assert int(refused.value.metadata["needed"]) > int(refused.value.metadata["capacity"])
    most = int(refused.value.metadata["candidates"])
    assert 1 <= most < 30
    if subject.is_split:  # how many slots parts have is learned from what they refuse
        most //= 3
    async with subject.generator.open(SessionSpec(PROMPT, most, sampling, 150)) as session:
        assert (await session.extend(150)).ended_by is RoundEnd.ALL_FINISHED


async def test_a_session_beyond_the_context_is_refused(subject: Subject) -> None:
    if subject.is_toy:
        pytest.skip("a toy has no context")
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(
            SessionSpec(PROMPT, 2, Sampling(max_tokens=CONTEXT - 10), 8)
        ):
            pass
    assert refused.value.reason == "CONTEXT_EXCEEDED"
    async with subject.generator.open(SessionSpec(PROMPT, 1, ENDLESS, 1)) as session:
        longest = CONTEXT - session.prompt_tokens
    made = await whole(subject.generator, 1, Sampling(max_tokens=longest, ignore_eos=True))
    assert made[0].num_tokens == longest


async def test_a_cancelled_round_leaves_nothing(subject: Subject) -> None:
    """A caller may be cancelled at any moment of a round; other sessions are not affected."""
    long = Sampling(max_tokens=150, seed=5, ignore_eos=True)
    expected = await tokens_in_one_round(subject.generator, 2, ENDLESS)

    async def run(begun: asyncio.Event) -> None:
        async with subject.generator.open(SessionSpec(PROMPT, 5, long, 4)) as session:
            await session.extend(2)
            begun.set()
            await session.extend(150)

    begun = asyncio.Event()
    running = asyncio.create_task(run(begun))
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
    other = asyncio.create_task(tokens_in_one_round(subject.generator, 2, ENDLESS))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await other == expected


async def test_a_failing_caller_leaves_nothing(subject: Subject) -> None:
    with pytest.raises(ZeroDivisionError):
        async with subject.generator.open(SessionSpec(PROMPT, 3, ENDLESS, 8)) as session:
            await session.extend(4)
            raise ZeroDivisionError


async def test_sessions_do_not_change_each_other(subject: Subject) -> None:
    """Rounds of both at the same time, cuts in between."""
    seeds = (3, 8)
    samplings = [replace(ENDLESS, seed=seed) for seed in seeds]
    expected = [await tokens_in_one_round(subject.generator, 6, sampling) for sampling in samplings]

    async def cut(sampling: Sampling) -> Tokens:
        async with subject.generator.open(SessionSpec(PROMPT, 6, sampling, 4)) as session:
            return (await to_the_end(session, [4, 12, 24], cut=True))[0]

    made = await asyncio.gather(*(cut(sampling) for sampling in samplings))
    for tokens, alone in zip(made, expected, strict=True):
        assert len(tokens[0]) == 24
        for number, token_ids in tokens.items():
            assert token_ids == alone[number][: len(token_ids)]


async def test_a_session_that_does_not_fit_now_is_refused_or_waits(subject: Subject) -> None:
    """The first takes all slots; the next is admitted once it is closed."""
    large = Sampling(max_tokens=100, ignore_eos=True)
    refusals: list[SpecrejError] = []

    async def second() -> None:
        try:
            await whole(subject.generator, 6, large, first_round_tokens=100)
        except Overloaded as error:
            refusals.append(error)

    async with subject.generator.open(SessionSpec(PROMPT, 6, large, 100)) as session:
        waiting = asyncio.create_task(second())
        ended = await session.extend(100)
        assert [c.num_tokens for c in ended.candidates] == [100] * 6
    async with asyncio.timeout(BOUND_S):
        await waiting
    assert len(refusals) <= subject.is_toy
    await second()
    assert len(refusals) <= subject.is_toy


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not in this environment: make vllm")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_tokens": 20},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": (TokenBias(7, 4.0), TokenBias(9, -100.0))},
        {"bad_words": ("a", "e ", "th")},
        {"stop_token_ids": (30, 31, 32), "min_tokens": 9},
        {"top_logprobs": 4},
        {"structured_output": OUTPUTS[-1]},
        {"structured_output": OUTPUTS[-2], "repetition_penalty": 1.5, "top_p": 0.9},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
async def test_engines_draw_equal_tokens(started: Started, changes: dict[str, Any]) -> None:
    """Equal tokens, and equal log-probabilities within 1e-3."""
    sampling = replace(ENDING, logprobs=True, **changes)
    own = await whole((await started.get("own")).generator, 8, sampling)
    other = await whole((await started.get("vllm")).generator, 8, sampling)
    assert [c.new_token_ids for c in own] == [c.new_token_ids for c in other]
    assert [(c.text, c.finish) for c in own] == [(c.text, c.finish) for c in other]
    for ours, theirs in zip(own, other, strict=True):
        assert ours.new_logprobs == pytest.approx(theirs.new_logprobs, abs=1e-3)
        assert ours.new_top_token_ids == theirs.new_top_token_ids
        assert ours.new_top_logprobs == pytest.approx(theirs.new_top_logprobs, abs=1e-3)
