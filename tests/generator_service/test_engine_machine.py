"""Random sessions on one engine, step by step: its invariants hold at every moment.

Commands come between any two steps. Prompts consist of few parts, so that most sessions share some
of theirs; all tokens are compared with those of a session alone. In float64: in float32 about one
draw in a hundred thousand may change when a prompt is read in other chunks, which is no error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from generator_service.engine import prompt_tree
from generator_service.engine.commands import GrowingCandidate, OpenCommand, Opened, PrefixBatch
from generator_service.engine.engine import Engine
from generator_service.engine.grammar import CompiledGrammar, Grammars, TokenizerSpec
from generator_service.engine.model import CausalLM
from specrej.contracts import FinishReason, Regex, RoundEnd, Sampling, TokenBias
from specrej.contracts.errors import InternalError, InvalidRequest
from tests.generator_service import tiny
from tests.generator_service.stepping import Recorder, grown, opened
from tests.reward_service.tiny import make_tokenizer

MODEL = CausalLM(tiny.build(num_hidden_layers=2).double(), tiny.END_IDS)
MAX_N, MAX_TOKENS = 12, 20
PLAIN = Sampling(max_tokens=MAX_TOKENS, temperature=1.5, seed=8)
# Draws that depend on the tokens before them.
ADJUSTED = replace(
    PLAIN,
    repetition_penalty=1.3,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    logit_bias=(TokenBias(30, 3.0),),
    min_p=0.1,
)
# Lines of words that end at any of them; tokens 3 .. 96 are the characters of ASCII.
PATTERN = "([a-h]{1,3}[0-9])+"
STRUCTURED = replace(PLAIN, structured_output=Regex(PATTERN))

# Between two commands.
STEPS = st.sampled_from([0, 0, 0, 1, 2, 4])

LONG, *_ = PARTS = ([*range(20, 42)], [1, 5, 9], [1, 5, 9, 7])
PROMPTS = [
    tuple(itertools.chain(*parts))
    for count in (1, 2, 3)
    for parts in itertools.product(PARTS, repeat=count)
    if parts[0] is LONG or count < 2
]


@cache
def grammar() -> CompiledGrammar:
    """Not for every process that collects the tests: a process tries it."""
    spec = TokenizerSpec.of(make_tokenizer(None), tiny.VOCABULARY)
    return Grammars(spec, [2]).compile(Regex(PATTERN))


def command_of(
    prompt: Sequence[int], n: int, sampling: Sampling, first: int = 1, **more: Any
) -> OpenCommand:
    output = grammar() if sampling.structured_output else None
    return OpenCommand(prompt, n, sampling, first, grammar=output, **more)


@cache
def alone(prompt: Sequence[int], sampling: Sampling) -> dict[int, GrowingCandidate]:
    """The candidates on this prompt in an engine of their own."""
    engine = Engine(MODEL, 5000)
    session = opened(engine, command_of(prompt, MAX_N, sampling))
    batch = grown(engine, session.id, MAX_TOKENS)
    return {prefix.id: prefix for prefix in batch.prefixes}


@cache
def descended(
    prompt: Sequence[int], sampling: Sampling, root: int, forks: tuple[tuple[int, int], ...]
) -> GrowingCandidate:
    """The last of a chain of forks, each as (tokens of its parent, id), in an engine of its own."""
    engine = Engine(MODEL, 5000)
    session, parent = opened(engine, command_of(prompt, MAX_N, sampling)), root
    for length, number in forks:
        grown(engine, session.id, length)
        engine.prune(session.id, [], {number: parent})
        parent = number
    return grown(engine, session.id, MAX_TOKENS).prefixes[0]


@dataclass(eq=False, slots=True)
class Client:
    """One session from its caller's side."""

    id: int
    command: OpenCommand
    opened: Future[Opened]
    growing: Future[PrefixBatch] | None = None
    until: int = 0
    reached: int = 0
    is_full: bool = False
    live: set[int] = field(default_factory=set)
    cut_unseen: set[int] = field(default_factory=set)  # before the first round
    reported: dict[int, int] = field(default_factory=dict)
    prefixes: dict[int, GrowingCandidate] = field(default_factory=dict)  # the latest of each
    forked_at: dict[int, GrowingCandidate] = field(default_factory=dict)  # the parent's, by fork
    # By fork: the candidate at the beginning of its chain, and the chain.
    lineage: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.opened.done()

    @property
    def drawn(self) -> tuple[Sequence[int], Sampling]:
        """What all tokens depend on."""
        sampling = replace(self.command.sampling, max_tokens=MAX_TOKENS)
        return self.command.prompt_ids, sampling

    @property
    def max_tokens(self) -> int:
        return self.command.sampling.max_tokens

    def admit(self) -> None:
        self.live = {*range(self.opened.result(0).n)}
        self.reported = dict.fromkeys(self.live, 0)

    def end_round(self) -> None:
        """Check a round against a session alone."""
        assert self.growing
        batch, self.growing = self.growing.result(0), None
        ended = {prefix.id for prefix in batch.prefixes if prefix.finish}
        # A candidate that ends with the prompt's own step is reported, even if it was cut since.
        assert {prefix.id for prefix in batch.prefixes} - self.live <= ended & self.cut_unseen
        assert self.live <= {prefix.id for prefix in batch.prefixes}
        self.cut_unseen.clear()
        for prefix in batch.prefixes:
            self.check_prefix(prefix)
            assert prefix.finish or len(prefix.token_ids) == batch.num_tokens
        self.live -= ended
        self.is_full = batch.ended_by is RoundEnd.SLOTS_FULL
        self.reached = batch.num_tokens
        if batch.ended_by is RoundEnd.DECISION_TOKEN:
            assert self.live
            assert self.reached >= self.until
        assert bool(self.live) != (batch.ended_by is RoundEnd.ALL_FINISHED)
        assert not self.is_full or len(self.live) > 1  # one alone always fits

    def check_prefix(self, prefix: GrowingCandidate) -> None:
        length, parent = len(prefix.token_ids), self.forked_at.get(prefix.id)
        if parent:
            expected = descended(*self.drawn, *self.lineage[prefix.id])
            num_own, before = length - len(parent.token_ids), parent.logprob
        else:
            expected = alone(*self.drawn)[prefix.id]
            num_own, before = length, 0.0
        assert prefix.token_ids == expected.token_ids[:length]
        assert length == self.reported[prefix.id] + prefix.num_new
        self.reported[prefix.id], self.prefixes[prefix.id] = length, prefix
        logprob = before + sum(expected.new_logprobs[:num_own])
        assert prefix.logprob == pytest.approx(logprob, abs=1e-4)
        if length == len(expected.token_ids) and expected.finish is FinishReason.STOP:
            assert prefix.finish is FinishReason.STOP
            if self.command.grammar:
                text = "".join(chr(token + 30) for token in prefix.token_ids[:-1])
                assert re.fullmatch(PATTERN, text)
        else:
            assert prefix.finish is (FinishReason.LENGTH if length == self.max_tokens else None)


class EngineMachine(RuleBasedStateMachine):
    """Sessions open, grow, are pruned and close; waiting ones are admitted, and no slot leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prompt_tree, "MIN_SHARED_TOKENS", 4)
        self.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.model = Recorder(MODEL)
        self.clients: list[Client] = []

    @initialize(
        capacity=st.integers(100, 300),
        max_rows=st.integers(2, 16),
        prefill_chunk=st.integers(1, 8),
        prefix_cache_slots=st.sampled_from([0, 30, 400]),
    )
    def begin(
        self, capacity: int, max_rows: int, prefill_chunk: int, prefix_cache_slots: int
    ) -> None:
        self.max_rows, self.prefill_chunk = max_rows, prefill_chunk
        self.prefix_cache_slots = prefix_cache_slots
        self.engine = Engine(
            self.model,
            capacity,
            auto_candidates=MAX_N,
            prefill_chunk=prefill_chunk,
            max_rows=max_rows,
            prefix_cache_slots=prefix_cache_slots,
        )

    @precondition(lambda self: len(self.clients) < 5)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        salt=st.sampled_from(["", "", "", "other"]),
        n=st.sampled_from([0, 1, 3, 8, MAX_N]),
        max_tokens=st.sampled_from([1, 7, MAX_TOKENS]),
        first=st.integers(1, 8),
        sampling=st.sampled_from([PLAIN, ADJUSTED, STRUCTURED]),
        then=STEPS,
    )
    def open_session(
        self,
        prompt: Sequence[int],
        salt: str,
        n: int,
        max_tokens: int,
        first: int,
        sampling: Sampling,
        then: int,
    ) -> None:
        sampling = replace(sampling, max_tokens=max_tokens)
        command = command_of(prompt, n, sampling, first, cache_salt=salt)
        rows = max(1, n) * (min(first, max_tokens) - 1)
        if len(prompt) + max(rows, max_tokens - 1) > self.engine.ledger.capacity:
            with pytest.raises(InvalidRequest, match="KV slots"):
                opened(self.engine, command)
        else:
            session = opened(self.engine, command)
            self.clients.append(Client(session.id, command, session.opened))
            self.update_clients()
        self.steps(then)

    @rule(then=STEPS, is_lost=st.sampled_from([False] * 7 + [True]))
    def step(self, then: int, is_lost: bool) -> None:
        """A pass that fails ends its only session; one of several sessions is repeated in halves,
        which succeed."""
        self.one_step(is_lost=is_lost)
        self.steps(then)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), more=st.integers(0, 8), then=STEPS)
    def extend(self, data: st.DataObject, more: int, then: int) -> None:
        self.grow(self.one_of(data, self.idle()), more)
        self.steps(then)

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        kept=st.sampled_from([0, 1, 3, 6]),
        forks=st.sampled_from([0, 0, 1, 4, 9]),
        then=STEPS,
    )
    def prune(self, data: st.DataObject, kept: int, forks: int, then: int) -> None:
        """A cut, and forks once a round has ended, of survivors or of rejected ones."""
        client = self.one_of(data, self.idle())
        live = sorted(client.live)
        chosen = data.draw(st.permutations(live))[:kept]
        parents = [data.draw(st.sampled_from([*live, 98])) for _ in range(forks if live else 0)]
        self.cut(client, {*chosen, 99}, parents if client.reached else [])
        self.steps(then)

    @precondition(lambda self: self.growing())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.run_round(self.one_of(data, self.growing()))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), then=STEPS)
    def close(self, data: st.DataObject, then: int) -> None:
        """Idle, in the middle of a round, while its prompt is read, or while it waits."""
        self.end(self.one_of(data, self.clients))
        self.steps(then)

    @invariant()
    def ledger_is_consistent(self) -> None:
        self.engine.check_integrity()
        ledger = self.engine.ledger
        assert ledger.owned + ledger.cached <= ledger.capacity
        assert ledger.cached <= self.prefix_cache_slots
        if not any(client.is_open for client in self.clients):
            assert ledger.owned == ledger.num_sessions == 0

    @invariant()
    def admission_keeps_the_order(self) -> None:
        admitted = [client.is_open for client in self.clients]
        assert admitted == sorted(admitted, reverse=True)
        assert len(self.engine.sessions) == sum(admitted)
        assert len(self.engine.queue) == len(admitted) - sum(admitted)

    @invariant()
    def steps_are_bounded(self) -> None:
        for step in self.model.passes:
            assert step.num_prompt_rows <= self.prefill_chunk
            assert sum(step.rows) <= self.max_rows or len(step.rows) == 1
            assert step.num_prompt_rows + sum(step.rows) > 0
        self.model.passes.clear()

    def teardown(self) -> None:
        """From any state all sessions are admitted, reach their end and free all slots."""
        try:
            while self.clients:
                self.one_step()
                assert self.clients[0].is_open, "slots are free, but no session is admitted"
                self.run_to_the_end(self.clients[0])
                self.end(self.clients[0])
                self.ledger_is_consistent()
            if hasattr(self, "engine"):
                assert len(self.engine.sessions) == len(self.engine.queue) == 0
                self.engine.prompts.make_room(self.engine.ledger.capacity)
                assert self.engine.ledger.owned == self.engine.ledger.cached == 0
        finally:
            self.patch.undo()
            torch.set_num_threads(self.num_threads)

    def idle(self) -> list[Client]:
        return [client for client in self.clients if client.is_open and not client.growing]

    def growing(self) -> list[Client]:
        return [client for client in self.clients if client.growing]

    def one_of(self, data: st.DataObject, clients: list[Client]) -> Client:
        return clients[data.draw(st.integers(0, len(clients) - 1))]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self, *, is_lost: bool = False) -> None:
        num_passes = len(self.model.passes)
        self.model.is_failing = is_lost
        had_work = self.engine.step()
        self.model.is_failing = False
        is_repeated = len(self.model.passes) > num_passes
        gone = [c for c in self.clients if c.is_open and c.id not in self.engine.sessions]
        assert bool(gone) == (is_lost and had_work and not is_repeated)
        for client in gone:
            assert not client.growing or isinstance(client.growing.exception(0), InternalError)
            self.clients.remove(client)
        self.update_clients()

    def update_clients(self) -> None:
        """Update clients after admissions and ends of rounds."""
        for client in self.clients:
            if client.is_open and not client.reported:
                client.admit()
            if client.growing and client.growing.done():
                client.end_round()

    def grow(self, client: Client, more: int) -> None:
        client.until = min(client.reached + more, client.max_tokens)
        client.growing = self.engine.extend(client.id, client.reached + more)
        self.update_clients()

    def cut(self, client: Client, keep: set[int], parents: Sequence[int] = ()) -> None:
        owned, first = self.engine.ledger.owned, max(100, *client.reported, *keep) + 1
        forks = {first + index: parent for index, parent in enumerate(parents)}
        pruned = self.engine.prune(client.id, keep, forks)
        made = forks.keys() - {*pruned.refused}
        assert {forks[number] for number in made} <= client.live
        if not client.reached:
            client.cut_unseen |= client.live - keep
        client.live = (client.live & keep) | made
        for number in made:
            parent = replace(client.prefixes[forks[number]], id=forks[number])
            client.prefixes[number] = client.forked_at[number] = parent
            client.reported[number] = len(parent.token_ids)
            root, chain = client.lineage.get(parent.id, (parent.id, ()))
            client.lineage[number] = root, (*chain, (len(parent.token_ids), number))
        taken = len(made) * max(0, client.reached - 1)
        assert pruned.freed_slots - taken == owned - self.engine.ledger.owned
        assert pruned.slots.owned == self.engine.ledger.owned

    def end(self, client: Client) -> None:
        owned = self.engine.ledger.owned
        assert self.engine.close(client.id) == owned - self.engine.ledger.owned
        assert not client.growing or client.growing.cancelled()
        self.clients.remove(client)

    def run_round(self, client: Client) -> None:
        """Progress: at least a token of a prompt per step, and each session in its turn."""
        others = [other for other in self.clients if other.is_open]
        unread = sum(len(other.command.prompt_ids) + 1 for other in self.clients)
        for _ in range(unread + client.max_tokens * len(others) + 1):
            if not client.growing:
                return
            self.one_step()
        assert not client.growing, "a round that does not end"

    def run_to_the_end(self, client: Client) -> None:
        """Each full round makes room with the smallest cut there is: one candidate."""
        for _ in range(MAX_N + 2):
            self.run_round(client)
            if not client.live:
                return
            if client.is_full:
                self.cut(client, {*sorted(client.live)[1:]})
            self.grow(client, MAX_TOKENS)
        assert not client.live, "a session that does not end"


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(stateful_step_count=35)
