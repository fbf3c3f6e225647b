"""Runs shadows to their end: after the answer has left, in a session of their own.

What a candidate says is keyed by (seed, candidate, step), so a session in which all others are
pruned after the first token makes the very text it would have had. The run that rejected it holds
nothing for it, waits for nothing, and cannot be changed by it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.refresh import Refreshes
from orchestrator.scoring import Panel, PanelSession
from orchestrator.shadow import (
    End,
    Kind,
    Notes,
    Sampled,
    Statistics,
    ended_after,
    ended_in_run,
    kind_of,
    observe,
)
from specrej import telemetry
from specrej.contracts import (
    Algorithm,
    Candidate,
    Generation,
    GenerationRequest,
    Generator,
    Round,
    RoundEnd,
)
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Label, Observed


class _GivenUp(Exception):
    """The shadows of a request cannot tell anything."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Watched:
    """A request of the sampled share; its rewards have names. `notes` are the run's to take."""

    request: GenerationRequest
    generator: Generator
    panel: Panel
    cache_salt: str
    notes: Notes

    @property
    def kind(self) -> Kind:
        selection = self.request.selection
        return kind_of(selection.schedule, selection.rewards)


class Shadows:
    """Watches a share of the requests, and what their shadows say; those of one at a time."""

    def __init__(
        self,
        share: float,
        *,
        max_slots: int = 8192,
        target_regret: float = 0.05,
        deadline_s: float = 600.0,
        rng: random.Random | None = None,
    ) -> None:
        """`share` of the requests, 0 .. 1; `max_slots` that shadows and their prompt may hold.

        Shadows that take longer than `deadline_s` seconds are given up. `rng` draws them.
        """
        self.statistics = Statistics(target_regret)
        self._share = share
        self._max_slots = max_slots
        self._rng = rng or random.Random()
        self._background = Refreshes(limit=1, deadline_s=deadline_s, what="shadows had to be left")
        self._keys = map(str, itertools.count())
        if share:
            self._expose()

    @property
    def num_running(self) -> int:
        """Requests whose shadows run."""
        return self._background.num_running

    async def aclose(self) -> None:
        """End what runs."""
        await self._background.aclose()

    def watch(
        self, request: GenerationRequest, generator: Generator, panel: Panel, cache_salt: str
    ) -> Watched | None:
        """A request that is about to run, if it is of the share; Best-of-N rejects nobody."""
        if request.selection.algorithm is Algorithm.BEST_OF_N or self._rng.random() >= self._share:
            return None
        watched = Watched(request, generator, panel, cache_salt, Notes(self._rng))
        return watched if self.statistics.admit(watched.kind) else None

    def follow(self, watched: Watched, generation: Generation, *, is_busy: bool) -> None:
        """Begin to run the shadows of an answered request to their end, unless callers wait."""
        if reason := self._reason_not_to(watched, generation, is_busy):
            _count_given_up(watched.kind, reason)
        else:
            work = partial(self.learn_from, watched, generation.n)
            self._background.start(next(self._keys), work)

    async def learn_from(self, watched: Watched, n: int) -> None:
        """Run the shadows of an answered request of `n` candidates to their end, now.

        Raises:
            SpecrejError: a backend cannot be had.
        """
        kind, notes = watched.kind, watched.notes
        labels = _labels(kind)
        attributes = {names.SCHEDULE: kind.schedule, names.REWARDS: kind.reward}
        with telemetry.span(names.SPAN_SHADOWS, attributes):
            try:
                sample = [*ended_in_run(notes), *await _ended(watched, n)]
                # With hundreds of candidates it takes long enough to keep callers waiting.
                seen = await asyncio.to_thread(
                    observe, sample, notes.decisions, watched.request.selection.rewards
                )
            except _GivenUp as given_up:
                _count_given_up(kind, given_up.reason)
            except BaseException:
                _count_given_up(kind, "failed")
                raise
            else:
                self.statistics.add(kind, seen)
                metrics.add(names.SHADOW_REQUESTS, 1, **labels)
                metrics.add(names.SHADOW_REGRETS, int(seen.regretted), **labels)

    def _reason_not_to(self, watched: Watched, generation: Generation, is_busy: bool) -> str | None:
        if generation.degraded or generation.hurried:
            return "weaker"  # the deadline or a failure has rejected, not the reward
        if is_busy or self.num_running:
            return "busy"
        # Of all their decisions or of none: a round without its shadow would bias the estimates.
        rows = len(watched.notes.shadows) * watched.request.sampling.max_tokens
        needed = generation.usage.prompt_tokens + max(generation.n, rows)
        return "slots" if needed > self._max_slots else None

    def _expose(self) -> None:
        metrics.observe(names.SHADOW_CORRELATION, self._correlations)
        metrics.observe(names.SHADOW_REGRET, self._regrets)
        metrics.observe(names.SHADOW_ALPHA, self._alphas)

    def _correlations(self) -> Iterator[Observed]:
        for kind in self.statistics.kinds:
            for token, tau in self.statistics.correlations(kind):
                yield tau, {**_labels(kind), "decision_token": token}

    def _regrets(self) -> Iterator[Observed]:
        for kind in self.statistics.kinds:
            yield self.statistics.regret(kind).value, _labels(kind)

    def _alphas(self) -> Iterator[Observed]:
        for kind in self.statistics.kinds:
            alpha = self.statistics.recommended_alpha(kind)
            if alpha is not None:
                yield alpha, _labels(kind)


def _labels(kind: Kind) -> dict[str, Label]:
    return {"schedule": kind.schedule, names.REWARD: kind.reward}


def _count_given_up(kind: Kind, reason: str) -> None:
    metrics.add(names.SHADOW_GIVEN_UP, 1, **_labels(kind), reason=reason)


async def _ended(watched: Watched, n: int) -> list[Sampled]:
    """The shadows at their ends.

    Raises:
        _GivenUp: one of them does not get there, or is not who it was.
        SpecrejError: a backend cannot be had.
    """
    if not watched.notes.shadows:
        return []
    request = watched.request
    async with (
        watched.generator.open(
            request.prompt, n, request.sampling, 1, watched.cache_salt
        ) as session,
        watched.panel.open(request.prompt) as judges,
    ):
        following = _Following(watched, judges)
        _count_tokens(watched.kind, await session.extend(1))
        await session.prune(following.ids)
        for index, token in following.stops():
            ended = await session.extend(token)
            _count_tokens(watched.kind, ended)
            if ended.ended_by is RoundEnd.SLOTS_FULL:
                raise _GivenUp("slots")
            following.check(ended.candidates, index)
            await following.judge(ended.candidates, index)
            if following.is_over:
                break
        return following.sampled()


def _count_tokens(kind: Kind, ended: Round) -> None:
    made = sum(len(candidate.new_token_ids) for candidate in ended.candidates)
    metrics.add(names.SHADOW_TOKENS, made, **_labels(kind))


class _Following:
    """The shadows of one request on their way to their ends."""

    def __init__(self, watched: Watched, judges: PanelSession) -> None:
        self._notes = watched.notes
        self._max_tokens = watched.request.sampling.max_tokens
        self._judges = judges
        self._shadows = {shadow.candidate.id: shadow for shadow in watched.notes.shadows}
        self._later: dict[int, list[tuple[float, ...]]] = {number: [] for number in self._shadows}
        self._ends: dict[int, End] = {}

    @property
    def ids(self) -> set[int]:
        return set(self._shadows)

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return len(self._ends) == len(self._shadows)

    def stops(self) -> Iterator[tuple[int, int]]:
        """The run's decision tokens beyond the first token with their indices, then the end."""
        tokens = [decision.token for decision in self._notes.decisions]
        yield from ((i, token) for i, token in enumerate(tokens) if token > 1)
        yield len(tokens), self._max_tokens

    def check(self, candidates: Sequence[Candidate], index: int) -> None:
        """Whether those that were rejected at this decision token are who they were.

        Raises:
            _GivenUp: one is not, as where the shape of a batch changes the last bits (bfloat16 on
                a GPU).
        """
        found = {candidate.id: (candidate.text, candidate.finish) for candidate in candidates}
        due = [s.candidate for s in self._shadows.values() if s.round == index]
        if any(found.get(was.id) != (was.text, None) for was in due):
            raise _GivenUp("changed")

    async def judge(self, candidates: Sequence[Candidate], index: int) -> None:
        """Rewards of those beyond the decision token that rejected them; before it, they are known.

        Raises:
            SpecrejError: a reward cannot be had, or talks rubbish.
        """
        new = [c for c in candidates if c.finish or index > self._shadows[c.id].round]
        if not new:
            return
        ratings = await self._judges.rate(new)
        for candidate, values in zip(new, ratings.values, strict=True):
            if candidate.finish:
                self._ends[candidate.id] = End.of(candidate, values)
            else:
                self._later[candidate.id].append(values)

    def sampled(self) -> list[Sampled]:
        return [
            ended_after(self._notes, shadow, self._later[number], self._ends[number])
            for number, shadow in self._shadows.items()
        ]
