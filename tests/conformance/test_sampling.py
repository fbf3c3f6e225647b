"""How every generator draws: ends, adjustments, structured outputs and probabilities."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from specrej.contracts import (
    FinishReason,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Sampling,
    SessionSpec,
    StructuredOutput,
    TokenBias,
)
from specrej.contracts.errors import InvalidRequest
from tests.conformance.conftest import Started, also_endpoint, also_remote_own
from tests.conformance.sessions import ENDING, ENDLESS, Tokens, add, to_the_end, whole
from tests.conformance.subjects import HAS_VLLM, IS_FLOAT32, PROMPT, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")
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


@also_endpoint
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
    """Guards against a minimum that begins anew in each round: then all have at least 45."""
    sampling = replace(ENDING, min_tokens=20)
    async with subject.generator.open(SessionSpec(PROMPT, 8, sampling, 8)) as session:
        tokens, _ = await to_the_end(session, [5, 10, 15, 25, 60])
    lengths = [len(tokens[number]) for number in range(8)]
    assert 20 <= min(lengths) < 45
    if IS_FLOAT32:
        assert lengths == [c.num_tokens for c in await whole(subject.generator, 8, sampling)]


@also_remote_own
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
@also_remote_own
async def test_answers_conform_to_a_structured_output(
    subject: Subject, output: StructuredOutput
) -> None:
    """All that end by themselves, also after cuts and as forks, which have their parents' states;
    survivors have the tokens of a run without cuts."""
    sampling = Sampling(max_tokens=60, seed=6, structured_output=output)
    if subject.is_toy:
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


async def refused_fields(subject: Subject, output: StructuredOutput) -> list[str]:
    sampling = Sampling(max_tokens=9, structured_output=output)
    with pytest.raises(InvalidRequest) as refused:
        async with subject.generator.open(SessionSpec(PROMPT, 2, sampling, 8)):
            pass
    return [violation.field for violation in refused.value.violations]


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


async def test_sessions_may_report_different_numbers_of_tokens(subject: Subject) -> None:
    """Guards against an engine that ends when the widths of what a batch reports differ."""
    few = replace(ENDLESS, max_tokens=40)
    many = replace(ENDLESS, max_tokens=8, logprobs=True, top_logprobs=5)
    alone = await whole(subject.generator, 2, few)
    together = await asyncio.gather(
        whole(subject.generator, 2, few), *(whole(subject.generator, 2, many) for _ in range(2))
    )
    assert [c.new_token_ids for c in together[0]] == [c.new_token_ids for c in alone]


@also_remote_own
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
