"""Bad values: each is refused at its exact path, all at once; the limits themselves pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from specrej import contracts as c
from specrej.errors import InvalidRequest, Violation
from specrej.validation import MAX_PROMPT_CHARACTERS, MAX_SEED, check_request, raise_if_any
from tests.specrej.test_wire import REQUESTS

CONTEXT = 2048
CAP = 128
INT32_MAX = 2**31 - 1
GOOD = c.GenerationRequest(prompt=c.Prompt.from_user("why?"), selection=c.Selection(n=8))


def paths(request: c.GenerationRequest) -> list[str]:
    return [violation.field for violation in check_request(request, CONTEXT, CAP)]


def with_sampling(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def with_selection(**changes: Any) -> c.GenerationRequest:
    return replace(GOOD, selection=replace(GOOD.selection, **changes))


def with_tokens(*tokens: int) -> c.GenerationRequest:
    return with_selection(schedule=c.Schedule(kind="tokens", tokens=tokens))


def with_rewards(*rewards: tuple[str, float]) -> c.GenerationRequest:
    return with_selection(rewards=tuple(c.WeightedReward(*reward) for reward in rewards))


def with_turns(*turns: tuple[str, str]) -> c.GenerationRequest:
    return replace(GOOD, prompt=c.Prompt(messages=tuple(c.Message(*turn) for turn in turns)))


BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, CONTEXT + 1, INT32_MAX)],
    # The default is 128 tokens: one more would be a candidate that never may end.
    *[({"min_tokens": value}, "min_tokens") for value in (-1, 129, INT32_MAX)],
    *[
        ({"temperature": value}, "temperature")
        for value in (math.nan, math.inf, -1.0, 1e-9, 2.1, 0.0)
    ],
    *[({"top_k": value}, "top_k") for value in (-2, -1)],
    *[({"top_p": value}, "top_p") for value in (0.0, 2.0, -0.1, math.nan, math.inf)],
    *[({"seed": value}, "seed") for value in (-1, MAX_SEED + 1)],
    ({"stop": ("x",) * 17}, "stop"),
    ({"stop": ("x",) * 1000}, "stop"),
    ({"stop": ("x", "")}, "stop[1]"),
    ({"stop": ("x" * 257,)}, "stop[0]"),
]
BAD_SELECTION: list[tuple[dict[str, Any], str]] = [
    *[({"n": value}, "n") for value in (-1, CAP + 1, INT32_MAX)],
    *[({"alpha": value}, "alpha") for value in (-0.1, 1.0, 1.1, math.nan, math.inf, -math.inf)],
    *[({"return_candidates": value}, "return_candidates") for value in (0, -1, 65)],
]


@pytest.mark.parametrize(("changes", "field"), BAD_SAMPLING)
def test_bad_sampling(changes: dict[str, Any], field: str) -> None:
    """Guards against values that reach the engine's softmax, or its slots."""
    assert paths(with_sampling(**changes)) == [f"sampling.{field}"]


@pytest.mark.parametrize(("changes", "field"), BAD_SELECTION)
def test_bad_selection(changes: dict[str, Any], field: str) -> None:
    """Guards against values that keep everybody, nobody, or more than there is room for."""
    assert paths(with_selection(**changes)) == [f"selection.{field}"]


@pytest.mark.parametrize(
    "tokens", [(), (0,), (-1, 4), (8, 8), (16, 8), tuple(range(1, 1026))], ids=str
)
def test_bad_decision_tokens(tokens: tuple[int, ...]) -> None:
    """Guards against rounds that never end, or end where they began."""
    assert set(paths(with_tokens(*tokens))) == {"selection.schedule.tokens.decision_tokens"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"first": 0}, "first"),
        ({"first": -1}, "first"),
        ({"factor": 1.0}, "factor"),
        ({"factor": 16.1}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"factor": math.inf}, "factor"),
    ],
)
def test_bad_geometric_schedule(changes: dict[str, Any], field: str) -> None:
    """Guards against a schedule that stands still."""
    request = with_selection(schedule=c.Schedule(**changes))
    assert paths(request) == [f"selection.schedule.geometric.{field}"]


@pytest.mark.parametrize(
    ("rewards", "field"),
    [
        ([("a", 1.0), ("a", 2.0)], ""),
        ([(f"r{i}", 1.0) for i in range(9)], ""),
        ([("", 1.0)], "[0].name"),
        ([("a", 1.0), ("b", 0.0)], "[1].weight"),
        ([("a", math.nan)], "[0].weight"),
        ([("a", math.inf)], "[0].weight"),
    ],
)
def test_bad_rewards(rewards: list[tuple[str, float]], field: str) -> None:
    """Guards against sums that are NaN, or count a reward twice."""
    assert paths(with_rewards(*rewards)) == [f"selection.rewards{field}"]


def with_reward(**changes: Any) -> c.GenerationRequest:
    return with_selection(rewards=(c.WeightedReward("a"), c.WeightedReward("b", **changes)))


BAD_NUMBERS = (1.1e12, -1.1e12, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("normalization", "field"),
    [
        *((c.Normalization("fixed", mean=value), ".fixed.mean") for value in BAD_NUMBERS),
        *(
            (c.Normalization("fixed", deviation=value), ".fixed.deviation")
            for value in (0.0, -1.0, 1e-13, *BAD_NUMBERS)
        ),
        (c.Normalization("bath"), ".kind"),
        (c.Normalization(mean=1.0), ""),
        (c.Normalization("batch", deviation=2.0), ""),
        (c.Normalization("batch", mean=math.nan), ""),
    ],
)
def test_bad_normalizations(normalization: c.Normalization, field: str) -> None:
    """Guards against a division by zero, and numbers that are ignored as their kind is missing."""
    expected = [f"selection.rewards[1].normalization{field}"]
    assert paths(with_reward(normalization=normalization)) == expected


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_bad_vetoes(value: float) -> None:
    """Guards against thresholds that all, or none, or an unpredictable few are below."""
    assert paths(with_reward(veto_below=value)) == ["selection.rewards[1].veto_below"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (c.Prompt(), "prompt"),
        (c.Prompt(messages=(c.Message("user", "a"),), text="b"), "prompt"),
        (c.Prompt(text=" \n\t"), "prompt.text"),
        (c.Prompt(text="x" * (MAX_PROMPT_CHARACTERS + 1)), "prompt"),
        (c.Prompt.from_user(""), "prompt.messages[0].content"),
        (c.Prompt.from_user("\u00a0\u2003"), "prompt.messages[0].content"),
        (c.Prompt.from_user("x" * (MAX_PROMPT_CHARACTERS + 1)), "prompt"),
    ],
)
def test_bad_prompt(prompt: c.Prompt, field: str) -> None:
    """Guards against prompts without content, or so long that tokenising them is an attack."""
    assert paths(replace(GOOD, prompt=prompt)) == [field]


def test_bad_turns() -> None:
    """Guards against roles that a chat template drops in silence."""
    assert paths(with_turns(("tool", "a"), ("user", "b"))) == ["prompt.messages[0].role"]
    assert paths(with_turns(("user", "a"), ("assistant", "b"))) == ["prompt.messages[1].role"]


def test_all_violations_at_once() -> None:
    """Guards against a caller who learns of one mistake per attempt."""
    request = c.GenerationRequest(
        prompt=c.Prompt(),
        sampling=c.Sampling(0, top_k=-1, top_p=2, seed=-1, stop=("",), min_tokens=-1),
        selection=c.Selection(n=-1, alpha=1, return_candidates=0),
    )
    with pytest.raises(InvalidRequest) as raised:
        raise_if_any(list(check_request(request, CONTEXT, CAP)))
    assert [violation.field for violation in raised.value.violations] == [
        "prompt",
        "sampling.max_tokens",
        "sampling.min_tokens",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.seed",
        "sampling.stop[0]",
        "selection.n",
        "selection.alpha",
        "selection.return_candidates",
    ]


def test_too_many_min_tokens_name_the_range() -> None:
    """Guards against a refusal that does not say which max_tokens it was held against."""
    (violation,) = check_request(with_sampling(max_tokens=20, min_tokens=21), CONTEXT, CAP)
    assert violation.description == "must be 0 .. max_tokens (20), is 21"


def test_nothing_wrong_raises_nothing() -> None:
    """Guards against an empty list of violations raising."""
    raise_if_any([])


@pytest.mark.parametrize(
    "request_",
    [
        *[with_selection(n=n) for n in (0, 1, CAP)],
        *[with_selection(alpha=alpha) for alpha in (0.0, 0.999)],
        *[with_sampling(temperature=value) for value in (0.01, 2.0)],
        replace(with_sampling(temperature=0.0), selection=c.Selection(n=1)),
        with_sampling(max_tokens=CONTEXT, top_p=1.0, seed=MAX_SEED, stop=("x" * 256,) * 16),
        with_sampling(max_tokens=5, min_tokens=5),
        with_tokens(1, 2, INT32_MAX),
        with_selection(schedule=c.Schedule(kind="memory")),
        with_selection(schedule=c.Schedule(first=1, factor=16.0)),
        with_rewards(*((f"r{i}", -1.0) for i in range(8))),
        with_reward(normalization=c.Normalization("fixed", -1e12, 1e-12), veto_below=1e12),
        with_reward(normalization=c.Normalization("fixed", 1e12, 1e12), veto_below=-1e12),
        with_reward(normalization=c.Normalization("batch"), veto_below=0.0),
        with_turns(("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")),
        replace(GOOD, prompt=c.Prompt(text="x" * MAX_PROMPT_CHARACTERS)),
        replace(GOOD, prompt=c.Prompt.from_user("\x00 \u202e 👩‍👩‍👧 e\u0301 <|im_end|>")),
    ],
)
def test_the_limits_themselves_are_good(request_: c.GenerationRequest) -> None:
    """Guards against limits that are off by one, and against characters refused for their looks."""
    assert paths(request_) == []


@given(REQUESTS)
def test_any_request_is_judged(request: c.GenerationRequest) -> None:
    """Guards against values that crash the check itself, which would be INTERNAL."""
    for violation in check_request(request, CONTEXT, CAP):
        assert isinstance(violation, Violation) and violation.field
