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
from specrej.contracts import (
    Algorithm,
    Branching,
    CacheControl,
    ConfidenceCut,
    GenerationRequest,
    Grammar,
    Image,
    JsonSchema,
    Message,
    Normalization,
    Prompt,
    Regex,
    Sampling,
    Schedule,
    Selection,
    TextPart,
    TokenBias,
    Tool,
    ToolCall,
    Vote,
    WeightedReward,
)
from tests.orchestrator.caching import SECRET


def request(text: str = "hello", **parts: Any) -> GenerationRequest:
    return GenerationRequest(Prompt.from_user(text), **parts)


def key_of(
    request: GenerationRequest,
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
    {"logit_bias": (TokenBias(1, 2.0),)},
    {"logit_bias": (TokenBias(1, 3.0),)},
    {"bad_words": ("x",)},
    {"stop_token_ids": (1,)},
    *({"structured_output": output} for output in (JsonSchema("a"), Regex("a"), Grammar("a"))),
    {"max_thinking_tokens": 8},
]
_OTHER_SELECTIONS: list[dict[str, Any]] = [
    {"prefer_complete": True},
    {"min_answers": 2},
    *({"branching": branching} for branching in (Branching(), Branching(keep=2))),
    {"n": 4},
    {"alpha": 0.25},
    {"algorithm": Algorithm.BEST_OF_N},
    {"return_candidates": 2},
    {"schedule": Schedule("tokens", tokens=(16, 32))},
    {"schedule": Schedule("tokens", tokens=(16, 33))},
    {"schedule": Schedule(factor=3.0)},
    {"rewards": (WeightedReward("a"),)},
    {"rewards": (WeightedReward("a", 0.5), WeightedReward("b"))},
    {"rewards": (WeightedReward("a"), WeightedReward("b", 0.5))},
    {"rewards": (WeightedReward("a", veto_below=0.0),)},
    {"rewards": (WeightedReward("a", normalization=Normalization("batch")),)},
    {"rewards": (WeightedReward("a", stage="end"),)},
    *({"rewards": (WeightedReward("a", data=data),)} for data in ('{"a":1}', '{"a":2}')),
    {"stop_at": 0.0},
    {"stop_at": 1.0},
    {"waves": 4},
    {"first": 1},
    *({"vote": vote} for vote in (Vote(), Vote("boxed"), Vote(weight="reward"))),
    *({"vote": Vote("regex", argument)} for argument in ("a", "b")),
    {"vote": Vote(stop_probability=0.9)},
    *({"confidence_cut": cut} for cut in (ConfidenceCut(), ConfidenceCut(0.5))),
    {"rewards": (WeightedReward("a", normalization=Normalization("fixed", 0.0, 2.0)),)},
    {"score_thinking": True},
]
_USER = Message("user", "hello")
_OTHER_PROMPTS: list[dict[str, Any]] = [
    {"messages": (), "text": "hello"},
    {"messages": (), "text": "hello", "allow_special_tokens": True},
    {"messages": (Message("system", "hello"), _USER)},
    {"continue_final": True},
    *({"tools": (tool,)} for tool in (Tool("f"), Tool("f", "f"), Tool("f", parameters="{}"))),
    {"tool_choice": "none"},
    {"tool_choice": "required", "tool_name": "f"},
    {"parallel_tool_calls": False},
    *({"thinking": thinking} for thinking in (True, False)),
    *(
        {"messages": (_USER, Message("assistant", tool_calls=(ToolCall(*call),)))}
        for call in ("1fa", "2fa", "1ga", "1fb")
    ),
    *({"messages": (_USER, Message("tool", "hello", tool_call_id=one))} for one in "12"),
    *(
        {"messages": (Message("user", parts=parts),)}
        for parts in (
            (TextPart("hello"),),
            (Image(b"hello"),),
            (Image(b"hello", "image/jpeg"),),
            (Image(b"hello."),),
            (TextPart("a"), Image(b"hello")),
            (Image(b"hello"), TextPart("a")),
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
    *(request(sampling=replace(Sampling(), **changed)) for changed in _OTHER_SAMPLING),
    *(request(selection=replace(Selection(), **changed)) for changed in _OTHER_SELECTIONS),
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
        (Prompt, _OTHER_PROMPTS),
        (Sampling, _OTHER_SAMPLING),
        (Selection, _OTHER_SELECTIONS),
    )
    for part, others in changed:
        assert {field.name for field in fields(part)} == {name for o in others for name in o}


_ONE, _TWO = WeightedReward("a", 0.3), WeightedReward("b", 0.7)
_BEST_OF_N = Selection(algorithm=Algorithm.BEST_OF_N)


def _rewarded(*rewards: WeightedReward) -> GenerationRequest:
    return request(selection=Selection(rewards=rewards))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_BASE, request(sampling=Sampling(max_tokens=2048, temperature=1.0, top_p=1.0, seed=0))),
        (_BASE, request(sampling=Sampling(temperature=1, top_p=1))),
        (
            request(sampling=Sampling(logit_bias=(TokenBias(1, 2.0), TokenBias(2, 0.5)))),
            request(sampling=Sampling(logit_bias=(TokenBias(2, 0.5), TokenBias(1, 2)))),
        ),
        (_BASE, request(selection=Selection(schedule=Schedule(first=16, factor=2)))),
        (_BASE, replace(_BASE, cache=CacheControl.REFRESH)),
        (_BASE, replace(_BASE, allow_degraded=True)),
        (_BASE, replace(_BASE, absent=("n", "schedule"))),
        (_rewarded(_ONE, _TWO), _rewarded(_TWO, _ONE)),
        (
            request(selection=_BEST_OF_N),
            request(
                selection=replace(_BEST_OF_N, alpha=0.9, schedule=Schedule("tokens", tokens=(4,)))
            ),
        ),
    ],
)
def test_equal_requests_have_one_key(first: GenerationRequest, second: GenerationRequest) -> None:
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
