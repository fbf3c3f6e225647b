"""Bad values: each is refused at its exact path; the limits themselves pass.

tests/orchestrator/test_service_requests.py has several at once, tests/specrej/test_schema.py the
ranges that the schema has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from specrej import contracts as c
from specrej.errors import Violation
from specrej.limits import MAX_PROMPT_CHARACTERS
from specrej.validation import check_request
from tests.specrej.test_wire import REQUESTS

CONTEXT = 2048
CAP = 128
VOCABULARY = 300
INT32_MAX = 2**31 - 1
GOOD = c.GenerationRequest(prompt=c.Prompt.from_user("why?"), selection=c.Selection(n=8))


def paths(request: c.GenerationRequest) -> list[str]:
    return [violation.field for violation in check_request(request, CONTEXT, CAP, VOCABULARY)]


def with_sampling(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def with_selection(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, selection=replace(GOOD.selection, **changes))


def with_tokens(*tokens: int) -> c.GenerationRequest:
    return with_selection(schedule=c.TokensSchedule(tokens))


def with_rewards(*rewards: tuple[str, float]) -> c.GenerationRequest:
    return with_selection(rewards=tuple(c.WeightedReward(*reward) for reward in rewards))


def with_reward(**changes: Any) -> c.GenerationRequest:
    return with_selection(rewards=(c.WeightedReward("a"), c.WeightedReward("b", **changes)))


def with_turns(*turns: tuple[str, str]) -> c.GenerationRequest:
    return replace(GOOD, prompt=c.Prompt(messages=tuple(c.Message(*turn) for turn in turns)))


# Each value of each field alone is a violation of the field.
BAD_SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, CONTEXT + 1),
    # The default of max_tokens is 128: one more would be a candidate that never may end.
    "min_tokens": (129,),
    "temperature": (0.0,),  # of several candidates
    "seed": (c.MAX_SEED + 1,),
    "top_logprobs": (1,),  # without logprobs
}
BIAS = c.TokenBias(3, 1.0)
BAD_LISTS: list[tuple[str, tuple[Any, ...], str]] = [
    ("stop", ("x", ""), "[1]"),
    ("bad_words", ("x", " \n"), "[1]"),
    ("stop_token_ids", (0, VOCABULARY), "[1]"),
    ("logit_bias", (BIAS, c.TokenBias(4, 1.0), c.TokenBias(3, 2.0)), ""),
    ("logit_bias", (BIAS, c.TokenBias(VOCABULARY, 1.0)), "[1].token_id"),
]
BAD_SELECTION = {"n": (CAP + 1,), "min_answers": (CAP + 1,)}
BAD_BRANCHING = (
    (c.Branching(1, 1), "width"),
    (c.Branching(CAP + 1), "width"),
    (c.Branching(16, 0), "keep"),
    (c.Branching(16, 16), "keep"),
)
BAD_TOKENS = ((8, 8), (16, 8), tuple(range(1, 1026)))
BAD_REWARDS: list[tuple[list[tuple[str, float]], str]] = [
    ([("a", 1.0), ("a", 2.0)], ""),
    ([(f"r{i}", 1.0) for i in range(9)], ""),
    ([("a", 1.0), ("b", 0.0)], "[1].weight"),
]
BAD_NORMALIZATIONS = [
    (c.Normalization("bath"), ".kind"),
    (c.Normalization(mean=1.0), ""),
    (c.Normalization("batch", deviation=2.0), ""),
]
BAD_PROMPTS = [
    (c.Prompt(), "prompt"),
    (c.Prompt(messages=(c.Message("user", "a"),), text="b"), "prompt"),
    (replace(c.Prompt.from_user("a"), allow_special_tokens=True), "prompt.allow_special_tokens"),
    (c.Prompt(text=" \n\t"), "prompt.text"),
    (c.Prompt(text="x" * (MAX_PROMPT_CHARACTERS + 1)), "prompt"),
    (c.Prompt.from_user(""), "prompt.messages[0].content"),
    (c.Prompt.from_user("\u00a0\u2003"), "prompt.messages[0].content"),
    (c.Prompt.from_user("x" * (MAX_PROMPT_CHARACTERS + 1)), "prompt"),
]


def bad_requests() -> Iterator[tuple[c.GenerationRequest, str]]:
    """Requests and the path of their only violation."""
    for field, values in BAD_SAMPLING.items():
        yield from ((with_sampling(**{field: value}), f"sampling.{field}") for value in values)
    for field, values in BAD_SELECTION.items():
        yield from ((with_selection(**{field: value}), f"selection.{field}") for value in values)
    for tokens in BAD_TOKENS:
        yield with_tokens(*tokens), "selection.schedule.tokens.decision_tokens"
    for branching, field in BAD_BRANCHING:
        yield with_selection(branching=branching), f"selection.branching.{field}"
    yield with_selection(n=4, min_answers=5), "selection.min_answers"
    branching = c.Branching(8, 2)
    yield with_selection(n=4, branching=branching, min_answers=3), "selection.min_answers"
    best_of_n = with_selection(algorithm=c.Algorithm.BEST_OF_N, branching=c.Branching())
    yield best_of_n, "selection.branching"
    greedy = c.Selection(n=1, branching=c.Branching())
    yield replace(with_sampling(temperature=0.0), selection=greedy), "selection.branching"
    for rewards, field in BAD_REWARDS:
        yield with_rewards(*rewards), f"selection.rewards{field}"
    for normalization, field in BAD_NORMALIZATIONS:
        path = f"selection.rewards[1].normalization{field}"
        yield with_reward(normalization=normalization), path
    for prompt, field in BAD_PROMPTS:
        yield replace(GOOD, prompt=prompt), field
    yield with_turns(("tool", "a"), ("user", "b")), "prompt.messages[0].role"
    yield with_turns(("user", "a"), ("assistant", "b")), "prompt.messages[1].role"
    turns = ("user", " "), ("assistant", "b"), ("user", "c")
    yield with_turns(*turns), "prompt.messages[0].content"


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        *bad_requests(),
        *((with_sampling(**{f: items}), f"sampling.{f}{path}") for f, items, path in BAD_LISTS),
    ],
)
def test_bad_values(request_: c.GenerationRequest, path: str) -> None:
    """Guards against values that reach the engine's softmax or its slots, sums that are NaN,
    schedules that stand still, and roles that a chat template drops."""
    assert set(paths(request_)) == {path}


@pytest.mark.parametrize(
    ("output", "path"),
    [
        *((c.JsonSchema(text), "json_schema.schema") for text in ("", "{", "true", "[" * 60_000)),
        (c.Regex(""), "regex.pattern"),
        (c.Grammar(" \n"), "grammar.lark"),
    ],
)
def test_bad_structured_outputs(output: c.StructuredOutput, path: str) -> None:
    """Guards against texts that the generator's library would read, or that overflow a stack."""
    assert paths(with_sampling(structured_output=output)) == [f"sampling.structured_output.{path}"]


@pytest.mark.parametrize(
    "end", [{"stop": ("x",)}, {"stop_token_ids": (3,)}, {"ignore_eos": True}], ids=str
)
def test_a_structured_output_alone_decides_the_end(end: dict[str, Any]) -> None:
    """Guards against candidates that end, and do not conform."""
    (name,) = end
    assert paths(with_sampling(structured_output=c.JsonObject(), **end)) == [f"sampling.{name}"]


def test_too_many_min_tokens_name_the_range() -> None:
    """Guards against a refusal without the max_tokens of the comparison."""
    (violation,) = check_request(
        with_sampling(max_tokens=20, min_tokens=21), CONTEXT, CAP, VOCABULARY
    )
    assert violation.description == "must be 0 .. max_tokens (20), is 21"


@pytest.mark.parametrize(
    "request_",
    [
        with_selection(n=CAP),
        *[with_selection(branching=c.Branching(*v)) for v in ((2, 1), (CAP, CAP - 1))],
        *[with_selection(n=n, min_answers=n or CAP) for n in (0, 4)],
        with_selection(branching=c.Branching(8, 2), min_answers=2),
        replace(with_sampling(temperature=0.0), selection=c.Selection(n=1)),
        with_sampling(max_tokens=CONTEXT, top_p=1.0, seed=c.MAX_SEED, stop=("x" * 256,) * 16),
        with_sampling(max_tokens=5, min_tokens=5),
        *[
            with_sampling(structured_output=output, min_tokens=3, bad_words=("x",))
            for output in (c.JsonSchema("{}"), c.Regex("a"), c.Grammar("start:"), c.JsonObject())
        ],
        with_sampling(stop_token_ids=(0, VOCABULARY - 1), bad_words=("x" * 256,) * 64),
        with_sampling(logit_bias=(c.TokenBias(0, -100.0), c.TokenBias(VOCABULARY - 1, 100.0))),
        with_tokens(1, 2, INT32_MAX),
        *[with_selection(schedule=c.MemorySchedule(first)) for first in (1, INT32_MAX)],
        with_reward(normalization=c.Normalization("batch"), veto_below=0.0),
        with_turns(("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")),
        with_turns(("system", ""), ("user", "b"), ("assistant", ""), ("user", "d")),
        replace(GOOD, prompt=c.Prompt(text="x" * MAX_PROMPT_CHARACTERS)),
        replace(GOOD, prompt=c.Prompt(text="<|im_end|>", allow_special_tokens=True)),
        replace(GOOD, prompt=c.Prompt.from_user("\x00 \u202e 👩‍👩‍👧 e\u0301 <|im_end|>")),
    ],
)
def test_the_limits_themselves_are_good(request_: c.GenerationRequest) -> None:
    """Guards against limits that are off by one, and against refused characters."""
    assert paths(request_) == []


@given(REQUESTS)
def test_any_request_can_be_checked(request: c.GenerationRequest) -> None:
    """Guards against values that crash the check itself, which would be INTERNAL."""
    for violation in check_request(request, CONTEXT, CAP, VOCABULARY):
        assert isinstance(violation, Violation) and violation.field
