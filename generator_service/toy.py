"""A test double that ships: a generator of deterministic words with real slot accounting.

Every token is a hash of (seed, candidate, step), so a survivor's text never depends on its
neighbours. Of the sampling it follows ends, stop tokens and log-probabilities, ignores what would
change the draws, and refuses structured outputs. No model, no torch; a session that does not fit
is refused and never waits. Options make its steps slow or fail, so that tests can interrupt a
request under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from generator_service.admission import AdmissionQueue, Demand
from generator_service.engine.commands import (
    GrowingCandidate,
    Load,
    OnStep,
    ReportRate,
    Step,
    named_tokens,
)
from specrej.contracts import (
    NO_FORKS,
    PLAIN,
    FinishReason,
    Forks,
    GeneratorDescription,
    Pruned,
    Report,
    Round,
    RoundEnd,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.contracts.validation import refuse_images
from specrej_models.slots import SlotLedger

# Of different lengths, so that texts shifted by a word are noticed.
_WORDS = ("ash", "birch", "clouds", "delta", "elm", "fjords", "grove", "heather")
_IDS = range(len(_WORDS))
_TOKENS = [f" {word}".encode() for word in _WORDS]
_FAILING_STEP = 10
_AUTO_CANDIDATES = 8
_CONTEXT_TOKENS = 4096


class _Words:
    """A `GrowingText`; words of `left_out` are no part of it."""

    def __init__(self, left_out: Collection[int], text: str = "") -> None:
        self._left_out = left_out
        self._text = text

    def grown(self, token_ids: Sequence[int], finish: FinishReason | None) -> str:
        words = [_WORDS[word] for word in token_ids if word not in self._left_out]
        self._text = " ".join([self._text, *words] if self._text else words)
        return self._text

    def copy(self) -> _Words:
        return _Words(self._left_out, self._text)


class ToySession:
    """A `Session` of words."""

    fingerprint = ""  # the servicer has the generator's
    costly_rounds = False
    answer_form = PLAIN

    def __init__(self, generator: ToyGenerator, session_id: int, spec: SessionSpec) -> None:
        self.id = session_id
        self.n, self.reduced = 0, False  # until it is admitted
        text = spec.prompt.text or " ".join(message.text for message in spec.prompt.messages)
        self.prompt_tokens = max(1, len(text.split()))
        self._sampling = spec.sampling_after(self.prompt_tokens, _CONTEXT_TOKENS)
        self.max_tokens = self._sampling.max_tokens
        first, longest = spec.first_round_tokens, self.max_tokens
        self._first_id = spec.first_id
        self.demand = Demand(spec.n, self.prompt_tokens, first, longest, lambda tokens: tokens)
        self._generator = generator
        self._ledger = generator.ledger
        self._live: list[GrowingCandidate] = []
        self._unreported: list[GrowingCandidate] = []
        self._num_tokens = 0
        self._rate = ReportRate()

    def begin(self, n: int, *, reduced: bool) -> None:
        """It is admitted with `n` candidates."""
        self.n, self.reduced = n, reduced
        words = _Words(self._sampling.stop_token_ids)
        ids = range(self._first_id, self._first_id + n)
        self._live = [GrowingCandidate(number, text=words.copy()) for number in ids]
        self._unreported = list(self._live)

    async def extend(self, until_tokens: int, report: Report | None = None) -> Round:
        until = min(until_tokens, self.max_tokens)
        ended_by = RoundEnd.DECISION_TOKEN
        while self._live and self._num_tokens < until:
            if self._ledger.room_of(self.id) < len(self._live):
                ended_by = RoundEnd.SLOTS_FULL
                break
            if step_s := self._generator.step_s:
                await asyncio.sleep(step_s)
            rows = len(self._live)
            self._step()
            self._generator.on_step(Step(step_s, rows, generated=rows))
            if report and self._live and self._num_tokens < until and self._rate.is_due():
                grown = self._live if len(self._unreported) == 1 else ()
                report(self._round(grown, num_live=len(self._live)))
        ended = self._round(self._unreported, ended_by if self._live else RoundEnd.ALL_FINISHED)
        self._unreported = list(self._live)
        return ended

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        live = {candidate.id: candidate for candidate in self._live}
        survivors = [live[number] for number in live if number in keep]
        freed = (len(live) - len(survivors)) * self._num_tokens
        self._ledger.give_back(self.id, freed)
        made = self._generator.queue.with_room(self, forks, live, len(survivors), self._num_tokens)
        self._ledger.take(self.id, len(made) * self._num_tokens)
        self._live = [*survivors, *(live[parent].fork(number) for number, parent in made.items())]
        self._unreported = list(self._live)
        return Pruned(freed, self._gauge(), tuple(sorted(forks.keys() - made.keys())))

    def _step(self) -> None:
        failing = self._generator.failing_seed, _FAILING_STEP
        if (self._sampling.seed, self._num_tokens) == failing:
            raise RuntimeError("the toy fails at its failing_seed")
        self._ledger.take(self.id, len(self._live))
        for candidate in self._live:
            self._draw(candidate)
        self._num_tokens += 1
        finished = sum(candidate.finish is not None for candidate in self._live)
        self._ledger.give_back(self.id, finished * self._num_tokens)
        self._live = [candidate for candidate in self._live if candidate.finish is None]

    def _draw(self, candidate: GrowingCandidate) -> None:
        sampling, step = self._sampling, self._num_tokens
        key = f"{sampling.seed}/{candidate.id}/{step}".encode()
        draw = int.from_bytes(hashlib.sha256(key).digest()[:8])
        stops = sampling.stop_token_ids
        words = [w for w in _IDS if w not in stops or step >= sampling.min_tokens] or _IDS
        word, logprob = words[draw % len(words)], -(draw % 1000) / 500
        candidate.append(word, logprob)
        if sampling.top_logprobs:
            ids = sorted(_IDS, key=lambda other: other != word)[: sampling.top_logprobs]
            candidate.new_top.append((ids, [logprob - rank for rank in range(len(ids))]))
        may_end = not sampling.ignore_eos and step >= sampling.min_tokens
        if word in stops or (may_end and draw // 1000 % self._generator.end_every == 0):
            candidate.finish = FinishReason.STOP
        elif step + 1 == sampling.max_tokens:
            candidate.finish = FinishReason.LENGTH

    def _round(
        self,
        grown: Sequence[GrowingCandidate],
        ended_by: RoundEnd = RoundEnd.DECISION_TOKEN,
        num_live: int = 0,
    ) -> Round:
        has_logprobs, position = self._sampling.logprobs, (self._num_tokens, self._gauge())
        candidates = tuple(one.report().candidate(logprobs=has_logprobs) for one in grown)
        tokens = named_tokens(candidates, _TOKENS.__getitem__) if has_logprobs else ()
        return Round(candidates, ended_by, *position, tokens, num_live=num_live)

    def _gauge(self) -> SlotGauge:
        own = self.prompt_tokens + self._ledger.owned_by(self.id)
        return SlotGauge(self._ledger.capacity, self._ledger.owned, own)


class ToyGenerator:
    """A `Generator` of words; about one token in `end_every` ends its candidate.

    A step of a session takes `step_s` seconds, independent of other sessions. `failing_seed`: a
    session with this seed fails at its eleventh step.
    """

    def __init__(
        self,
        capacity_slots: int = 100_000,
        *,
        end_every: int = 40,
        step_s: float = 0.0,
        failing_seed: int | None = None,
        on_step: OnStep = lambda _: None,
    ) -> None:
        self.ledger = SlotLedger(capacity_slots)
        self.end_every = end_every
        self.step_s = step_s
        self.failing_seed = failing_seed
        self.on_step = on_step
        self._ids = itertools.count(1)
        self.queue: AdmissionQueue[ToySession] = AdmissionQueue(
            self.ledger, self._admit, max_waiting=0, auto_candidates=_AUTO_CANDIDATES
        )

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[ToySession]:
        await self.check(spec)
        session = ToySession(self, next(self._ids), spec)
        self.queue.enter(session)  # admitted or refused: none may wait
        self.on_step(Step(prefilled=session.prompt_tokens))
        try:
            yield session
        finally:
            self.ledger.close(session.id)
            self.ledger.retire(session.prompt_tokens)
            self.ledger.evict(session.prompt_tokens)

    async def check(self, spec: SessionSpec) -> None:
        refuse_images(spec.prompt)
        if spec.sampling.structured_output:
            refused = "is not supported: the toy has no tokenizer"
            raise InvalidRequest([Violation("sampling.structured_output", refused)])

    def _admit(self, session: ToySession, n: int) -> None:
        self.ledger.hold(session.prompt_tokens)
        self.queue.give_share(session, n)
        session.begin(n, reduced=self.queue.is_reduced(session, n))

    def load(self) -> Load:
        """Slots and sessions as of now."""
        slots = SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return Load(slots, self.ledger.num_sessions, 0)

    async def describe(self) -> GeneratorDescription:
        load = self.load()
        return GeneratorDescription(
            model="toy",
            fingerprint=f"toy-{self.end_every}",
            context_tokens=_CONTEXT_TOKENS,
            max_candidates=1024,
            auto_candidates=_AUTO_CANDIDATES,
            vocabulary=len(_WORDS),
            slot_bytes=1,
            device="none",
            slots=load.slots,
            sessions=load.sessions,
            can_fork=True,
        )


def is_toy(model: str) -> bool:
    """Whether a model's name is a toy's, such as "toy" or "toy:step_ms=5,failing_seed=13"."""
    return model.partition(":")[0] == "toy"


def load_toy(model: str, capacity_slots: int, on_step: OnStep = lambda _: None) -> ToyGenerator:
    """The toy of that name.

    Raises:
        FileNotFoundError: there is none.
    """
    match = re.fullmatch(r"toy(?::(?:step_ms=([0-9.]+))?,?(?:failing_seed=(\d+))?)?", model)
    if not match:
        raise FileNotFoundError(f"no such toy: {model}; options: step_ms=5,failing_seed=13")
    step_s, seed = float(match[1] or 0) / 1e3, int(match[2] or -1)
    return ToyGenerator(capacity_slots, step_s=step_s, failing_seed=seed, on_step=on_step)
