"""Shadows: rejected candidates that are run to their end, to measure what rejecting costs.

Of the candidates that a round rejects, one is drawn at random and represents all of them. After the
answer has left, it runs to its end in a session of its own. Draws are keyed by (seed, candidate,
step), so its text is the one it would have had; the request itself is neither changed nor delayed.
docs/telemetry.md has the formulas and their limits.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from orchestrator.background import BackgroundTasks
from orchestrator.loop.composition import Verdict
from orchestrator.loop.rejection import num_kept, rank
from orchestrator.loop.scoring import RequestScorer, judged
from specrej import telemetry
from specrej.contracts import (
    Algorithm,
    Candidate,
    FinishReason,
    Generation,
    GenerationRequest,
    Generator,
    Round,
    RoundEnd,
    Scorer,
    SessionSpec,
)
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed

ALPHAS = tuple(tenth / 10 for tenth in range(1, 10))  # that a recommendation is chosen from

_MAX_DECISIONS = 32  # of a request
# Candidates whose pairs are compared, the first ones: time grows with the square.
_MAX_COMPARED = 256
_WINDOW = 4096  # latest requests of a kind; about 1 KB each
_MAX_KINDS = 16
_MAX_NAMED = 8  # decision tokens in the name of a schedule

Values = tuple[float, ...]  # raw, one per reward


class Kind(NamedTuple):
    """What statistics are kept apart by: the labels of the metrics."""

    schedule: str
    reward: str

    @classmethod
    def of(cls, request: GenerationRequest) -> Kind:
        planned = request.selection.schedule
        match planned.kind:
            case "tokens":
                tokens = planned.tokens
                more = ",..." if len(tokens) > _MAX_NAMED else ""
                schedule = f"tokens {','.join(map(str, tokens[:_MAX_NAMED]))}{more}"
            case "geometric":
                schedule = f"geometric {planned.first}x{planned.factor:g}"
            case "memory":
                schedule = "memory"
        return cls(schedule, "+".join(reward.name for reward in request.selection.rewards))


class Shadow(NamedTuple):
    """A candidate as it was when it was rejected, and the index of that decision token."""

    candidate: Candidate
    decision: int
    weight: int  # candidates rejected there, this one included


@dataclass(slots=True)
class WatchedRun:
    """A request of the sampled share, and what its run records. Its rewards have names.

    `decisions` have the token and its label: the token itself or, where full slots ended a round,
    the last power of two. `partial` has each candidate's values at the decisions it grew through,
    `ends` its final ones and whether max_tokens cut it off. The candidates in `ends`, by weight,
    represent all candidates of the request, had none been rejected.
    """

    request: GenerationRequest
    generator: Generator
    scorers: Sequence[Scorer]
    cache_salt: str
    rng: random.Random
    decisions: list[tuple[int, int]] = field(default_factory=list)
    partial: defaultdict[int, list[Values]] = field(default_factory=lambda: defaultdict(list))
    shadows: dict[int, Shadow] = field(default_factory=dict)
    ends: dict[int, tuple[Values, bool]] = field(default_factory=dict)

    def take(self, ended: Round, raw: Mapping[int, Values], live: Collection[int]) -> None:
        """Record a round, the latest values of all candidates, and the ids that survive its cut."""
        growing = [c for c in ended.candidates if c.finish is None and c.id in raw]
        if rejected := [candidate for candidate in growing if candidate.id not in live]:
            drawn = self.rng.choice(rejected)
            self.shadows[drawn.id] = Shadow(drawn, len(self.decisions), len(rejected))
        if growing:
            token, is_planned = ended.num_tokens, ended.ended_by is RoundEnd.DECISION_TOKEN
            self.decisions.append((token, token if is_planned else 1 << token.bit_length() - 1))
        self.add_values((c, raw[c.id]) for c in ended.candidates if c.finish or c.id in raw)

    def add_values(self, values: Iterable[tuple[Candidate, Values]]) -> None:
        """Record the values of candidates at a decision, or at their end."""
        for candidate, raw in values:
            if candidate.finish:
                self.ends[candidate.id] = raw, candidate.finish is FinishReason.LENGTH
            else:
                self.partial[candidate.id].append(raw)

    async def run_shadows(self, n: int) -> str:
        """Run the shadows of this run of `n` candidates to their end; return why not, or "".

        Raises:
            SpecrejError: a backend failed.
        """
        prompt, sampling = self.request.prompt, self.request.sampling
        spec = SessionSpec(prompt, n, sampling, 1, self.cache_salt, adapter=self.request.model)
        opening = self.generator.open(spec)
        async with opening as session, RequestScorer(self.scorers, prompt) as scorer:
            self.count(names.SHADOW_TOKENS, (await session.extend(1)).num_new)
            await session.prune(set(self.shadows))
            stops = [*self.decisions, (sampling.max_tokens, 0)]
            for index, (token, _) in enumerate(stops):
                if token == 1 and len(stops) > index + 1:
                    continue
                ended = await session.extend(token)
                self.count(names.SHADOW_TOKENS, ended.num_new)
                if ended.ended_by is RoundEnd.SLOTS_FULL:
                    return "slots"
                # A text differs where a batch's shape changes the last bits (bfloat16 on a GPU).
                texts = {c.id: (c.text, c.finish) for c in ended.candidates}
                due = [s.candidate for s in self.shadows.values() if s.decision == index]
                if any(texts.get(candidate.id) != (candidate.text, None) for candidate in due):
                    return "changed"
                # Up to its rejection, the run has recorded the values of a shadow.
                new = [
                    c for c in ended.candidates if c.finish or index > self.shadows[c.id].decision
                ]
                if new:
                    self.add_values(zip(new, (await scorer.score(new)).values, strict=True))
                if self.shadows.keys() <= self.ends.keys():
                    break
        return ""

    def count(self, metric: names.Metric, count: int = 1, **labels: str) -> None:
        """Add to a counter of this kind of request."""
        metrics.add(metric, count, **Kind.of(self.request)._asdict(), **labels)


# Weighted pairs of candidates: concordant minus discordant ones; those that differ in their partial
# rewards; those that differ in their final rewards.
Pairs = tuple[float, float, float]


def pairs(candidates: Iterable[tuple[float, float, float]]) -> Pairs:
    """All pairs of (weight, partial reward, final reward).

    A pair weighs the product of its weights, as draws in two rounds are independent. Two candidates
    that were rejected in one round are never both drawn: the sum has no such pairs.
    """
    agreement = of_partial = of_final = 0.0
    for (weight, begun, ended), (weight_2, begun_2, ended_2) in combinations(candidates, 2):
        sign, sign_2 = (begun > begun_2) - (begun < begun_2), (ended > ended_2) - (ended < ended_2)
        agreement += weight * weight_2 * sign * sign_2
        of_partial += weight * weight_2 * abs(sign)
        of_final += weight * weight_2 * abs(sign_2)
    return agreement, of_partial, of_final


def tau_b(several: Iterable[Pairs]) -> float | None:
    """Kendall's rank correlation with ties (tau-b); None if all rewards of a side are equal."""
    agreement, partial, final = (math.fsum(column) for column in zip(*several, strict=True))
    possible = math.sqrt(partial * final)
    return agreement / possible if possible else None


class Observation(NamedTuple):
    """What one request shows."""

    pairs: Sequence[tuple[int, Pairs]]  # with the label of the decision token
    best_weight: int  # of the best candidate with an observed end
    max_weight: int  # of all of them: about one regret in so many is observed
    lost: Sequence[int]  # how many of `best_weight` the run rejected, then a replay with each alpha


def observe(run: WatchedRun) -> Observation:
    """What a run and its shadows show; at least one candidate has ended.

    Raises:
        RewardInvalid: a weighted sum is too large for a float.
    """
    rewards = run.request.selection.rewards
    raw = {number: values for number, (values, _) in run.ends.items()}
    weights = {n: run.shadows[n].weight if n in run.shadows else 1 for n in raw}
    final = judged(raw, rewards)
    is_last = run.request.selection.prefer_complete
    truncated = {
        number for number, (_, is_truncated) in run.ends.items() if is_last and is_truncated
    }
    vetoed = {number for number, verdict in final.items() if verdict.vetoed}
    best = rank({n: verdict.score for n, verdict in final.items()}, vetoed, truncated)[0]
    pairs_by_label: list[tuple[int, Pairs]] = []
    partial: list[Mapping[int, Verdict]] = []
    for index, (_, label) in enumerate(run.decisions[:_MAX_DECISIONS]):
        growing = {n: run.partial[n][index] for n in raw if index < len(run.partial[n])}
        verdicts = judged(raw | growing, rewards)
        compared = sorted(growing)[:_MAX_COMPARED]
        rows = ((weights[n], verdicts[n].score, final[n].score) for n in compared)
        pairs_by_label.append((label, pairs(rows)))
        partial.append(verdicts)
    # Once the best has ended it can be ranked out, and still be the answer.
    partial = partial[: len(run.partial[best])]
    least = run.request.selection.min_answers
    lost = [_num_lost(best, weights, partial, alpha, least) for alpha in ALPHAS]
    is_shadow = best in run.shadows
    most = max(weights.values())
    return Observation(pairs_by_label, weights[best], most, [weights[best] * is_shadow, *lost])


def _num_lost(
    best: int,
    weights: Mapping[int, int],
    partial: Sequence[Mapping[int, Verdict]],
    alpha: float,
    least: int,
) -> int:
    """Of the candidates that `best` represents, how many a run with this alpha rejects.

    The policy is replayed on the observed candidates, each of which counts by its weight.
    """
    standing = dict(weights)
    for verdicts in partial:
        vetoed = {number for number, verdict in verdicts.items() if verdict.vetoed}
        scores = {number: verdict.score for number, verdict in verdicts.items()}
        room = num_kept(sum(standing.values()), alpha, least)
        ranking = rank(scores, vetoed)
        first = next((number for number in ranking if standing[number]), None)
        for number in ranking:
            standing[number] = 0 if number in vetoed else min(standing[number], room)
            room -= standing[number]
        if first is not None and not any(standing.values()):  # a cut keeps one of vetoed ones
            standing[first] = 1
    return weights[best] - standing[best]


class Statistics:
    """Estimates from the latest requests of one kind, at least one.

    Any thread may read them while one adds to `latest`: a deque is copied in one operation.
    """

    def __init__(self, target_regret: float, window: int = _WINDOW) -> None:
        """`target_regret`: the share of requests that may lose their best candidate."""
        self.latest: deque[Observation] = deque(maxlen=window)
        self._target = target_regret

    def correlations(self) -> dict[int, float]:
        """Rank correlations of partial and final rewards, by decision token, ascending."""
        by_label: defaultdict[int, list[Pairs]] = defaultdict(list)
        for label, of_decision in (pair for shadow in list(self.latest) for pair in shadow.pairs):
            by_label[label].append(of_decision)
        taus = {label: tau_b(by_label[label]) for label in sorted(by_label)[:_MAX_DECISIONS]}
        return {label: tau for label, tau in taus.items() if tau is not None}

    def regrets(self) -> list[tuple[float, float]]:
        """Shares of requests that lose their best candidate, each with its standard error.

        The first one is of the requests as they were made, the others had each of `ALPHAS` been
        used. Hajek's estimator: the weights of the best candidates add up to about the number of
        requests, and to more where a shadow is the best of its sample but not of those it
        represents.
        """
        latest = list(self.latest)
        total = sum(shadow.best_weight for shadow in latest)
        estimates = []
        for lost in zip(*(shadow.lost for shadow in latest), strict=True):
            share = sum(lost) / total
            residuals = (gone - share * o.best_weight for gone, o in zip(lost, latest, strict=True))
            error = math.sqrt(math.fsum(residual**2 for residual in residuals)) / total
            estimates.append((share, error))
        return estimates

    def recommended_alpha(self) -> float | None:
        """The largest alpha up to which regret plus its error meets the target; 0 if none does.

        None: too few requests.
        """
        num_observed = math.fsum(1 / shadow.max_weight for shadow in list(self.latest))
        if num_observed < 3 / self._target:
            return None  # by the rule of three, with 95 % confidence
        recommended = 0.0
        for alpha, (regret, error) in zip(ALPHAS, self.regrets()[1:], strict=True):
            if regret + error > self._target:
                break
            recommended = alpha
        return recommended


class Shadows:
    """Watches a share of the requests and runs their shadows, of one request at a time."""

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

        Shadows that take longer than `deadline_s` seconds are given up. `rng` draws requests and
        shadows.
        """
        self.statistics: dict[Kind, Statistics] = {}
        self._target_regret = target_regret
        self._share = share
        self._max_slots = max_slots
        self._rng = rng or random.Random()
        self.tasks = BackgroundTasks("running shadows", deadline_s=deadline_s)
        if share:
            self._expose(names.SHADOW_CORRELATION, Statistics.correlations)
            self._expose(names.SHADOW_REGRET, lambda known: {None: known.regrets()[0][0]})
            self._expose(names.SHADOW_ALPHA, lambda known: {None: known.recommended_alpha()})

    def watch(
        self,
        request: GenerationRequest,
        generator: Generator,
        scorers: Sequence[Scorer],
        cache_salt: str,
    ) -> WatchedRun | None:
        """A run to record, if the request is in the sampled share.

        Best-of-N rejects nothing, and forks are not candidates that a session begins with.
        """
        selection = request.selection
        if selection.algorithm is Algorithm.BEST_OF_N or selection.branching:
            return None
        if self._rng.random() >= self._share:
            return None
        kind = Kind.of(request)
        if kind not in self.statistics and len(self.statistics) >= _MAX_KINDS:
            return None
        self.statistics.setdefault(kind, Statistics(self._target_regret))
        return WatchedRun(request, generator, scorers, cache_salt, self._rng)

    def follow(self, run: WatchedRun, generation: Generation, *, is_busy: bool) -> None:
        """Start the shadows of an answered request, unless requests wait (`is_busy`)."""
        # All shadows of a request or none: a round without its shadow would bias the estimates.
        rows = len(run.shadows) * run.request.sampling.max_tokens
        if generation.degraded or generation.hurried:
            reason = "weaker"  # a failure or the deadline rejected candidates, not the reward
        elif is_busy or self.tasks.num_running:
            reason = "busy"
        elif generation.usage.prompt_tokens + max(generation.n, rows) > self._max_slots:
            reason = "slots"
        else:
            self.tasks.start("shadows", lambda: self.learn_from(run, generation.n))
            return
        run.count(names.SHADOW_GIVEN_UP, reason=reason)

    async def learn_from(self, run: WatchedRun, n: int) -> None:
        """Run the shadows of an answered request of `n` candidates to their end.

        Raises:
            SpecrejError: a backend failed.
        """
        kind = Kind.of(run.request)
        attributes = {names.SCHEDULE: kind.schedule, names.REWARDS: kind.reward}
        with telemetry.span(names.SPAN_SHADOWS, attributes):
            try:
                if run.shadows and (reason := await run.run_shadows(n)):
                    run.count(names.SHADOW_GIVEN_UP, reason=reason)
                    return
                # In a thread: with hundreds of candidates it would block the event loop.
                observation = await asyncio.to_thread(observe, run)
            except BaseException:
                run.count(names.SHADOW_GIVEN_UP, reason="failed")
                raise
        self.statistics[kind].latest.append(observation)
        run.count(names.SHADOW_REQUESTS)
        run.count(names.SHADOW_REGRETS, int(observation.lost[0] > 0))

    def _expose(
        self,
        metric: names.Metric,
        read: Callable[[Statistics], Mapping[int, float] | Mapping[None, float | None]],
    ) -> None:
        """Observe a gauge of every kind, by decision token or with one value."""

        def values() -> Iterator[Observed]:
            for kind, known in list(self.statistics.items()):
                for token, value in read(known).items() if known.latest else ():
                    labels = {} if token is None else {"decision_token": token}
                    if value is not None:
                        yield value, {**kind._asdict(), **labels}

        metrics.observe(metric, values)
