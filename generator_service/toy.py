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
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from generator_service.admission import AdmissionQueue
from generator_service.engine.commands import GrowingCandidate, OpenCommand, named_tokens
from generator_service.engine.steps import Load, OnStep, Step
from specrej.contracts import (
    NO_FORKS,
    Candidate,
    FinishReason,
    Forks,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    RoundEnd,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import InvalidRequest, Violation
from specrej_models.slots import SlotLedger

# Of different lengths, so that texts shifted by a word are noticed.
_WORDS = ("ash", "birch", "clouds", "delta", "elm", "fjords", "grove", "heather")
_FAILING_STEP = 10
_AUTO_CANDIDATES = 8


class ToySession:
    """A `Session` of words."""

    def __init__(self, generator: ToyGenerator, session_id: int, command: OpenCommand) -> None:
        self.id = session_id
        self.demand = command.demand(len(command.prompt_ids), lambda tokens: tokens)
        self.n = 0
        self.reduced = False
        self.fingerprint = ""  # the servicer has the generator's
        self.prompt_tokens = len(command.prompt_ids)
        self.command = command
        self._generator = generator
        self._ledger = generator.ledger
        self._sampling = command.sampling
        self._live: list[GrowingCandidate] = []
        self._unreported: list[GrowingCandidate] = []
        self._num_tokens = 0

    def begin(self, n: int) -> None:
        """It is admitted with `n` candidates."""
        self.n = n
        self._live = self.command.candidates(n)
        self._unreported = list(self._live)

    async def extend(self, until_tokens: int) -> Round:
        until = min(until_tokens, self._sampling.max_tokens)
        ended_by = RoundEnd.DECISION_TOKEN
        while self._live and self._num_tokens < until:
            if self._ledger.room_of(self.id) < len(self._live):
                ended_by = RoundEnd.SLOTS_FULL
                break
            if self._generator.step_s:
                await asyncio.sleep(self._generator.step_s)
            rows = len(self._live)
            self._step()
            self._generator.report(Step(self._generator.step_s, rows, generated=rows))
        candidates = tuple(self._report(candidate) for candidate in self._unreported)
        tokens = named_tokens(candidates, _token) if self._sampling.logprobs else ()
        self._unreported = list(self._live)
        return Round(
            candidates,
            ended_by if self._live else RoundEnd.ALL_FINISHED,
            self._num_tokens,
            self._gauge(),
            token_texts=tokens,
        )

    async def prune(self, keep: Collection[int], forks: Forks = NO_FORKS) -> Pruned:
        live = {candidate.id: candidate for candidate in self._live}
        survivors = [candidate for candidate in self._live if candidate.id in keep]
        freed = (len(live) - len(survivors)) * self._num_tokens
        self._ledger.give_back(self.id, freed)
        made = self._generator.queue.with_room(self, forks, live, len(survivors), self._num_tokens)
        self._ledger.take(self.id, len(made) * self._num_tokens)
        forked = (live[parent].fork(number) for number, parent in made.items())
        self._live = sorted([*survivors, *forked], key=lambda candidate: candidate.id)
        self._unreported = list(self._live)
        return Pruned(freed, self._gauge(), tuple(sorted(forks.keys() - made.keys())))

    def _step(self) -> None:
        failing = self._sampling.seed == self._generator.failing_seed
        if failing and self._num_tokens == _FAILING_STEP:
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
        word, logprob = draw % len(_WORDS), -(draw % 1000) / 500
        stops = sampling.stop_token_ids
        if step < sampling.min_tokens:  # the next word that is not a stop token
            shifted = ((word + shift) % len(_WORDS) for shift in range(len(_WORDS)))
            word = next((other for other in shifted if other not in stops), word)
        candidate.append(word, logprob)
        if sampling.top_logprobs:
            others = [other for other in range(len(_WORDS)) if other != word]
            ids = [word, *others][: sampling.top_logprobs]
            candidate.note_top((ids, [logprob - rank for rank in range(len(ids))]))
        may_end = not sampling.ignore_eos and step >= sampling.min_tokens
        if (may_end and draw // 1000 % self._generator.end_every == 0) or word in stops:
            candidate.finish = FinishReason.STOP
        elif step + 1 == sampling.max_tokens:
            candidate.finish = FinishReason.LENGTH

    def _report(self, candidate: GrowingCandidate) -> Candidate:
        prefix = candidate.report()
        written = [w for w in prefix.token_ids if w not in self._sampling.stop_token_ids]
        text = " ".join(_WORDS[word] for word in written)
        return prefix.candidate(text, logprobs=self._sampling.logprobs)

    def _gauge(self) -> SlotGauge:
        ledger = self._ledger
        own = self.prompt_tokens + ledger.owned_by(self.id)
        return SlotGauge(ledger.capacity, ledger.owned, own)


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
        on_step: OnStep | None = None,
    ) -> None:
        self.ledger = SlotLedger(capacity_slots)
        self.end_every = end_every
        self.step_s = step_s
        self.failing_seed = failing_seed
        self._on_step = on_step
        self._ids = itertools.count(1)
        self.queue: AdmissionQueue[ToySession] = AdmissionQueue(
            self.ledger, self._admit, max_waiting=0, auto_candidates=_AUTO_CANDIDATES
        )

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[ToySession]:
        if spec.sampling.structured_output:
            refused = "is not supported: the toy has no tokenizer"
            raise InvalidRequest([Violation("sampling.structured_output", refused)])
        command = OpenCommand(
            range(_num_words(spec.prompt)),
            spec.n,
            spec.sampling,
            spec.first_round_tokens,
        )
        session = ToySession(self, next(self._ids), command)
        self.queue.enter(session)  # admitted or refused: none may wait
        self.report(Step(prefilled=session.prompt_tokens))
        try:
            yield session
        finally:
            self.ledger.close(session.id)
            self.ledger.retire(session.prompt_tokens)
            self.ledger.evict(session.prompt_tokens)

    def report(self, step: Step) -> None:
        if self._on_step:
            self._on_step(step)

    def _admit(self, session: ToySession, n: int) -> None:
        self.ledger.hold(session.prompt_tokens)
        self.queue.give_share(session, n)
        session.reduced = self.queue.is_reduced(session, n)
        session.begin(n)

    def load(self) -> Load:
        """Slots and sessions as of now."""
        slots = SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return Load(slots, self.ledger.num_sessions, 0)

    async def describe(self) -> GeneratorDescription:
        load = self.load()
        return GeneratorDescription(
            model="toy",
            fingerprint=f"toy-{self.end_every}",
            context_tokens=4096,
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


def load_toy(model: str, capacity_slots: int, on_step: OnStep | None = None) -> ToyGenerator:
    """The toy of that name.

    Raises:
        FileNotFoundError: there is none.
    """
    listed = model.partition(":")[2].split(",")
    options = dict(option.partition("=")[::2] for option in listed if option)
    try:
        step_ms = float(options.pop("step_ms", 0))
        failing_seed = int(options.pop("failing_seed", -1))
        if options:
            raise ValueError(f"unknown: {', '.join(options)}")
    except ValueError as error:
        raise FileNotFoundError(f"no such toy: {model} ({error})") from None
    return ToyGenerator(
        capacity_slots, step_s=step_ms / 1e3, failing_seed=failing_seed, on_step=on_step
    )


def _token(word: int) -> bytes:
    return f" {_WORDS[word]}".encode()


def _num_words(prompt: Prompt) -> int:
    text = prompt.text or " ".join(message.content for message in prompt.messages)
    return max(1, len(text.split()))
