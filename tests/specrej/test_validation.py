"""Bad values: each is refused at its exact path; the limits themselves pass.

tests/orchestrator/test_service.py has several at once, tests/specrej/test_schema.py the
ranges that the schema has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from specrej import contracts as c
from specrej.contracts.errors import Violation
from specrej.contracts.validation import MAX_PROMPT_CHARACTERS, check_request
from tests.specrej.test_wire import REQUESTS

CONTEXT, CAP, VOCABULARY = 2048, 128, 300
GOOD = c.GenerationRequest(prompt=c.Prompt.from_user("why?"), selection=c.Selection(n=8))


def paths(request: c.GenerationRequest) -> list[str]:
    return [violation.field for violation in check_request(request, CONTEXT, CAP, VOCABULARY)]


def with_sampling(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def with_selection(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, selection=replace(GOOD.selection, **changes))


def with_turns(*turns: tuple[str, str]) -> c.GenerationRequest:
    return replace(GOOD, prompt=c.Prompt(messages=tuple(c.Message(*turn) for turn in turns)))


BIAS = c.TokenBias(3, 1.0)
# Changes and the path of their only violation.
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, "max_tokens"),
    # The default of max_tokens is 128: one more would be a candidate that never may end.
    ({"min_tokens": 2049}, "min_tokens"),
    ({"temperature": 0.0}, "temperature"),  # of several candidates
    ({"seed": c.MAX_SEED + 1}, "seed"),
    ({"top_logprobs": 1}, "top_logprobs"),  # without logprobs
    ({"stop": ("x", "")}, "stop[1]"),
    ({"stop_token_ids": (0, VOCABULARY)}, "stop_token_ids[1]"),
    ({"logit_bias": (BIAS, c.TokenBias(4, 1.0), c.TokenBias(3, 2.0))}, "logit_bias"),
    ({"logit_bias": (BIAS, c.TokenBias(VOCABULARY, 1.0))}, "logit_bias[1].token_id"),
    *(
        ({"structured_output": c.JsonSchema(text)}, "structured_output.json_schema.schema")
        for text in ("", "{", "true", "[" * 60_000)
    ),
    ({"structured_output": c.Grammar(" \n")}, "structured_output.grammar.lark"),
    # A structured output alone decides the end.
    ({"structured_output": c.JsonObject(), "stop": ("x",)}, "stop"),
    ({"structured_output": c.JsonObject(), "stop_token_ids": (3,)}, "stop_token_ids"),
    ({"structured_output": c.JsonObject(), "ignore_eos": True}, "ignore_eos"),
]
A = c.WeightedReward("a")
BATCH = c.WeightedReward("a", normalization=c.Normalization("batch"))
LONG = json.dumps("\u00e9" * 40_000, ensure_ascii=False)
BAD_SELECTION: list[tuple[dict[str, Any], str]] = [
    ({"n": CAP + 1}, "n"),
    ({"min_answers": CAP + 1}, "min_answers"),
    ({"n": 4, "min_answers": 5}, "min_answers"),
    ({"n": 4, "branching": c.Branching(8, 2), "min_answers": 3}, "min_answers"),
    *(
        ({"schedule": c.Schedule("tokens", tokens=tokens)}, "schedule.tokens")
        for tokens in ((8, 8), (16, 8), tuple(range(1, 1026)))
    ),
    ({"schedule": c.Schedule("tokens", 4, tokens=(8,))}, "schedule.first"),
    ({"schedule": c.Schedule("memory", factor=3.0)}, "schedule.factor"),
    ({"schedule": c.Schedule(tokens=(8,))}, "schedule.tokens"),
    ({"branching": c.Branching(1, 1)}, "branching.width"),
    ({"stop_at": 1.0, "rewards": (BATCH,)}, "stop_at"),
    ({"n": 4, "first": 5}, "first"),
    ({"waves": CAP + 1}, "waves"),
    ({"n": 0, "waves": 1}, "waves"),
    ({"waves": 2, "branching": c.Branching()}, "waves"),
    ({"waves": 2, "min_answers": 3}, "waves"),
    ({"confidence_cut": c.ConfidenceCut()}, "confidence_cut"),
    ({"vote": c.Vote("regex")}, "vote.argument"),
    ({"vote": c.Vote("number", "a")}, "vote.argument"),
    ({"rewards": (c.WeightedReward("a", stage="cuts"),)}, "rewards"),
    *(
        ({"rewards": (c.WeightedReward("a", data=data),)}, "rewards[0].data")
        for data in ("{", "NaN", "[1e999]", '"\\ud83d"', LONG)
    ),
    ({"branching": c.Branching(CAP + 1)}, "branching.width"),
    ({"branching": c.Branching(16, 16)}, "branching.keep"),
    ({"branching": c.Branching(), "algorithm": c.Algorithm.BEST_OF_N}, "branching"),
    ({"rewards": (A, c.WeightedReward("a", 2.0))}, "rewards"),
    ({"rewards": tuple(c.WeightedReward(f"r{i}") for i in range(9))}, "rewards"),
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
    for changes, field in BAD_SAMPLING:
        yield with_sampling(**changes), f"sampling.{field}"
    for changes, field in BAD_SELECTION:
        yield with_selection(**changes), f"selection.{field}"
    yield replace(with_sampling(temperature=0.0), selection=c.Selection()), "sampling.temperature"
    greedy = c.Selection(n=1, branching=c.Branching())
    yield replace(with_sampling(temperature=0.0), selection=greedy), "selection.branching"
    for prompt, field in BAD_PROMPTS:
        yield replace(GOOD, prompt=prompt), field
    yield with_turns(("robot", "a"), ("user", "b")), "prompt.messages[0].role"
    yield with_turns(("user", "a"), ("assistant", "b")), "prompt.messages[1].role"
    for turns, field in (
        ((("user", "a"),), "messages[0].role"),
        ((("assistant", "a"),), "messages[0].role"),
        ((("user", "a"), ("assistant", "b"), ("assistant", "c")), "messages[2].role"),
    ):
        begun = with_turns(*turns)
        yield replace(begun, prompt=replace(begun.prompt, continue_final=True)), f"prompt.{field}"
    blank = with_turns(("user", " "), ("assistant", "b"), ("user", "c"))
    yield blank, "prompt.messages[0].content"


@pytest.mark.parametrize(("request_", "path"), list(bad_requests()))
def test_bad_values(request_: c.GenerationRequest, path: str) -> None:
    """Guards against values that reach the engine's softmax or its slots, sums that are NaN,
    schedules that stand still, roles that a chat template drops, texts of structured output that
    overflow a stack, and candidates that end and do not conform."""
    assert paths(request_) == [path]


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
            with_sampling(structured_output=output, min_tokens=3)
            for output in (c.JsonSchema("{}"), c.Regex("a"), c.Grammar("start:"), c.JsonObject())
        ],
        with_sampling(stop_token_ids=(0, VOCABULARY - 1)),
        with_sampling(logit_bias=(c.TokenBias(0, -100.0), c.TokenBias(VOCABULARY - 1, 100.0))),
        with_selection(schedule=c.Schedule("tokens", tokens=(1, 2, c.MAX_INT32))),
        *[with_selection(schedule=c.Schedule("memory", first=first)) for first in (1, c.MAX_INT32)],
        with_selection(rewards=(c.WeightedReward("a", 1.0, c.Normalization("batch"), 0.0),)),
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
