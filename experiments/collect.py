"""Generates all candidates of every prompt to their ends, and scores their prefixes on a grid.

The tokens of a candidate depend on its id, not on its session. So the candidates of a prompt come
from several sessions in turn, and memory holds one session and one prompt's results at a time. No
candidate is rejected.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
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

# Larger sessions are hardly faster, and run longer with few live candidates at their end.
DEFAULT_CHUNK = 256


def missing(store: Store, settings: Settings, items: Sequence[Item]) -> tuple[Item, ...]:
    """The prompts that are not in the store yet.

    Raises:
        ValueError: the store has other settings, or other prompts with the same ids.
    """
    head = store.head()
    if head is None:
        return tuple(items)
    if Settings.from_json(head["settings"]) != settings:
        raise ValueError("the directory holds a collection with other settings: choose another")
    stored = {made.prompt_id: (made.seed, made.prompt) for made in store}
    given = {item.id: (settings.seed + item.number, item.prompt) for item in items}
    if other := [name for name in given if stored.get(name, given[name]) != given[name]]:
        raise ValueError(f"the directory holds other prompts with the ids {', '.join(other)}")
    return tuple(item for item in items if item.id not in stored)


async def collect(
    store: Store,
    settings: Settings,
    items: Sequence[Item],
    models: Models,
) -> None:
    """Add the missing prompts to the store, one at a time; progress goes to stderr.

    Raises:
        ValueError: the store has other settings, prompts or models.
        SpecrejError: a model failed.
    """
    remaining = missing(store, settings, items)
    head = store.head()
    if head is None:
        store.begin(_head(settings, models))
    elif head["identity"] != models.identity():
        raise ValueError("the collection was begun with other models")
    for number, item in enumerate(remaining, 1):
        start_s = time.perf_counter()
        trajectories = await collect_prompt(item, settings, models)
        store.add(trajectories)
        seconds, tokens = time.perf_counter() - start_s, int(trajectories.num_tokens.sum())
        done = f"[{number}/{len(remaining)}] {item.id}: {tokens:,} tokens, {seconds:.0f} s"
        print(done, file=sys.stderr, flush=True)


async def collect_prompt(
    item: Item, settings: Settings, models: Models, chunk: int = DEFAULT_CHUNK
) -> Trajectories:
    """All candidates of one prompt; a chunk that does not fit into the slots is halved."""
    made = _empty(item, settings)
    first = prompt_tokens = 0
    while first < settings.n:
        size = min(chunk, settings.n - first)
        try:
            candidates = range(first, first + size)
            prompt_tokens = await _chunk(item, settings, models, made, candidates)
        except SlotsExceeded:
            if size == 1:
                raise
            chunk = size // 2
        else:
            first += size
    return replace(made, prompt_tokens=prompt_tokens)


async def _chunk(
    item: Item, settings: Settings, models: Models, made: Trajectories, candidates: range
) -> int:
    """Generate and score these candidates in one session; returns the tokens of the prompt."""
    # Tokens depend on a candidate's number, so the session begins with those before the chunk, too.
    sampling, salt = settings.sampling(item.number), unique_salt()
    spec = SessionSpec(item.prompt, candidates.stop, sampling, 1, salt)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(models.generator.open(spec))
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
            _add_tokens(made, ended)
            for name, scoring_session in scoring.items():
                scores = await checked(scoring_session, ended.candidates)
                _add_scores(made, name, column, ended, scores)
            if ended.ended_by is RoundEnd.ALL_FINISHED:
                break
        return session.prompt_tokens


def _head(settings: Settings, models: Models) -> dict[str, Any]:
    return {
        "settings": asdict(settings),
        "identity": models.identity(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "device": models.description.device,
        "rewards": {reward.name: reward.description for reward in models.rewards},
    }


def _empty(item: Item, settings: Settings) -> Trajectories:
    """The prompt's trajectories, whose arrays are filled in place."""
    n, columns = settings.n, len(settings.grid)
    return Trajectories(
        prompt_id=item.id,
        prompt=item.prompt,
        prompt_tokens=0,
        max_tokens=settings.max_tokens,
        seed=settings.seed + item.number,
        positions=np.array(settings.grid, dtype=np.int64),
        num_tokens=np.zeros(n, np.int64),
        finished=np.zeros(n, np.bool_),
        logprobs=np.full((n, settings.max_tokens), np.nan),
        rewards={
            name: PrefixScores(np.full((n, columns), np.nan), np.full(n, np.nan))
            for name in settings.rewards
        },
        texts=[""] * n,
    )


def _add_tokens(made: Trajectories, ended: Round) -> None:
    for candidate in ended.candidates:
        if len(candidate.new_logprobs) != len(candidate.new_token_ids):
            raise ValueError("the generator returns no log-probabilities")
        end = candidate.num_tokens
        start = end - len(candidate.new_logprobs)
        made.logprobs[candidate.id, start:end] = candidate.new_logprobs
        if candidate.finish:
            made.num_tokens[candidate.id] = candidate.num_tokens
            made.finished[candidate.id] = candidate.finish is FinishReason.STOP
            made.texts[candidate.id] = candidate.text


def _add_scores(made: Trajectories, name: str, column: int, ended: Round, scores: Scores) -> None:
    partial, final = made.rewards[name].partial, made.rewards[name].final
    for candidate, value in zip(ended.candidates, scores.values, strict=True):
        if candidate.finish:
            final[candidate.id] = value
        # A candidate that ended before the position has no prefix of that length.
        if candidate.num_tokens == made.positions[column]:
            partial[candidate.id, column] = value
