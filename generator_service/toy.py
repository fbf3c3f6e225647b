"""A test double that ships: a generator of deterministic words with real slot accounting.

Every token is a hash of (seed, candidate, step), so a survivor's text never depends on its
neighbours. No model, no torch, no threads; a session that does not fit is refused, not queued.
It can be told to take its time and to fail, so that tests can hit a request under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from generator_service.steps import Load, OnStep, Step
from inference.slots import SlotLedger
from specrej.contracts import (
    Candidate,
    FinishReason,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    RoundEnd,
    Sampling,
    SlotGauge,
)
from specrej.errors import InvalidRequest, Overloaded, Violation

_WORDS = ("amber", "birch", "cloud", "delta", "ember", "fjord", "grove", "heath")
_FAILING_STEP = 10


@dataclass(slots=True)
class _Toy:
    id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob: float = 0.0  # their sum
    finish: FinishReason | None = None
    reported: int = 0


class ToySession:
    """A `Session` of words."""

    def __init__(
        self,
        ledger: SlotLedger,
        session_id: int,
        numbers: range,
        prompt_tokens: int,
        sampling: Sampling,
        end_every: int,
        step_s: float,
        fails: bool,
        on_step: OnStep | None,
    ) -> None:
        self._ledger = ledger
        self._id = session_id
        self._sampling = sampling
        self._end_every = end_every
        self._step_s = step_s
        self._fails = fails
        self._on_step = on_step
        self._live = [_Toy(number) for number in numbers]
        self._unreported = list(self._live)
        self._num_tokens = 0
        self.n = len(numbers)
        self.prompt_tokens = prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        until = min(until_tokens, self._sampling.max_tokens)
        ended_by = RoundEnd.DECISION_TOKEN
        while self._live and self._num_tokens < until:
            if self._ledger.room_of(self._id) < len(self._live):
                ended_by = RoundEnd.SLOTS_FULL
                break
            if self._step_s:
                await asyncio.sleep(self._step_s)
            rows = len(self._live)
            self._step()
            if self._on_step:
                self._on_step(Step(self._step_s, rows, generated=rows))
        candidates = tuple(self._report(toy) for toy in self._unreported)
        self._unreported = list(self._live)
        return Round(
            candidates,
            ended_by if self._live else RoundEnd.ALL_FINISHED,
            self._num_tokens,
            self._gauge(),
        )

    async def prune(self, keep: Collection[int]) -> Pruned:
        survivors = [toy for toy in self._live if toy.id in keep]
        freed = (len(self._live) - len(survivors)) * self._num_tokens
        self._ledger.give_back(self._id, freed)
        self._live = survivors
        self._unreported = list(survivors)
        return Pruned(freed, self._gauge())

    def _step(self) -> None:
        if self._fails and self._num_tokens == _FAILING_STEP:
            raise RuntimeError("the toy was told to fail")
        self._ledger.take(self._id, len(self._live))
        for toy in self._live:
            self._draw(toy)
        self._num_tokens += 1
        for toy in self._live:
            if toy.finish is None and self._num_tokens == self._sampling.max_tokens:
                toy.finish = FinishReason.LENGTH
        finished = sum(toy.finish is not None for toy in self._live)
        self._ledger.give_back(self._id, finished * self._num_tokens)
        self._live = [toy for toy in self._live if toy.finish is None]

    def _draw(self, toy: _Toy) -> None:
        draw = self._hash(toy.id, self._num_tokens)
        toy.tokens.append(draw % len(_WORDS))
        toy.logprobs.append(-(draw % 1000) / 500)
        toy.logprob += toy.logprobs[-1]
        may_end = not self._sampling.ignore_eos and self._num_tokens >= self._sampling.min_tokens
        if may_end and draw // 1000 % self._end_every == 0:
            toy.finish = FinishReason.STOP

    def _report(self, toy: _Toy) -> Candidate:
        new, toy.reported = slice(toy.reported, None), len(toy.tokens)
        return Candidate(
            id=toy.id,
            text=" ".join(_WORDS[token] for token in toy.tokens),
            num_tokens=len(toy.tokens),
            logprob=toy.logprob,
            finish=toy.finish,
            new_token_ids=tuple(toy.tokens[new]),
            new_logprobs=tuple(toy.logprobs[new]) if self._sampling.logprobs else (),
        )

    def _hash(self, candidate_id: int, step: int) -> int:
        key = f"{self._sampling.seed}/{candidate_id}/{step}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8])

    def _gauge(self) -> SlotGauge:
        ledger = self._ledger
        return SlotGauge(ledger.capacity, ledger.owned, ledger.owned_by(self._id))


class ToyGenerator:
    """A `Generator` of words; about one token in `end_every` ends its candidate.

    A step of a session takes `step_s` seconds, whoever else is there; a session of `failing_seed`
    fails at its eleventh step.
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
        self._end_every = end_every
        self._step_s = step_s
        self._failing_seed = failing_seed
        self._on_step = on_step
        self._ids = itertools.count(1)

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[ToySession]:
        session_id, words = next(self._ids), _num_words(prompt)
        n = n or 8
        first = min(first_round_tokens, sampling.max_tokens)
        floor = words + max(n * first, sampling.max_tokens)
        if floor > self.ledger.capacity:
            raise _never_fits(floor, self.ledger.capacity, words, first, sampling.max_tokens)
        if not self.ledger.can_admit(floor):
            raise Overloaded("no slots are free")
        self.ledger.admit(session_id, floor, words + n * sampling.max_tokens, 0)
        self.ledger.take(session_id, words)
        fails = sampling.seed == self._failing_seed
        if self._on_step:
            self._on_step(Step(0.0, 0, prefilled=words))
        try:
            yield ToySession(
                self.ledger,
                session_id,
                range(first_candidate, first_candidate + n),
                words,
                sampling,
                self._end_every,
                self._step_s,
                fails,
                self._on_step,
            )
        finally:
            self.ledger.close(session_id)

    def load(self) -> Load:
        """Slots and sessions as of now."""
        slots = SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return Load(slots, self.ledger.num_sessions, 0)

    async def describe(self) -> GeneratorDescription:
        load = self.load()
        return GeneratorDescription(
            model="toy",
            fingerprint=f"toy-{self._end_every}",
            context_tokens=4096,
            max_candidates=1024,
            vocabulary=len(_WORDS),
            slot_bytes=1,
            device="none",
            slots=load.slots,
            sessions=load.sessions,
        )


def is_toy(model: str) -> bool:
    """Whether a model's name is that of a toy: "toy", or "toy:step_ms=5,failing_seed=13"."""
    return model.partition(":")[0] == "toy"


def load_toy(model: str, capacity_slots: int, on_step: OnStep | None = None) -> ToyGenerator:
    """The toy of that name.

    Raises:
        FileNotFoundError: there is none.
    """
    told = model.partition(":")[2]
    options = dict(option.partition("=")[::2] for option in told.split(",") if option)
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


def _never_fits(
    needed: int, capacity: int, prompt_tokens: int, first_round: int, max_tokens: int
) -> InvalidRequest:
    room = capacity - prompt_tokens
    candidates = room // first_round if room >= max_tokens else 0
    return InvalidRequest(
        [Violation("n", f"needs {needed} KV slots, capacity is {capacity}")],
        reason="SLOTS_EXCEEDED",
        metadata={
            "needed": str(needed),
            "capacity": str(capacity),
            "candidates": str(candidates),
        },
    )


def _num_words(prompt: Prompt) -> int:
    text = prompt.text or " ".join(message.content for message in prompt.messages)
    return max(1, len(text.split()))
