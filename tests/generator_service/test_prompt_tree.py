"""Which prompts share which nodes, checked against the prompts themselves and the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from generator_service.engine import prompt_tree
from generator_service.engine.prompt_tree import PromptTree, RadixNode
from specrej_models.slots import SlotLedger
from specrej_models.token_prefix import common_length


class Cells:
    """A store of the tokens for which its cells were computed."""

    def __init__(self, num_tokens: int) -> None:
        self.tokens: list[int | None] = [None] * num_tokens

    def split(self, at: int) -> tuple[Cells, Cells]:
        front, rest = Cells(0), Cells(0)
        front.tokens, rest.tokens, self.tokens = self.tokens[:at], self.tokens[at:], []
        return front, rest


Leaf = RadixNode[Cells]
Tree = PromptTree[Cells]


def run(start: int, count: int) -> list[int]:
    """`count` tokens, other ones for every start."""
    return [1000 * start + at for at in range(count)]


def prompt_of(leaf: Leaf) -> list[int]:
    return [token for node in leaf.path() for token in node.tokens]


def computed_of(leaf: Leaf) -> int:
    return sum(node.computed for node in leaf.path())


def compute(leaf: Leaf, count: int = 10_000) -> None:
    """The next `count` tokens of a prompt, as the engine reads them: from the front."""
    for node in leaf.path():
        end = min(len(node.tokens), node.computed + count)
        node.store.tokens[node.computed : end] = node.tokens[node.computed : end]
        count -= end - node.computed
        node.computed = end


def cache(tree: Tree, prompt: Sequence[int]) -> None:
    """Open and close a session with this prompt."""
    leaf = tree.acquire("", prompt)
    compute(leaf)
    tree.release(leaf)


def cached_tokens(tree: Tree, ledger: SlotLedger, prompt: Sequence[int]) -> int:
    """How many of a prompt's tokens are cached."""
    before = ledger.cached
    leaf = tree.acquire("", prompt)
    num_cached = before - ledger.cached
    tree.release(leaf)
    return num_cached


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    """Another use makes a prompt the newest; the budget is exact."""
    ledger = SlotLedger(10_000)
    tree: Tree = PromptTree(ledger, Cells, 300)
    for number in (1, 2, 3):
        cache(tree, run(number, 100))
    assert ledger.cached == 300
    cache(tree, run(1, 100))
    cache(tree, run(4, 100))
    assert ledger.cached == 300
    assert [cached_tokens(tree, ledger, run(number, 100)) for number in (1, 3, 4)] == [100] * 3
    cache(tree, run(5, 1))
    assert ledger.cached == 201
    assert cached_tokens(tree, ledger, run(1, 100)) == 0
    tree.check_integrity()


@dataclass(eq=False, slots=True)
class Session:
    """A session, and how much of its prompt was computed so far."""

    salt: str
    prompt: tuple[int, ...]
    leaf: Leaf
    computed: int


PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14).map(tuple)
SALTS = st.sampled_from(["", "other"])


class TreeMachine(RuleBasedStateMachine):
    """Random sessions over prompts of two tokens, so that most prompts share a beginning."""

    LEAST = 3

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prompt_tree, "MIN_SHARED_TOKENS", self.LEAST)
        self.is_exhausted = False
        self.ledger = SlotLedger(100)
        self.budget = 0
        self.tree: Tree = PromptTree(self.ledger, self.allocate, self.budget)
        self.sessions: list[Session] = []

    @initialize(budget=st.sampled_from([40, 15, 100, 0]))
    def begin(self, budget: int) -> None:
        self.budget = budget
        self.tree = PromptTree(self.ledger, self.allocate, budget)

    def allocate(self, num_tokens: int) -> Cells:
        if self.is_exhausted:
            raise MemoryError
        return Cells(num_tokens)

    @rule(data=st.data(), cut=st.integers(0, 6), rest=st.just(()) | PROMPTS, salt=SALTS)
    def acquire(self, data: st.DataObject, cut: int, rest: tuple[int, ...], salt: str) -> None:
        """A prompt that is equal to that of another session, or begins with a part of it."""
        other = self.one_of_them(data).prompt if self.sessions else ()
        self.attempt(salt, other[: max(1, len(other) - cut)] + rest or (1,))

    @rule(salt=SALTS, prompt=PROMPTS)
    def acquire_without_memory(self, salt: str, prompt: tuple[int, ...]) -> None:
        """Fails unless all nodes exist; the invariants check that no user of a node is left."""
        held = self.ledger.held
        self.is_exhausted = True
        try:
            self.attempt(salt, prompt)
        except MemoryError:
            assert self.ledger.held == held
        finally:
            self.is_exhausted = False

    def one_of_them(self, data: st.DataObject) -> Session:
        return self.sessions[data.draw(st.integers(0, len(self.sessions) - 1))]

    def attempt(self, salt: str, prompt: tuple[int, ...]) -> bool:
        """Acquire as the engine does: only if the missing slots are free."""
        held, missing = self.ledger.held, self.tree.missing(salt, prompt)
        if missing > self.ledger.unshared:
            return False
        leaf = self.tree.acquire(salt, prompt)
        assert self.ledger.held - held == missing
        self.sessions.append(Session(salt, prompt, leaf, computed_of(leaf)))
        return True

    @rule(salt=SALTS, prompt=PROMPTS)
    def come_and_go(self, salt: str, prompt: tuple[int, ...]) -> None:
        """A session that ends; its prompt stays cached."""
        if self.attempt(salt, prompt):
            session = self.sessions.pop()
            compute(session.leaf)
            self.tree.release(session.leaf)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = self.one_of_them(data)
        self.sessions.remove(session)
        self.tree.release(session.leaf)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), count=st.integers(1, 14))
    def compute(self, data: st.DataObject, count: int) -> None:
        compute(self.one_of_them(data).leaf, count)

    @rule(count=st.integers(0, 30), share=st.integers(1, 60))
    def make_room(self, count: int, share: int) -> None:
        """Candidates' slots, which cached prompts make room for."""
        if share <= self.ledger.unshared:
            self.ledger.admit(1, share, share, 0)
            self.tree.make_room(count)
            assert self.ledger.cached <= max(0, self.ledger.unshared - count)
            self.ledger.close(1)

    @invariant()
    def ledger_is_consistent(self) -> None:
        self.tree.check_integrity()
        self.ledger.check_integrity()
        assert self.ledger.cached <= self.budget

    @invariant()
    def paths_spell_their_prompts(self) -> None:
        users: dict[Leaf, int] = {}
        for session in self.sessions:
            assert (*prompt_of(session.leaf),) == session.prompt
            for node in session.leaf.path():
                assert node.salt == session.salt
                users[node] = users.get(node, 0) + 1
        for node in self.tree.nodes():
            assert node.users == users.pop(node, 0)
            assert node.tokens
        assert not users

    @invariant()
    def nothing_computed_is_lost(self) -> None:
        for node in self.tree.nodes():  # computed cells are those of the node's own tokens
            assert len(node.store.tokens) == len(node.tokens)
            assert (*node.store.tokens[: node.computed],) == node.tokens[: node.computed]
        for session in self.sessions:
            computed, session.computed = session.computed, computed_of(session.leaf)
            assert session.computed >= computed
            front = [node.is_computed for node in session.leaf.path()]
            assert front == sorted(front, reverse=True)

    @invariant()
    def common_beginnings_are_shared(self) -> None:
        """Equal prompts share all nodes, others all but fewer than `LEAST` tokens."""
        for session in self.sessions:
            for other in self.sessions:
                if session.salt == other.salt and session.prompt != other.prompt:
                    common = common_length(session.prompt, other.prompt)
                    both = {*session.leaf.path()} & {*other.leaf.path()}
                    shared = sum(len(node.tokens) for node in both)
                    assert common - self.LEAST < shared <= common or common < self.LEAST
                elif session.salt == other.salt:
                    assert session.leaf is other.leaf

    @invariant()
    def idle_nodes_are_computed(self) -> None:
        assert all(node.users or node.is_computed for node in self.tree.nodes())

    def teardown(self) -> None:
        for session in self.sessions:
            self.tree.release(session.leaf)
        assert self.ledger.held == 0
        self.tree.check_integrity()
        self.tree.make_room(self.ledger.capacity)
        assert self.ledger.owned == self.ledger.cached == 0
        self.patch.undo()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(stateful_step_count=40)
