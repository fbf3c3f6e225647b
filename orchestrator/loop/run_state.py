"""The candidates of one request: their prefixes, scores, verdicts and fates, and its rounds.

The run loop updates the state after every round. The state makes no decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TypeAlias

from orchestrator.loop import rejection
from orchestrator.loop.composition import LIKELIHOOD, Verdict, combine, is_vetoed
from orchestrator.loop.scoring import RawScores, fingerprint_of
from orchestrator.loop.stopping import confidence, least_confidence, threshold
from orchestrator.loop.votes import Ballot, Choice, tally, vote_of_calls
from specrej import contracts as c
from specrej.answer_form import answer_text, is_malformed, parts_of
from specrej.contracts.errors import DeadlineExceeded, InternalError

# Candidates in the rounds of one answer, about 100 bytes each. A round beyond that is traced
# without its candidates.
MAX_TRACED = 16_384
# Forks of one answer: each stays in memory, and those that finish with their texts.
MAX_FORKS = 16_384
_MAX_VOTES, _MAX_VOTE = 64, 256  # answers of a vote in a reply, and characters of each

# What a complete answer votes for; None: nothing.
Extract: TypeAlias = Callable[[str], str | None]


@dataclass(slots=True)
class Row:
    """One candidate. A finished one that is ranked out can still be the answer: it holds no slots.

    `raw` has one value per reward, NaN where it has not scored. `verdict` is of the last decision
    token, by the rewards that count in cuts; `final`, once it has ended, by those that choose the
    answer. `inherited`: the tokens that a fork has from its `parent`. `drawn`: its rounds, if the
    request has logprobs; forks share them with their parent. `confidences`: of each step, if the
    request uses them. `parts` are those of its text, once it has ended; `is_invalid`: it is no
    answer that the prompt allows, which counts as a veto.
    """

    latest: c.Candidate
    raw: tuple[float, ...] = ()
    verdict: Verdict | None = None
    final: Verdict | None = None
    is_ranked_out: bool = False
    parent: int | None = None
    inherited: int = 0
    drawn: tuple[c.Candidate, ...] = ()
    parts: c.AnswerParts | None = None
    is_invalid: bool = False
    confidences: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether it has ended by itself, is scored, and no reward vetoes it."""
        is_scored = self.final is not None and not self.final.vetoed
        return is_scored and self.latest.finish is c.FinishReason.STOP

    @property
    def has_ended(self) -> bool:
        return self.latest.finish is not None

    @property
    def is_live(self) -> bool:
        return self.latest.finish is None and not self.is_ranked_out

    @property
    def is_vetoed(self) -> bool:
        verdict = self.verdict or self.final
        return verdict is not None and verdict.vetoed

    @property
    def is_truncated(self) -> bool:
        return self.latest.finish is c.FinishReason.LENGTH


@dataclass(slots=True)
class RunState:
    """All candidates of one request, by ascending id, and its rounds."""

    n: int
    prompt_tokens: int
    rewards: tuple[c.WeightedReward, ...]
    form: c.AnswerForm = c.PLAIN
    keeps_tokens: bool = False  # for the log-probabilities of the answers
    keeps_confidences: bool = False
    vote: c.Vote | None = None
    extract: Extract = lambda _: None  # what a text votes for
    prefer_complete: bool = False  # whether a truncated answer ranks behind all complete ones
    reduced: bool = False
    generator_fingerprint: str = ""
    open_ms: float = 0.0
    first_round_ms: float = 0.0
    hurried: bool = False
    compare: frozenset[int] = frozenset()  # rewards that compare the candidates of a batch only
    num_tokens: int = 0  # of every live candidate
    num_started: int = 0  # live when the latest round began
    num_generated: int = 0  # tokens of the latest round
    prefilled_tokens: int = 0
    discarded_tokens: int = 0
    next_id: int = 0  # of the next fork; ids of forks without room are not used again
    reward_tokens: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    rounds: list[c.RoundTrace] = field(default_factory=list)
    degradations: list[c.Degradation] = field(default_factory=list)
    judged_by: set[tuple[str, ...]] = field(default_factory=set)  # fingerprints of all rewards
    wave: int = 0
    num_first: int = 0  # candidates of the first wave
    stopped_by: c.StopReason | None = None
    _token_texts: dict[int, bytes] = field(default_factory=dict)
    _num_traced: int = 0  # candidates and forks in `rounds`
    _votes: dict[int, str | None] = field(default_factory=dict)  # of complete candidates

    def begin_wave(self, ids: range) -> None:
        """Add candidates without tokens."""
        self.rows |= {number: Row(c.Candidate(number, "", 0, 0.0)) for number in ids}
        self.next_id = ids.stop
        self.num_tokens = 0
        self.wave += 1
        self.num_first = self.num_first or len(ids)

    @property
    def live(self) -> set[int]:
        # Without properties of rows: there may be 16,384, most of them ranked out.
        return {
            number
            for number, row in self.rows.items()
            if not row.is_ranked_out and row.latest.finish is None
        }

    @property
    def ranked(self) -> set[int]:
        """Those in the ranking that the next cut divides, finished or live."""
        rows = self.rows.items()
        return {number for number, row in rows if not row.is_ranked_out and row.verdict}

    @property
    def ended(self) -> set[int]:
        """The finished candidates, ranked out or not."""
        return {number for number, row in self.rows.items() if row.latest.finish}

    @property
    def vetoed(self) -> set[int]:
        return {number for number, row in self.rows.items() if row.is_vetoed}

    @property
    def has_answer(self) -> bool:
        """Whether there is a complete answer that no reward vetoes."""
        return any(row.is_complete for row in self.rows.values())

    @property
    def num_left(self) -> int:
        """Candidates that are live, or have not begun."""
        return len(self.live) + self.n - sum(row.parent is None for row in self.rows.values())

    def take(self, ended: c.Round) -> None:
        """Add the tokens of a round.

        Raises:
            InternalError: a live candidate is missing, without which the loop might never end, or
                one of the round's candidates is not live.
        """
        live, sent = self.live, {candidate.id for candidate in ended.candidates}
        if missing := live - sent:
            raise InternalError(f"the generator lost {len(missing)} candidates")
        if foreign := sent - live:
            raise InternalError(f"the generator sent {len(foreign)} candidates that are not live")
        self.num_started = len(live)
        self.prompt_tokens = self.prompt_tokens or ended.prompt_tokens
        self.num_tokens = max(self.num_tokens, ended.num_tokens)
        self.num_generated = 0
        self.prefilled_tokens += ended.prefilled_tokens
        for candidate in ended.candidates:
            row = self.rows[candidate.id]
            self.num_generated += candidate.num_tokens - row.latest.num_tokens
            row.latest = candidate
            if self.keeps_confidences:
                row.confidences.extend(_confidences(candidate))
            if self.keeps_tokens:
                row.drawn = (*row.drawn, replace(candidate, text=""))
        if self.keeps_tokens:
            self._token_texts.update((text.token_id, text.token) for text in ended.token_texts)

    def divide(self, row: Row) -> None:
        """Find the parts of a candidate that has ended. A malformed call makes it invalid, and so
        does reasoning without an answer after it."""
        text, form = row.latest.text, self.form
        is_whole = row.latest.finish is not None
        row.parts = parts = parts_of(text, form, complete=is_whole, candidate=row.latest.id)
        if parts:
            is_empty = parts.reasoning and not (parts.content or parts.tool_calls)
            row.is_invalid = bool(is_empty) or is_malformed(parts, form)

    def judge(self, candidates: Sequence[c.Candidate], scored: RawScores) -> None:
        """Store the raw scores of these candidates, and compute all verdicts that depend on them. A
        reward that has not scored a candidate leaves its former value.

        Other finished candidates keep theirs. After a fallback the likelihood replaces them all.

        Raises:
            RewardInvalid: a weighted sum is not finite.
        """
        self.compare = frozenset() if scored.is_fallback else self.compare | scored.compare
        if scored.is_fallback and c.Degradation.REWARD not in self.degradations:
            self.degradations.append(c.Degradation.REWARD)
            self.rewards = (c.WeightedReward(LIKELIHOOD),)
            self.judged_by.clear()
            for row in self.rows.values():
                row.raw, row.verdict, row.final = (row.latest.mean_logprob,), None, None
        if scored.fingerprints:
            self.judged_by.add(scored.fingerprints)
        for candidate, values in zip(candidates, scored.values, strict=True):
            row = self.rows[candidate.id]
            row.raw = _merged(row.raw, values)
            row.verdict = row.final = None
        self._decide()
        self.reward_tokens += scored.computed_tokens

    def _decide(self) -> None:
        """Compute the verdicts that are missing; all of them, where they depend on each other."""
        anew = {
            number: row
            for number, row in self.rows.items()
            if (self._is_relative or not row.verdict or (row.latest.finish and not row.final))
            and row.raw
            and (row.latest.finish or not row.is_ranked_out)
        }
        of_cuts = self._combined(anew, "end")
        for number, row in anew.items():
            row.verdict = of_cuts.get(number)
        if not self._has_stages:
            of_answers = of_cuts
        else:
            of_answers = self._combined({n: r for n, r in anew.items() if r.has_ended}, "cuts")
        for number, row in anew.items():
            row.final = of_answers.get(number) if row.has_ended else None

    def _combined(self, rows: Mapping[int, Row], without: str) -> dict[int, Verdict]:
        """Verdicts by the rewards of other stages than `without`, of the rows that all of them have
        scored, and of vetoed ones by those that have. Any reward vetoes, and invalid ones are."""
        uses = [i for i, reward in enumerate(self.rewards) if reward.stage != without]
        values = {number: [row.raw[i] for i in uses] for number, row in rows.items()}
        scored = {n: of for n, of in values.items() if of and not any(map(math.isnan, of))}
        verdicts = combine(scored, [self.rewards[i] for i in uses])
        for number, row in rows.items():
            if row.is_invalid or is_vetoed(row.raw, self.rewards):
                verdict = verdicts.get(number)
                verdicts[number] = Verdict(verdict.score if verdict else 0.0, vetoed=True)
        return verdicts

    def scores(self, numbers: Iterable[int]) -> dict[int, float]:
        """Scores of those with a verdict, as of the last decision token."""
        verdicts = ((number, self.rows[number].verdict) for number in numbers)
        return {number: verdict.score for number, verdict in verdicts if verdict}

    def ranking(self, numbers: Iterable[int]) -> list[int]:
        """Those with a verdict, best first, as of the last decision token."""
        return self._ranked(self.scores(numbers))

    def answers(self) -> list[int]:
        """The candidates that have ended and are scored, best first by their final scores. With a
        vote the best voter of each answer comes first, the answers by their weight."""
        rows = ((number, self.rows[number].final) for number in self.ended)
        ranked = self._ranked({number: final.score for number, final in rows if final})
        elected = [choice.best for choice in self.choices()]
        return list(dict.fromkeys([*elected, *ranked]))

    def choices(self) -> list[Choice]:
        """The votes so far; empty without a vote."""
        if not self.vote:
            return []
        ballots = []
        for number, row in self.rows.items():
            if not (row.is_complete and row.final):
                continue
            if number not in self._votes:
                self._votes[number] = self._vote_of(row)
            if (answer := self._votes[number]) is not None:
                ballots.append(Ballot(number, answer, _weight(self.vote, row), row.final.score))
        return tally(ballots)

    def _vote_of(self, row: Row) -> str | None:
        """By the parsed calls, if the prompt has tools, and else by its text without reasoning."""
        is_by_calls = self.vote and self.vote.extractor == "tool_call" and self.form.tool_format
        try:
            if row.parts and is_by_calls:
                return vote_of_calls(row.parts.tool_calls)
            return self.extract(answer_text(row.latest.text, self.form))
        except RecursionError:  # of JSON that is nested too deep to be written again
            return None

    def unconfident(self, cut: c.ConfidenceCut) -> set[int]:
        """Live candidates of a later wave that are less confident than the first wave's threshold.
        None of fewer tokens than a window."""
        if self.wave < 2 or self.num_tokens < cut.window:
            return set()

        def least(number: int) -> float:
            return least_confidence(self.rows[number].confidences, cut.window)

        first = [least(n) for n in range(self.num_first) if self.rows[n].has_ended]
        lowest = threshold(first, cut.keep)
        return {n for n in self.live if least(n) < lowest}

    def _ranked(self, scores: Mapping[int, float]) -> list[int]:
        vetoed = {number for number in scores if self.rows[number].is_vetoed}
        truncated = {n for n in scores if self.prefer_complete and self.rows[n].is_truncated}
        return rejection.rank(scores, vetoed, truncated)

    def cut_short(self, *, may_degrade: bool) -> None:
        """End live candidates here, truncated, and drop forks without tokens of their own.

        Raises:
            DeadlineExceeded: `may_degrade` is not set, or there is no text yet.
        """
        if not may_degrade or not self.num_tokens:
            raise DeadlineExceeded("too few answers were complete before the deadline")
        self.degradations.append(c.Degradation.DEADLINE)
        for row in self.rows.values():
            if not row.is_live:
                continue
            if row.parent is not None and row.latest.num_tokens == row.inherited:
                row.is_ranked_out = True
                continue
            row.latest = replace(row.latest, finish=c.FinishReason.LENGTH)
            # Scores of the last decision token; before the first one, the likelihood.
            row.raw = row.raw or (row.latest.mean_logprob,) * len(self.rewards)
            row.final = row.verdict or Verdict(row.latest.mean_logprob, vetoed=False)
            self.divide(row)
            if row.is_invalid or (row.parts and row.parts.tool_calls):  # which were not checked
                row.is_invalid, row.final = True, replace(row.final, vetoed=True)
            row.verdict = row.final

    def keep(self, kept: Collection[int]) -> None:
        """Remove all others from the ranking, and the texts of live ones among them."""
        for number, row in self.rows.items():
            if number in kept or row.is_ranked_out:
                continue
            if row.is_live:
                row.latest = c.Candidate(number, "", row.latest.num_tokens, row.latest.logprob)
                row.drawn = ()
            row.is_ranked_out = True

    def fork(self, forks: c.Forks) -> None:
        """Add new live candidates, which continue others: their texts, tokens and values so far."""
        for number, parent in forks.items():
            of = self.rows[parent]
            latest, inherited = replace(of.latest, id=number), of.latest.num_tokens
            self.rows[number] = replace(
                of, latest=latest, parent=parent, inherited=inherited, confidences=[*of.confidences]
            )

    def best_text(self) -> str:
        """The text with the highest score so far, finished or live; vetoed only if all are."""
        best = self._best()
        return self.rows[best].latest.text if best is not None else ""

    def trace(
        self,
        ended: c.Round,
        freed: int,
        times_s: Sequence[float],
        alpha: float,
        forks: c.Forks,
        *,
        is_check: bool = False,
    ) -> c.RoundTrace:
        """The record of a round. `times_s`: its begin, and the ends of extend, score and prune."""
        candidates, num_live, best = ended.candidates, len(self.live), self._best()
        num_finished = sum(candidate.finish is not None for candidate in candidates)
        extend_ms, score_ms, prune_ms = ((end - begin) * 1e3 for begin, end in pairwise(times_s))
        has_room = self._num_traced + len(candidates) + len(forks) <= MAX_TRACED
        fates = self._fates(candidates) if has_room else ()
        made = tuple(c.Fork(*fork) for fork in sorted(forks.items())) if has_room else ()
        self._num_traced += len(fates) + len(made)
        trace = c.RoundTrace(
            number=len(self.rounds) + 1,
            decision_token=ended.num_tokens,
            ended_by=ended.ended_by,
            num_started=self.num_started,
            num_finished=num_finished,
            num_rejected=self.num_started - num_finished - num_live + len(forks),
            num_live=num_live,
            best_score=0.0 if best is None else self._score_of(best),
            session_slots=ended.slots.session,
            freed_slots=freed,
            capacity_slots=ended.slots.capacity,
            generated_tokens=self.num_generated,
            extend_ms=extend_ms,
            score_ms=score_ms,
            prune_ms=prune_ms,
            num_vetoed=sum(not one.finish and self.rows[one.id].is_vetoed for one in candidates),
            alpha=alpha,
            candidates=fates,
            forks=made,
            wave=self.wave,
            is_check=is_check,
        )
        self.rounds.append(trace)
        return trace

    def generation(self, num_candidates: int, total_ms: float) -> c.Generation:
        """The answer, with the best candidates, and what it took."""
        chosen = tuple(map(self._answer, self.answers()[:num_candidates]))
        choices = self.choices()
        total = math.fsum(choice.weight for choice in choices) or 1.0
        return c.Generation(
            candidates=chosen,
            rounds=tuple(self.rounds),
            usage=self._usage(chosen[0].num_tokens),
            timings=c.Timings(
                total_ms=total_ms,
                open_ms=self.open_ms,
                extend_ms=sum(trace.extend_ms for trace in self.rounds),
                score_ms=sum(trace.score_ms for trace in self.rounds),
                prune_ms=sum(trace.prune_ms for trace in self.rounds),
                first_round_ms=self.first_round_ms,
            ),
            n=self.n,
            generator_fingerprint=self.generator_fingerprint,
            # Several are joined: a reward has moved to a service of another version.
            reward_fingerprint="+".join(
                sorted(fingerprint_of(self.rewards, judges) for judges in self.judged_by)
            ),
            degradations=tuple(self.degradations),
            hurried=self.hurried,
            reduced=self.reduced,
            relative_scores=bool(self.compare) or self._is_relative,
            stopped_by=self.stopped_by,
            votes=tuple(
                c.VoteShare(choice.answer[:_MAX_VOTE], choice.weight / total, choice.count)
                for choice in choices[:_MAX_VOTES]
            ),
            num_distinct=len(choices),
            num_begun=sum(row.parent is None for row in self.rows.values()),
        )

    @property
    def _is_relative(self) -> bool:
        """Whether a verdict depends on the other candidates' values."""
        return any(reward.normalization.kind == "batch" for reward in self.rewards)

    @property
    def _has_stages(self) -> bool:
        return any(reward.stage != "both" for reward in self.rewards)

    def _best(self) -> int | None:
        if not (self._has_stages or self.vote):
            rows = self.rows.items()
            scored = (n for n, row in rows if not row.is_ranked_out or row.latest.finish)
            return next(iter(self.ranking(scored)), None)
        # Final scores and those of cuts do not compare.
        return next(iter(self.answers() or self.ranking(self.live)), None)

    def _score_of(self, number: int) -> float:
        verdict = self.rows[number].final or self.rows[number].verdict
        assert verdict
        return verdict.score

    def _fates(self, candidates: Sequence[c.Candidate]) -> tuple[c.CandidateTrace, ...]:
        """Scores and fates of a round's candidates after its cut, best first."""
        lengths = {candidate.id: candidate.num_tokens for candidate in candidates}
        judged = (n for n in lengths if self.rows[n].final or self.rows[n].verdict)
        scores = {number: self._score_of(number) for number in judged}
        return tuple(
            c.CandidateTrace(number, scores[number], self._fate(self.rows[number]), lengths[number])
            for number in self._ranked(scores)
        )

    def _fate(self, row: Row) -> c.Fate:
        if row.has_ended:
            return c.Fate.FINISHED
        if row.is_live:
            return c.Fate.KEPT
        return c.Fate.VETOED if row.is_vetoed else c.Fate.REJECTED

    def _answer(self, number: int) -> c.RankedCandidate:
        row, texts = self.rows[number], self._token_texts
        candidate, verdict, vote = row.latest, row.final, self._votes.get(number)
        assert candidate.finish and verdict
        token_ids = tuple(chain.from_iterable(part.new_token_ids for part in row.drawn))
        return c.RankedCandidate(
            id=number,
            text=candidate.text,
            score=verdict.score,
            finish=candidate.finish,
            num_tokens=candidate.num_tokens,
            mean_logprob=candidate.mean_logprob,
            rewards=row.raw,
            vetoed=verdict.vetoed,
            token_ids=token_ids,
            logprobs=tuple(chain.from_iterable(part.new_logprobs for part in row.drawn)),
            tokens=tuple(texts.get(token_id, b"") for token_id in token_ids),
            top_logprobs=tuple(top for part in row.drawn for top in _top_logprobs(part, texts)),
            vote=vote and vote[:_MAX_VOTE],
            parts=self._parts(row),
            stop_text=candidate.stop_text,
        )

    def _parts(self, row: Row) -> c.AnswerParts | None:
        """Those of the text; calls that are not valid are content."""
        if not (row.parts and row.is_invalid and row.parts.tool_calls):
            return row.parts
        return c.AnswerParts(answer_text(row.latest.text, self.form), row.parts.reasoning)

    def _usage(self, answer_tokens: int) -> c.Usage:
        rows = self.rows.values()
        lengths = [row.latest.num_tokens for row in rows if row.has_ended]
        mean_ended = sum(lengths) / len(lengths)
        begun = [row for row in rows if row.parent is None]
        estimate = (self.n - len(begun)) * mean_ended + sum(
            row.latest.num_tokens if row.has_ended else max(row.latest.num_tokens, mean_ended)
            for row in begun
        )
        return c.Usage(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=sum(row.latest.num_tokens - row.inherited for row in rows),
            answer_tokens=answer_tokens,
            reward_tokens=self.reward_tokens,
            freed_slots=sum(trace.freed_slots for trace in self.rounds),
            best_of_n_tokens_estimate=round(estimate),
            prefilled_tokens=self.prefilled_tokens,
            discarded_tokens=self.discarded_tokens,
        )


def _top_logprobs(part: c.Candidate, texts: Mapping[int, bytes]) -> Iterator[c.TopLogprobs]:
    """The most probable tokens at each step of a round, if the sampling has `top_logprobs`."""
    pairs = zip(part.new_top_token_ids, part.new_top_logprobs, strict=False)
    tokens = [c.TokenLogprob(i, texts.get(i, b""), value) for i, value in pairs]
    count = max(1, len(tokens) // max(1, len(part.new_token_ids)))
    for at in range(0, len(tokens), count):
        yield c.TopLogprobs(tuple(tokens[at : at + count]))


def _merged(before: Sequence[float], values: Sequence[float]) -> tuple[float, ...]:
    """The values, and the former ones where these are NaN."""
    if len(before) != len(values):
        return tuple(values)
    return tuple(old if math.isnan(new) else new for old, new in zip(before, values, strict=True))


def _weight(vote: c.Vote, row: Row) -> float:
    match vote.weight:
        case "reward":
            return max(0.0, row.final.score) if row.final else 0.0
        case "confidence":
            return max(0.0, math.fsum(row.confidences) / max(1, len(row.confidences)))
        case _:
            return 1.0


def _confidences(candidate: c.Candidate) -> Iterator[float]:
    """Of each new step, by the most probable tokens that it has."""
    top, steps = candidate.new_top_logprobs, max(1, len(candidate.new_token_ids))
    width = len(top) // steps
    for at in range(0, len(top), max(1, width)):
        yield confidence(top[at : at + width])
