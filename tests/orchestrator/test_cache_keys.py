"""Cache keys: equal requests have one key, different requests have different keys."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache import Secret, answer_key
from orchestrator.cache.keys import FORMAT_VERSION, hashed_tenant
from orchestrator.cache.single_flight import lock_key
from specrej import contracts as c
from tests.orchestrator.caching import SECRET


def request(text: str = "hello", **parts: Any) -> c.GenerationRequest:
    return c.GenerationRequest(c.Prompt.from_user(text), **parts)


def key_of(
    request: c.GenerationRequest,
    tenant: str = "t",
    generator: str = "g",
    reward: str = "w",
    secret: Secret = SECRET,
) -> str:
    return answer_key(
        request,
        tenant=tenant,
        generator_fingerprint=generator,
        reward_fingerprint=reward,
        secret=secret,
    )


_BASE = request()
# Another value of every field, and pairs that a careless spelling would confuse.
_OTHER_SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 129},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_p": 0.9},
    {"stop": ("x", "y")},
    {"stop": ("x,y",)},
    {"seed": 2**53},
    {"seed": 2**53 + 1},
    {"ignore_eos": True},
    {"min_tokens": 1},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 1},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": (c.TokenBias(1, 2.0),)},
    {"logit_bias": (c.TokenBias(1, 3.0),)},
    {"stop_token_ids": (1,)},
    *(
        {"structured_output": output}
        for output in (c.JsonSchema("a"), c.Regex("a"), c.Grammar("a"))
    ),
    {"max_thinking_tokens": 8},
]
_OTHER_SELECTIONS: list[dict[str, Any]] = [
    {"prefer_complete": True},
    {"min_answers": 2},
    *({"branching": branching} for branching in (c.Branching(), c.Branching(keep=2))),
    {"n": 4},
    {"alpha": 0.25},
    {"algorithm": c.Algorithm.BEST_OF_N},
    {"return_candidates": 2},
    {"schedule": c.Schedule("tokens", tokens=(16, 32))},
    {"schedule": c.Schedule("tokens", tokens=(16, 33))},
    {"schedule": c.Schedule(factor=3.0)},
    {"rewards": (c.WeightedReward("a"),)},
    {"rewards": (c.WeightedReward("a", 0.5), c.WeightedReward("b"))},
    {"rewards": (c.WeightedReward("a"), c.WeightedReward("b", 0.5))},
    {"rewards": (c.WeightedReward("a", veto_below=0.0),)},
    {"rewards": (c.WeightedReward("a", normalization=c.Normalization("batch")),)},
    {"rewards": (c.WeightedReward("a", stage="end"),)},
    *({"rewards": (c.WeightedReward("a", data=data),)} for data in ('{"a":1}', '{"a":2}')),
    {"stop_at": 0.0},
    {"stop_at": 1.0},
    {"waves": 4},
    {"first": 1},
    *({"vote": vote} for vote in (c.Vote(), c.Vote("boxed"), c.Vote(weight="reward"))),
    *({"vote": c.Vote("regex", argument)} for argument in ("a", "b")),
    {"vote": c.Vote(stop_probability=0.9)},
    *({"confidence_cut": cut} for cut in (c.ConfidenceCut(), c.ConfidenceCut(0.5))),
    {"rewards": (c.WeightedReward("a", normalization=c.Normalization("fixed", 0.0, 2.0)),)},
    {"score_thinking": True},
]
_USER = c.Message("user", "hello")
_OTHER_PROMPTS: list[dict[str, Any]] = [
    {"messages": (), "text": "hello"},
    {"messages": (), "text": "hello", "allow_special_tokens": True},
    {"messages": (c.Message("system", "hello"), _USER)},
    {"continue_final": True},
    *({"tools": (tool,)} for tool in (c.Tool("f"), c.Tool("f", "f"), c.Tool("f", parameters="{}"))),
    {"tool_choice": "none"},
    {"tool_choice": "required", "tool_name": "f"},
    {"parallel_tool_calls": False},
    *({"thinking": thinking} for thinking in (True, False)),
    *(
        {"messages": (_USER, c.Message("assistant", tool_calls=(c.ToolCall(*call),)))}
        for call in ("1fa", "2fa", "1ga", "1fb")
    ),
    *({"messages": (_USER, c.Message("tool", "hello", tool_call_id=one))} for one in "12"),
    *(
        {"messages": (c.Message("user", parts=parts),)}
        for parts in (
            (c.TextPart("hello"),),
            (c.Image(b"hello"),),
            (c.Image(b"hello", "image/jpeg"),),
            (c.Image(b"hello."),),
            (c.TextPart("a"), c.Image(b"hello")),
            (c.Image(b"hello"), c.TextPart("a")),
        )
    ),
]
_OTHERS = [
    request("caf\u00e9"),
    request("cafe\u0301"),  # the model gets another text than with one code point
    request("\ud800"),  # UTF-8 cannot encode it
    request("\ud801"),
    replace(_BASE, absent=("max_tokens",)),  # its answer depends on the room in the context
    *(replace(_BASE, prompt=replace(_BASE.prompt, **changed)) for changed in _OTHER_PROMPTS),
    *(request(sampling=replace(c.Sampling(), **changed)) for changed in _OTHER_SAMPLING),
    *(request(selection=replace(c.Selection(), **changed)) for changed in _OTHER_SELECTIONS),
]
_OTHER_MAKERS: list[dict[str, Any]] = [
    *({"tenant": tenant} for tenant in ("u", "U", "u ", "u\0", "\ud800", "\ud801")),
    *({"generator": "h"}, {"reward": "x"}),
]


def test_every_field_that_matters_changes_the_key() -> None:
    """Guards against an answer to another request, of another tenant or by another model, also
    after a field of the contract that is new."""
    keys = [key_of(other) for other in (_BASE, *_OTHERS)]
    keys += [key_of(_BASE, **maker) for maker in _OTHER_MAKERS]
    assert len(set(keys)) == len(keys)
    changed = (
        (c.Prompt, _OTHER_PROMPTS),
        (c.Sampling, _OTHER_SAMPLING),
        (c.Selection, _OTHER_SELECTIONS),
    )
    for part, others in changed:
        assert {field.name for field in fields(part)} == {name for o in others for name in o}


_ONE, _TWO = c.WeightedReward("a", 0.3), c.WeightedReward("b", 0.7)
_BEST_OF_N = c.Selection(algorithm=c.Algorithm.BEST_OF_N)


def _rewarded(*rewards: c.WeightedReward) -> c.GenerationRequest:
    return request(selection=c.Selection(rewards=rewards))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_BASE, request(sampling=c.Sampling(max_tokens=2048, temperature=1.0, top_p=1.0, seed=0))),
        (_BASE, request(sampling=c.Sampling(temperature=1, top_p=1))),
        (
            request(sampling=c.Sampling(logit_bias=(c.TokenBias(1, 2.0), c.TokenBias(2, 0.5)))),
            request(sampling=c.Sampling(logit_bias=(c.TokenBias(2, 0.5), c.TokenBias(1, 2)))),
        ),
        (_BASE, request(selection=c.Selection(schedule=c.Schedule(first=16, factor=2)))),
        (_BASE, replace(_BASE, cache=c.CacheControl.REFRESH)),
        (_BASE, replace(_BASE, allow_degraded=True)),
        (_BASE, replace(_BASE, absent=("n", "schedule"))),
        (_rewarded(_ONE, _TWO), _rewarded(_TWO, _ONE)),
        (
            request(selection=_BEST_OF_N),
            request(
                selection=replace(_BEST_OF_N, alpha=0.9, schedule=c.Schedule("tokens", tokens=(4,)))
            ),
        ),
    ],
)
def test_equal_requests_have_one_key(
    first: c.GenerationRequest, second: c.GenerationRequest
) -> None:
    """Guards against misses over 1 and 1.0, explicit defaults, order, or fields without effect."""
    assert key_of(first) == key_of(second)


@given(tenant=st.text(), prompt=st.text(min_size=1), fingerprint=st.text(max_size=20))
def test_keys_have_one_shape_and_no_text(tenant: str, prompt: str, fingerprint: str) -> None:
    """Guards against readable prompts or tenants, and keys that a tenant's name could forge."""
    key = key_of(request(prompt), tenant, generator=fingerprint)
    # Operators find a tenant's keys by its hash.
    shape = rf"v{FORMAT_VERSION}:{hashed_tenant(tenant, SECRET)}:[^:]*:w:a2:[0-9a-f]{{64}}"
    assert re.fullmatch(f"specrej:{shape}", key)
    assert re.fullmatch(f"specrej:flight:{shape}", lock_key(key))
    assert key.isascii() and " " not in key


def test_no_part_of_a_key_can_be_computed_without_the_secret(tmp_path: Path) -> None:
    """Guards against a reader of Redis that confirms a guessed prompt, or a tenant's name.

    Fingerprints apart, which name models.
    """
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 32)
    hidden, plain = key_of(_BASE, secret=Secret(file)), key_of(_BASE)
    assert hidden == key_of(_BASE, secret=Secret(file))
    hashes = [{part for part in key.split(":") if len(part) >= 32} for key in (hidden, plain)]
    assert hashes[0] and not hashes[0] & hashes[1]
