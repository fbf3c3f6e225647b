"""Whole sessions of a generator, and the tokens of their candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specrej.contracts import Candidate, Generator, Round, RoundEnd, Sampling, Session, SessionSpec
from tests.conformance.subjects import PROMPT, Subject

ENDLESS = Sampling(max_tokens=24, seed=3, ignore_eos=True)
# Of candidates by id: token ids, or characters where a generator sends texts only.
Tokens = dict[int, tuple[Any, ...]]


def ids(candidates: Sequence[Candidate]) -> list[int]:
    return [candidate.id for candidate in candidates]


def add(tokens: Tokens, ended: Round) -> Tokens:
    """Candidates' tokens, collected from the new tokens of each round."""
    for candidate in ended.candidates:
        before = tokens.get(candidate.id, ())
        made = before + candidate.new_token_ids
        if candidate.num_tokens and (not made or isinstance(made[0], str)):
            made = tuple(candidate.text)
            assert made[: len(before)] == before
        else:
            assert len(made) == candidate.num_tokens
        tokens[candidate.id] = made
    return tokens


async def whole(
    generator: Generator, n: int, sampling: Sampling, *, salt: str = "", first_round_tokens: int = 8
) -> tuple[Candidate, ...]:
    """All candidates, in one round."""
    async with generator.open(
        SessionSpec(PROMPT, n, sampling, first_round_tokens, salt)
    ) as session:
        ended = await session.extend(sampling.max_tokens)
        assert ended.ended_by is RoundEnd.ALL_FINISHED
        return ended.candidates


async def without_cuts(
    subject: Subject, n: int, sampling: Sampling, rounds: Sequence[int] = ()
) -> Tokens:
    """All candidates' tokens, in one round; in `rounds` where draws depend on their borders."""
    if not subject.draws_by_round(sampling):
        rounds = ()
    return await drawn(subject.generator, SessionSpec(PROMPT, n, sampling, 8), rounds)


async def drawn(generator: Generator, spec: SessionSpec, rounds: Collection[int] = ()) -> Tokens:
    """The tokens of all candidates, by default in one round."""
    async with generator.open(spec) as session:
        return (await to_the_end(session, rounds or [spec.sampling.max_tokens]))[0]


async def to_the_end(
    session: Session, rounds: Collection[int], cut: bool = False
) -> tuple[Tokens, dict[int, Candidate]]:
    """Tokens, and all candidates as they finished, over several rounds; with `cut`, every other one
    is rejected in each."""
    tokens: Tokens = {}
    finished: dict[int, Candidate] = {}
    for until_tokens in rounds:
        ended = await session.extend(until_tokens)
        add(tokens, ended)
        live = [one.id for one in ended.candidates if one.finish is None]
        for candidate in ended.candidates:
            assert candidate.id not in finished, "a finished candidate came back"
            if candidate.finish:
                finished[candidate.id] = candidate
        await session.prune(live[::2] if cut else live)
    return tokens, finished
