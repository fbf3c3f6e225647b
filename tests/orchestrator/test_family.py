"""Which stored answer may serve which request: the rules of an upgrade."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.envelope import enclosed
from orchestrator.family import Member, better_ones, may_serve, member_of, packed, unpacked
from orchestrator.keys import Family, Keys, cache_keys
from specrej.contracts import (
    Algorithm,
    FinishReason,
    GenerationRequest,
    Normalization,
    Prompt,
    Sampling,
    Schedule,
    Selection,
    WeightedReward,
)
from tests.orchestrator.test_cache import generation

ASKED = Family("index", n=8, return_candidates=1)
GOOD = Member(n=8, score=1.0, complete=True, vetoed=False, returned=1, stored_at=0.0)

_MEMBERS = st.builds(
    Member,
    n=st.integers(1, 16),
    score=st.floats(-2, 2),
    complete=st.booleans(),
    vetoed=st.booleans(),
    returned=st.integers(1, 4),
    stored_at=st.floats(0, 1e10),
)


def family_of(
    sampling: Sampling | None = None, *, tenant: str = "t", reward: str = "w", **selection: object
) -> str:
    """The key of the index that a request's answer is listed in."""
    asked = GenerationRequest(
        Prompt.from_user("hello"),
        sampling or Sampling(),
        replace(Selection(), **selection),  # type: ignore[arg-type]
    )
    keys = cache_keys(asked, tenant=tenant, generator_fingerprint="g", reward_fingerprint=reward)
    return keys.family.key if keys.family else ""


def test_a_family_differs_in_the_search_alone() -> None:
    """Guards against upgrades that never happen, over a field that only says how to search."""
    same = {
        family_of(),
        family_of(Sampling(seed=9)),
        family_of(n=32),
        family_of(alpha=0.25),
        family_of(schedule=Schedule("memory")),
        family_of(algorithm=Algorithm.BEST_OF_N),
        family_of(return_candidates=4),
    }
    assert len(same) == 1


def test_other_questions_and_judges_are_other_families() -> None:
    """Guards against an answer to another question, by another judge or of another tenant."""
    keys = [
        family_of(),
        family_of(Sampling(max_tokens=9)),
        family_of(Sampling(temperature=0.5)),
        family_of(Sampling(logprobs=True)),
        family_of(rewards=(WeightedReward("a"),)),
        family_of(rewards=(WeightedReward("a", veto_below=0.0),)),
        family_of(tenant="u"),
        family_of(reward="x"),
    ]
    assert len(set(keys)) == len(keys) and "" not in keys


def test_batch_normalised_scores_have_no_family() -> None:
    """Guards against comparing scores that mean something within their own request only."""
    batch = WeightedReward("a", normalization=Normalization("batch"))
    assert family_of(rewards=(WeightedReward("b"), batch)) == ""


def test_as_many_as_fit_is_served_by_nobody_else() -> None:
    """Guards against a small answer for a caller that asked for all there is room for."""
    asked = replace(ASKED, n=0)
    assert not may_serve(replace(GOOD, n=1000), asked, None)
    assert not may_serve(replace(GOOD, n=1000, score=9.0), asked, GOOD)


@pytest.mark.parametrize(
    ("member", "own", "serves"),
    [
        (GOOD, None, True),
        (replace(GOOD, n=7), None, False),
        (replace(GOOD, n=9, score=-5.0), None, True),
        (replace(GOOD, returned=0), None, False),
        (replace(GOOD, vetoed=True), None, False),
        (GOOD, GOOD, False),
        (replace(GOOD, n=1, score=1.5), GOOD, True),
        (replace(GOOD, n=99, score=0.5), GOOD, False),
        (replace(GOOD, complete=False, score=9.0), GOOD, False),
        (replace(GOOD, n=1, score=-9.0), replace(GOOD, complete=False), True),
        (replace(GOOD, n=1, score=-9.0), replace(GOOD, vetoed=True), True),
        (replace(GOOD, n=99, vetoed=True, score=9.0), replace(GOOD, vetoed=True), False),
    ],
)
def test_who_may_serve(member: Member, own: Member | None, serves: bool) -> None:
    """Guards the rule: searched as hard where there is nothing, better where there is something."""
    assert may_serve(member, ASKED, own) is serves


@given(st.dictionaries(st.text("abcdef", min_size=1), _MEMBERS), st.none() | _MEMBERS)
def test_the_best_serves_and_nothing_worse_than_what_there_is(
    members: dict[str, Member], own: Member | None
) -> None:
    """Guards against a vetoed or truncated answer for one that is neither, and a lower score."""
    chosen = [members[name] for name in better_ones(members, ASKED, own)]
    assert [each.merit for each in chosen] == sorted((m.merit for m in chosen), reverse=True)
    complete = any(each.complete and not each.vetoed for each in members.values())
    for each in chosen:
        assert not each.vetoed and each.returned >= ASKED.return_candidates
        assert each.complete or not complete
        assert each.merit > own.merit if own else each.n >= ASKED.n


@given(_MEMBERS)
def test_an_index_entry_comes_back_as_it_was(member: Member) -> None:
    """Guards the format of the index."""
    assert unpacked(packed(member)) == member


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"null", b"\xff", None, 7, b'{"n":1}', packed(GOOD).replace(b"1.0", b"NaN")],
)
def test_a_foreign_index_entry_is_none(text: object) -> None:
    """Guards against an exception over what somebody else put into the hash."""
    assert unpacked(text) is None


def test_what_the_index_says_of_an_answer() -> None:
    """Guards against an index that lists other numbers than its answers have."""
    made = generation(score=0.25)
    best = replace(made.best, finish=FinishReason.LENGTH)
    envelope = enclosed(Keys("k", ASKED), replace(made, candidates=(best,)), 7.0)
    assert member_of(envelope) == Member(made.n, 0.25, False, True, 1, 7.0)
