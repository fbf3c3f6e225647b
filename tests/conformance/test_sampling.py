"""How every generator draws: ends, adjustments, structured outputs and probabilities."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest
from tests.conformance import conftest
from tests.conformance.sessions import ENDLESS, Tokens, add, to_the_end, whole, without_cuts
from tests.conformance.subjects import ENDING, IS_FLOAT32, PROMPT, SCRIPTED, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")
WORDS = c.Regex("(amber|birch)( cloud| delta){0,3}")
LIST = c.Grammar('start: "fjord" (" " word){0,2}\nword: "grove" | /heath/')
SIZE = {"type": "integer", "minimum": 0, "maximum": 120}
SCHEMA = {
    "type": "object",
    "properties": {"n": SIZE, "of": {"enum": ["x", "yy"]}},
    "required": ["n"],
    "additionalProperties": False,
}
OUTPUTS = (WORDS, LIST, c.JsonSchema(json.dumps(SCHEMA)), c.JsonObject())


@conftest.also_endpoint
async def test_candidates_stop_or_are_cut_off(subject: Subject) -> None:
    ending = subject.ending
    made = await whole(subject.generator, 8, ending)
    for candidate in made:
        if candidate.finish is c.FinishReason.LENGTH:
            assert candidate.num_tokens == ending.max_tokens
        else:
            assert 0 < candidate.num_tokens <= ending.max_tokens
    assert {candidate.finish for candidate in made} == set(c.FinishReason)


@pytest.mark.parametrize(
    "changes", [{"ignore_eos": True}, {"min_tokens": 60}, {"ignore_eos": True, "max_tokens": 1}]
)
async def test_no_candidate_ends_early(subject: Subject, changes: dict[str, int | bool]) -> None:
    sampling = replace(ENDING, **changes)  # type: ignore[arg-type]
    conftest.skip_if_refused(subject, sampling)
    made = await whole(subject.generator, 8, sampling)
    assert {(one.finish, one.num_tokens) for one in made} == {
        (c.FinishReason.LENGTH, sampling.max_tokens)
    }


async def test_min_tokens_counts_from_the_first_over_rounds(subject: Subject) -> None:
    """Guards against a minimum that begins anew in each round: then all have at least 45."""
    sampling, rounds = replace(ENDING, min_tokens=20), [5, 10, 15, 25, 60]
    conftest.skip_if_refused(subject, sampling)
    async with subject.generator.open(c.SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens, _ = await to_the_end(session, rounds)
    lengths = [len(tokens[number]) for number in range(8)]
    assert 20 <= min(lengths) < 45
    if IS_FLOAT32:
        assert tokens == await without_cuts(subject, 8, sampling, rounds)


@conftest.all_but("gateway", "endpoint", *SCRIPTED)
async def test_stop_texts_end_a_candidate_before_them(subject: Subject) -> None:
    """Rounds end after each token, so within stop texts of several."""
    if subject.is_toy:
        pytest.skip("a toy has no stop texts")
    sampling, rounds = replace(ENDLESS, max_tokens=12), range(1, 13)
    made = await reports(subject, sampling, rounds)
    text, stop = made[0].text, " "
    if subject.is_exact:
        pairs = (text[at : at + 2] for at in range(1, len(text) - 1))
        stop = next(pair for pair in pairs if pair.isascii())
    ended = await reports(subject, replace(sampling, stop=(stop,)), rounds)
    assert ended[0].finish is c.FinishReason.STOP
    assert not [candidate.text for candidate in ended.values() if stop in candidate.text]
    if subject.is_exact:
        assert {n: one.text for n, one in ended.items()} == {
            n: one.text.partition(stop)[0] for n, one in made.items()
        }


async def reports(
    subject: Subject, sampling: c.Sampling, rounds: Collection[int]
) -> dict[int, c.Candidate]:
    """The last report of each of four candidates, after several rounds."""
    async with subject.generator.open(c.SessionSpec(PROMPT, 4, sampling, 8)) as session:
        return (await to_the_end(session, rounds))[1]


@conftest.all_but("remote-own", "llama-text", "gateway", "endpoint", *SCRIPTED)
async def test_stop_tokens_end_a_candidate(subject: Subject) -> None:
    """Its text is without them; they do not count before min_tokens, and do with ignore_eos."""
    made = await whole(subject.generator, 4, ENDLESS)
    # The first token that candidate 0 has from its third token on; all of them where draws differ.
    tokens = made[0].new_token_ids
    at = next(i for i in range(3, 24) if tokens[i] not in tokens[:i])
    stops = tokens[at : at + 1] if subject.is_exact else tokens[at:]
    sampling = replace(ENDLESS, stop_token_ids=stops)
    ended = await whole(subject.generator, 4, sampling)
    for candidate, endless in zip(ended, made, strict=True):
        ends = [token_id in stops for token_id in candidate.new_token_ids]
        assert any(ends) == (candidate.finish is c.FinishReason.STOP) == ends[-1]
        expected = endless.new_token_ids[: candidate.num_tokens]
        assert candidate.new_token_ids == expected or not subject.is_exact
    if subject.is_exact:
        assert (ended[0].finish, ended[0].num_tokens) == (c.FinishReason.STOP, at + 1)
        before = await whole(subject.generator, 1, replace(ENDLESS, max_tokens=at))
        assert ended[0].text == before[0].text
    late = replace(sampling, min_tokens=at + 1)
    conftest.skip_if_refused(subject, late)
    first = (await whole(subject.generator, 4, late))[0]
    assert tokens[at] not in first.new_token_ids[: at + 1]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.kind)
@conftest.also_streams
async def test_answers_conform_to_a_structured_output(
    subject: Subject, output: c.StructuredOutput
) -> None:
    """All that end by themselves, also after cuts and as forks, which have their parents' states;
    survivors have the tokens of a run without cuts."""
    sampling = c.Sampling(max_tokens=60, seed=6, structured_output=output)
    conftest.skip_if_refused(subject, sampling)
    spec = c.SessionSpec(PROMPT, 8, sampling, 8)
    async with subject.generator.open(spec) as session:
        expected, whole_answers = await to_the_end(session, [60])
    complete = [one for one in whole_answers.values() if one.finish is c.FinishReason.STOP]
    assert complete
    async with subject.generator.open(spec) as session:
        tokens: Tokens = {}
        for round_, until_tokens in enumerate((1, 2, 4, 9, 60)):
            ended = await session.extend(until_tokens)
            add(tokens, ended)
            complete += [one for one in ended.candidates if one.finish is c.FinishReason.STOP]
            live = [one.id for one in ended.candidates if one.finish is None]
            forks = {100 * (round_ + 1) + at: parent for at, parent in enumerate(live[:2])}
            pruned = await session.prune(live[::2], forks)
            assert pruned.refused == (() if subject.can_fork(sampling) else tuple(forks))
            made = forks.keys() - {*pruned.refused}
            tokens |= {number: tokens[forks[number]] for number in made}
    if subject.is_exact:
        for number, token_ids in tokens.items():
            assert number >= 100 or token_ids == expected[number][: len(token_ids)]
    assert not [one.text for one in complete if not conforms(one.text, output)]


def conforms(text: str, output: c.StructuredOutput) -> bool:
    if isinstance(output, (c.JsonObject, c.JsonSchema)):
        schema = SCHEMA if isinstance(output, c.JsonSchema) else {"type": "object"}
        jsonschema.validate(json.loads(text), schema)
        return True
    pattern = output.pattern if isinstance(output, c.Regex) else "fjord( grove| heath){0,2}"
    return bool(re.fullmatch(pattern, text))


@conftest.all_but("remote-own", *SCRIPTED)
async def test_what_it_lacks_is_refused(subject: Subject) -> None:
    outputs: dict[str, c.StructuredOutput] = {output.kind: output for output in OUTPUTS}
    values: dict[str, Any] = {
        **outputs,
        "structured_output": WORDS,
        "min_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "stop_token_ids": (5,),
    }
    for name in subject.lacks:
        field = "structured_output" if name in outputs else name
        spec = c.SessionSpec(PROMPT, 2, replace(ENDING, **{field: values[name]}), 8)
        with pytest.raises(InvalidRequest) as refused:
            async with subject.generator.open(spec):
                pass
        assert [one.field for one in refused.value.violations] == [f"sampling.{field}"]


async def test_logprobs_are_reported_if_requested(subject: Subject) -> None:
    async with subject.generator.open(
        c.SessionSpec(PROMPT, 4, replace(ENDLESS, logprobs=True), 8)
    ) as session:
        logprobs: dict[int, list[float]] = {number: [] for number in range(4)}
        for until_tokens in (8, 9, 24):
            for candidate in (await session.extend(until_tokens)).candidates:
                assert len(candidate.new_logprobs) == len(candidate.new_token_ids)
                assert all(-50 < logprob < 0 for logprob in candidate.new_logprobs)
                logprobs[candidate.id] += candidate.new_logprobs
                assert candidate.logprob == pytest.approx(sum(logprobs[candidate.id]), abs=1e-3)
    assert {one.new_logprobs for one in await whole(subject.generator, 4, ENDLESS)} == {()}


async def test_sessions_may_report_different_numbers_of_tokens(subject: Subject) -> None:
    """Guards against an engine that ends when the widths of what a batch reports differ."""
    few = replace(ENDLESS, max_tokens=40)
    many = replace(ENDLESS, max_tokens=8, logprobs=True, top_logprobs=5)
    alone = await whole(subject.generator, 2, few)
    together = await asyncio.gather(
        whole(subject.generator, 2, few), *(whole(subject.generator, 2, many) for _ in range(2))
    )
    equal = [one.new_token_ids for one in together[0]] == [one.new_token_ids for one in alone]
    assert equal or not subject.is_exact


@conftest.all_but("llama-text", "gateway", "endpoint", *SCRIPTED)
async def test_the_most_probable_tokens_are_reported_if_requested(subject: Subject) -> None:
    """As many of each step, best first, over rounds, with the bytes of each token."""
    sampling = replace(ENDLESS, top_k=3, temperature=2.0, logprobs=True, top_logprobs=5)
    async with subject.generator.open(c.SessionSpec(PROMPT, 4, sampling, 8)) as session:
        texts: dict[int, bytes] = {}
        for until_tokens in (8, 9, 24):
            ended = await session.extend(until_tokens)
            texts |= {text.token_id: text.token for text in ended.token_texts}
            for one in ended.candidates:
                assert {*one.new_token_ids, *one.new_top_token_ids} <= texts.keys()
                count = len(one.new_token_ids)
                assert len(one.new_top_token_ids) == len(one.new_top_logprobs) == 5 * count
                for at, (token, logprob) in enumerate(
                    zip(one.new_token_ids, one.new_logprobs, strict=True)
                ):
                    step = slice(5 * at, 5 * at + 5)
                    ids, values = one.new_top_token_ids[step], one.new_top_logprobs[step]
                    assert len({*ids}) == 5
                    assert list(values) == sorted(values, reverse=True)
                    assert values[ids.index(token)] == pytest.approx(logprob, abs=1e-4)
            await session.prune([one.id for one in ended.candidates][1:])
    assert all(texts.values())
    plain = await whole(subject.generator, 4, replace(ENDLESS, logprobs=True))
    assert {(one.new_top_token_ids, one.new_top_logprobs) for one in plain} == {((), ())}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
        {"min_tokens": 20},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": (c.TokenBias(7, 4.0), c.TokenBias(9, -100.0))},
        {"stop_token_ids": (30, 31, 32), "min_tokens": 9},
        {"top_logprobs": 4},
        {"structured_output": OUTPUTS[-1]},
        {"structured_output": OUTPUTS[-2], "repetition_penalty": 1.5},
    ],
    ids=lambda changes: "-".join(changes) or "greedy",
)
@conftest.stock_vllm
async def test_engines_draw_equal_tokens_if_one_can_be_drawn(
    subject: Subject, started: conftest.Started, changes: dict[str, Any]
) -> None:
    """The own engine in one round, vLLM in several: equal tokens, and equal log-probabilities
    within 1e-3. Guards against rounds that change what a token is drawn from.

    After a structured output, vLLM draws one of the end tokens only. Within, its log-probabilities
    are those among the tokens that may follow.
    """
    sampling = replace(ENDING, **dict[str, Any](temperature=0.0, logprobs=True) | changes)
    (ours,) = await whole((await started.get("own")).generator, 1, sampling)
    parts: list[c.Candidate] = []
    async with subject.generator.open(c.SessionSpec(PROMPT, 1, sampling, 8)) as session:
        while not (parts and parts[-1].finish):
            parts += (await session.extend(5 + 17 * len(parts))).candidates
    assert (parts[-1].text, parts[-1].finish) == (ours.text, ours.finish)
    is_structured = bool(sampling.structured_output)
    compared = slice(0, -1 if is_structured and ours.finish is c.FinishReason.STOP else None)
    values_of = ("new_top_token_ids", "new_logprobs", "new_top_logprobs")
    for name in ("new_token_ids", *(() if is_structured else values_of)):
        values = sum((getattr(part, name) for part in parts), ())
        assert values[compared] == pytest.approx(getattr(ours, name)[compared], abs=1e-3)
