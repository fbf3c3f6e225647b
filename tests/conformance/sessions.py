"""Whole sessions of a generator, and the tokens of their candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specrej.contracts import (
    Candidate,
    FinishReason,
    Generator,
    Round,
    RoundEnd,
    Sampling,
    Session,
    SessionSpec,
)
from tests.conformance.subjects import PROMPT

ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)
# Of 8 candidates some end by themselves and some are cut off, with the model as with the toy.
ENDING = Sampling(max_tokens=60, seed=4)
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
    salt: str = "",
    first_round_tokens: int = 8,
) -> tuple[Candidate, ...]:
    """All candidates, in one round."""
    async with generator.open(
        SessionSpec(
            PROMPT,
            n,
            sampling,
            first_round_tokens,
            salt,
        )
    ) as session:
        ended = await session.extend(sampling.max_tokens)
        assert ended.ended_by is RoundEnd.ALL_FINISHED
        return ended.candidates


async def tokens_in_one_round(generator: Generator, n: int, sampling: Sampling) -> Tokens:
    """All candidates' tokens, in one round."""
    made = await whole(generator, n, sampling)
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
