"""Generates all candidates of every prompt to their ends, and scores their prefixes on a grid.

The tokens of a candidate depend on its id, not on its session. So the candidates of a prompt come
from several sessions in turn, and memory holds one session and one prompt's results at a time. No
candidate is rejected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np

from deploy.local.machine import describe_machine
from experiments.models import Models, unique_salt
from experiments.prompts import Item
from experiments.settings import Settings
from experiments.trajectories import PrefixScores, Store, Trajectories
from orchestrator.loop.scoring import checked
from specrej.contracts import FinishReason, Round, RoundEnd, Scores, SessionSpec
from specrej.contracts.errors import SlotsExceeded, Violation

# Called with the trajectories of a finished prompt, and the seconds they took.
Done = Callable[[Trajectories, float], None]

# Larger sessions are hardly faster, and run longer with few live candidates at their end.
DEFAULT_CHUNK = 256


class CollectError(Exception):
    """The collection cannot begin or continue."""


def missing(store: Store, settings: Settings, items: Sequence[Item]) -> tuple[Item, ...]:
    """The prompts that are not in the store yet.

    Raises:
        CollectError: the store has other settings, or other prompts with the same ids.
    """
    head = store.head()
    if head is None:
        return tuple(items)
    if Settings.from_json(head["settings"]) != settings:
        raise CollectError("the directory holds a collection with other settings: choose another")
    stored = store.prompts()
    given = {item.id: (settings.seed + item.number, item.prompt) for item in items}
    if other := [name for name in given if stored.get(name, given[name]) != given[name]]:
        raise CollectError(f"the directory holds other prompts with the ids {', '.join(other)}")
    return tuple(item for item in items if item.id not in stored)


async def collect(
    store: Store,
    settings: Settings,
    items: Sequence[Item],
    models: Models,
    done: Done,
) -> None:
    """Add the missing prompts to the store, one at a time.

    Raises:
        CollectError: the store has other settings, prompts or models.
        SpecrejError: a model failed.
    """
    remaining = missing(store, settings, items)
    head = store.head()
    if head is None:
        store.begin(_head(settings, models))
    elif head["identity"] != models.identity():
        raise CollectError("the collection was begun with other models")
    for item in remaining:
        start_s = time.perf_counter()
        trajectories = await collect_prompt(item, settings, models)
        store.add(trajectories)
        done(trajectories, time.perf_counter() - start_s)


async def collect_prompt(
    item: Item, settings: Settings, models: Models, chunk: int = DEFAULT_CHUNK
) -> Trajectories:
    """All candidates of one prompt; a chunk that does not fit into the slots is halved."""
    draft = _Draft(settings)
    first = 0
    while first < settings.n:
        size = min(chunk, settings.n - first)
        try:
            await _chunk(item, settings, models, draft, range(first, first + size))
        except SlotsExceeded:
            if size == 1:
                raise
            chunk = size // 2
        else:
            first += size
    return draft.trajectories(item, settings)


async def _chunk(
    item: Item, settings: Settings, models: Models, draft: _Draft, candidates: range
) -> None:
    """Generate and score these candidates in one session."""
    # Tokens depend on a candidate's number, so the session begins with those before the chunk, too.
    sampling, salt = settings.sampling(item.number), unique_salt()
    spec = SessionSpec(item.prompt, candidates.stop, sampling, 1, salt)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(models.generator.open(spec))
        draft.prompt_tokens = session.prompt_tokens
        await session.prune(candidates)
        scoring = {
            name: await stack.enter_async_context(scorer(item.prompt))
            for name, scorer in models.scorers.items()
        }
        for column, position in enumerate(settings.grid):
            ended = await session.extend(position)
            if ended.ended_by is RoundEnd.SLOTS_FULL:
                full = Violation("chunk", f"the slots are full at token {ended.num_tokens}")
                raise SlotsExceeded([full], max_candidates=len(candidates) // 2)
            draft.add_tokens(ended)
            for name, scoring_session in scoring.items():
                scores = await checked(scoring_session, ended.candidates)
                draft.add_scores(name, column, ended, scores)
            if ended.ended_by is RoundEnd.ALL_FINISHED:
                break


def _head(settings: Settings, models: Models) -> dict[str, Any]:
    return {
        "settings": asdict(settings),
        "identity": models.identity(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "device": models.description.device,
        "rewards": {reward.name: reward.description for reward in models.rewards},
    }


class _Draft:
    """One prompt's arrays while they fill; shapes as in `Trajectories`."""

    def __init__(self, settings: Settings) -> None:
        n, columns = settings.n, len(settings.grid)
        self.positions = np.array(settings.grid, dtype=np.int64)
        self.num_tokens = np.zeros(n, np.int64)
        self.finished = np.zeros(n, np.bool_)
        self.logprobs = np.full((n, settings.max_tokens), np.nan)
        self.rewards = {
            name: PrefixScores(np.full((n, columns), np.nan), np.full(n, np.nan))
            for name in settings.rewards
        }
        self.texts = [""] * n
        self.prompt_tokens = 0

    def add_tokens(self, ended: Round) -> None:
        for candidate in ended.candidates:
            if len(candidate.new_logprobs) != len(candidate.new_token_ids):
                raise CollectError("the generator returns no log-probabilities")
            end = candidate.num_tokens
            start = end - len(candidate.new_logprobs)
            self.logprobs[candidate.id, start:end] = candidate.new_logprobs
            if candidate.finish:
                self.num_tokens[candidate.id] = candidate.num_tokens
                self.finished[candidate.id] = candidate.finish is FinishReason.STOP
                self.texts[candidate.id] = candidate.text

    def add_scores(self, name: str, column: int, ended: Round, scores: Scores) -> None:
        partial, final = self.rewards[name].partial, self.rewards[name].final
        for candidate, value in zip(ended.candidates, scores.values, strict=True):
            if candidate.finish:
                final[candidate.id] = value
            # A candidate that ended before the position has no prefix of that length.
            if candidate.num_tokens == self.positions[column]:
                partial[candidate.id, column] = value

    def trajectories(self, item: Item, settings: Settings) -> Trajectories:
        """The finished arrays."""
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
            rewards=self.rewards,
            texts=tuple(self.texts),
        )
