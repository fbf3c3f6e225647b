"""Writes all candidates of every prompt to their ends, and scores their prefixes on a grid.

What a candidate says depends on its id, not on the session it is in: so many candidates come from
several sessions, one after the other, and memory holds one of them and one prompt's results.
Nobody is rejected. Knows no policy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np

from experiments.backends import Backends
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.trajectories import (
    BoolArray,
    FloatArray,
    IntArray,
    Line,
    PrefixScores,
    Store,
    Trajectories,
    likelihood,
    plain,
)
from loadtest.sweep.machine import describe_machine
from orchestrator.composition import LIKELIHOOD
from orchestrator.scoring import checked
from specrej.contracts import FinishReason, Round, RoundEnd, Scores, ScoringSession, Session
from specrej.errors import InvalidRequest

# Called with the number of candidate-tokens, of all that there can be, that need no more work.
Advance = Callable[[int], None]

# Larger sessions are hardly faster, and take longer to empty as their candidates end.
DEFAULT_CHUNK = 256


class CollectError(Exception):
    """The collection cannot begin, or go on; says why."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how it goes: candidate-tokens that are settled, and prompts that are done."""

    advance: Advance
    done: Callable[[Item, Trajectories, float], None]


def missing(store: Store, settings: Settings, items: Sequence[Item]) -> tuple[Item, ...]:
    """The prompts that are not there yet.

    Raises:
        CollectError: what is there was made otherwise, or of other prompts.
    """
    head = store.head()
    if head is None:
        return tuple(items)
    if Settings.from_json(head["settings"]) != settings:
        raise CollectError("holds a collection with other settings: choose another directory")
    kept = {line["prompt_id"]: (line["seed"], line["prompt"]) for line in store.lines()}
    wanted = {item.id: (settings.seed + item.number, plain(item.prompt)) for item in items}
    if other := [name for name in wanted if kept.get(name, wanted[name]) != wanted[name]]:
        raise CollectError(f"holds other prompts by the ids {', '.join(other)}")
    return tuple(item for item in items if item.id not in kept)


async def collect(
    store: Store,
    settings: Settings,
    items: Sequence[Item],
    backends: Backends,
    watcher: Watcher,
    chunk: int = DEFAULT_CHUNK,
) -> None:
    """Add what is missing to the store, a prompt at a time.

    Raises:
        CollectError: what is there was made otherwise.
        SpecrejError: a backend cannot do it.
    """
    left = missing(store, settings, items)
    head = store.head()
    if head is None:
        store.begin(_head(settings, backends))
    elif head["identity"] != backends.identity():
        raise CollectError("was begun with other models than these")
    for item in left:
        began = time.perf_counter()
        trajectories, notes = await collect_prompt(item, settings, backends, watcher.advance, chunk)
        store.add(trajectories, notes)
        watcher.done(item, trajectories, time.perf_counter() - began)


async def collect_prompt(
    item: Item, settings: Settings, backends: Backends, advance: Advance, chunk: int = DEFAULT_CHUNK
) -> tuple[Trajectories, Line]:
    """All candidates of one prompt, and how long they took, session by session."""
    draft = _Draft.empty(settings)
    sessions: list[Line] = []
    first = 0
    while first < settings.n:
        size = min(chunk, settings.n - first)
        try:
            sessions.append(await _chunk(item, settings, backends, draft, (first, size), advance))
        except InvalidRequest as error:
            chunk = _what_fits(error, size)
        else:
            first += size
    return draft.trajectories(item, settings), {"sessions": sessions}


def _what_fits(error: InvalidRequest, size: int) -> int:
    """Candidates that a session can have, where it cannot have so many."""
    fitting = int(error.metadata.get("candidates", 0)) if error.reason == "SLOTS_EXCEEDED" else 0
    if not 0 < fitting < size:
        raise error
    return fitting


def unshared_salt() -> str:
    """For a session whose prompt is read anew, whoever has read it before.

    So that every request that is timed pays for its prompt. What is said does not depend on it: a
    prompt's last token, which first tokens are drawn from, is always computed alone.
    """
    return f"experiments {secrets.token_hex(16)}"


async def _chunk(
    item: Item,
    settings: Settings,
    backends: Backends,
    draft: _Draft,
    chunk: tuple[int, int],
    advance: Advance,
) -> Line:
    """One session, from its first candidate's id on; returns how long each part took."""
    first, size = chunk
    laps: list[Line] = []
    # Room to the end for everybody, so that full slots never end a round.
    opening = backends.generator.open(
        item.prompt,
        size,
        settings.sampling(item.number),
        settings.max_tokens,
        cache_salt=unshared_salt(),
        first_candidate=first,
    )
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(opening)
        draft.prompt_tokens = session.prompt_tokens
        judges = {
            name: await stack.enter_async_context(scorer.open(item.prompt))
            for name, scorer in backends.scorers.items()
        }
        reached = 0
        for column, position in enumerate(settings.grid):
            is_over, lap = await _column(session, judges, draft, column, position)
            laps.append(lap)
            until = settings.max_tokens if is_over else position
            advance((until - reached) * size)
            reached = until
            if is_over:
                break
    return {"first": first, "size": size, "laps": laps}


async def _column(
    session: Session, judges: Mapping[str, ScoringSession], draft: _Draft, column: int, until: int
) -> tuple[bool, Line]:
    """To the next position of the grid; returns whether all have ended, and what it took."""
    watch = _Watch()
    ended = await session.extend(until)
    extend_s = watch.lap_s()
    if ended.ended_by is RoundEnd.SLOTS_FULL:
        raise CollectError("the generator's slots are full: it must have no other sessions")
    draft.take(ended)
    score_s: dict[str, float] = {}
    for name, judge in judges.items():
        watch.lap_s()
        draft.judge(name, column, ended, await checked(judge, ended.candidates))
        score_s[name] = watch.lap_s()
    lap = {
        "until": ended.num_tokens,
        "rows": len(ended.candidates),
        "tokens": sum(len(candidate.new_token_ids) for candidate in ended.candidates),
        "slots": ended.slots.session,
        "extend_s": extend_s,
        "score_s": score_s,
    }
    return ended.ended_by is RoundEnd.ALL_FINISHED, lap


class _Watch:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap_s(self) -> float:
        """Seconds since the last one."""
        before, self._at = self._at, time.perf_counter()
        return round(self._at - before, 4)


def _head(settings: Settings, backends: Backends) -> Line:
    return {
        "settings": settings.to_json(),
        "identity": backends.identity(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "device": backends.model.device,
        "slot_bytes": backends.model.slot_bytes,
        "sizes": {name: asdict(each) for name, each in backends.sizes.items()},
        "rewards": {each.name: each.description for each in backends.rewards},
    }


@dataclass(slots=True)
class _Draft:
    """One prompt's arrays while they fill; shapes as in `Trajectories`."""

    positions: IntArray
    num_tokens: IntArray
    finished: BoolArray
    logprobs: FloatArray
    rewards: dict[str, PrefixScores]
    texts: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0

    @classmethod
    def empty(cls, settings: Settings) -> _Draft:
        n, columns = settings.n, len(settings.grid)
        return cls(
            np.array(settings.grid, dtype=np.int64),
            np.zeros(n, np.int64),
            np.zeros(n, np.bool_),
            np.full((n, settings.max_tokens), np.nan),
            {
                name: PrefixScores(np.full((n, columns), np.nan), np.full(n, np.nan))
                for name in settings.rewards
            },
        )

    def take(self, ended: Round) -> None:
        """The tokens of a round."""
        for candidate in ended.candidates:
            if len(candidate.new_logprobs) != len(candidate.new_token_ids):
                raise CollectError("the generator does not tell log-probabilities")
            end = candidate.num_tokens
            self.logprobs[candidate.id, end - len(candidate.new_logprobs) : end] = (
                candidate.new_logprobs
            )
            if candidate.finish:
                self.num_tokens[candidate.id] = candidate.num_tokens
                self.finished[candidate.id] = candidate.finish is FinishReason.STOP
                self.texts[candidate.id] = candidate.text

    def judge(self, name: str, column: int, ended: Round, scores: Scores) -> None:
        """What a reward says of a round."""
        partial, final = self.rewards[name].partial, self.rewards[name].final
        for candidate, value in zip(ended.candidates, scores.values, strict=True):
            if candidate.finish:
                final[candidate.id] = value
            # Whoever ended before the position has no prefix of that length.
            if candidate.num_tokens == self.positions[column]:
                partial[candidate.id, column] = value

    def trajectories(self, item: Item, settings: Settings) -> Trajectories:
        """What has come of it."""
        own = likelihood(self.logprobs, self.num_tokens, self.positions)
        return Trajectories(
            prompt_id=item.id,
            prompt=item.prompt,
            prompt_tokens=self.prompt_tokens,
            max_tokens=settings.max_tokens,
            seed=settings.seed + item.number,
            positions=self.positions,
            num_tokens=self.num_tokens,
            finished=self.finished,
            logprobs=self.logprobs,
            rewards={**self.rewards, LIKELIHOOD: own},
            texts=tuple(self.texts[number] for number in range(settings.n)),
        )
