"""Which prompts share which pieces, checked against the prompts themselves and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from generator_service import prefixes
from generator_service.prefixes import MIN_SHARED_TOKENS, Piece, PrefixTree
from inference.slots import SlotLedger

LEAST = MIN_SHARED_TOKENS


class Cells:
    """A store that remembers which token each of its cells was computed for."""

    def __init__(self, num_tokens: int) -> None:
        self.tokens: list[int | None] = [None] * num_tokens

    def split(self, at: int) -> tuple[Cells, Cells]:
        front, rest = Cells(0), Cells(0)
        front.tokens, rest.tokens, self.tokens = self.tokens[:at], self.tokens[at:], []
        return front, rest


Leaf = Piece[Cells]
Tree = PrefixTree[Cells]
Allocate = Callable[[int], Cells]


def tree_of(
    capacity: int = 10_000, budget: int = 10_000, allocate: Allocate = Cells
) -> tuple[Tree, SlotLedger]:
    ledger = SlotLedger(capacity)
    return PrefixTree(ledger, allocate, budget), ledger


def run(start: int, count: int) -> list[int]:
    """`count` tokens, other ones for every start."""
    return [1000 * start + at for at in range(count)]


def prompt_of(leaf: Leaf) -> list[int]:
    return [token for piece in leaf.chain() for token in piece.tokens]


def computed_of(leaf: Leaf) -> int:
    return sum(piece.computed for piece in leaf.chain())


def compute(leaf: Leaf, count: int = 10_000) -> None:
    """The next `count` tokens of a prompt, as the engine reads them: from the front."""
    for piece in leaf.chain():
        end = min(len(piece.tokens), piece.computed + count)
        piece.store.tokens[piece.computed : end] = piece.tokens[piece.computed : end]
        count -= end - piece.computed
        piece.computed = end


def check_stores(tree: Tree) -> None:
    """What counts as computed is what was computed for these very tokens."""
    for piece in tree.pieces():
        assert len(piece.store.tokens) == len(piece.tokens)
        assert (*piece.store.tokens[: piece.computed],) == piece.tokens[: piece.computed]


def cache(tree: Tree, prompt: Sequence[int], salt: str = "") -> None:
    """A session with this prompt comes and goes."""
    leaf = tree.acquire(salt, prompt)
    compute(leaf)
    tree.release(leaf)


def cached_tokens(tree: Tree, ledger: SlotLedger, prompt: Sequence[int]) -> int:
    """How many of a prompt's tokens are there without being used."""
    before = ledger.cached
    leaf = tree.acquire("", prompt)
    found = before - ledger.cached
    tree.release(leaf)
    return found


@pytest.mark.parametrize("length", [1, LEAST - 1, LEAST, 3 * LEAST])
def test_equal_prompts_share_at_any_length(length: int) -> None:
    """A short prompt is worth sharing, too: its candidates' attention stays one dense product."""
    tree, ledger = tree_of()
    first = tree.acquire("", run(1, length))
    assert tree.missing("", run(1, length)) == 0
    assert tree.acquire("", run(1, length)) is first
    assert ledger.held == length
    tree.check_integrity()


@pytest.mark.parametrize("common", [1, LEAST - 1, LEAST, LEAST + 1, 5 * LEAST])
def test_leading_tokens_are_shared_from_a_least_length_on(common: int) -> None:
    """Shorter parts would cost more than they save; longer ones unshared would fill the slots."""
    tree, ledger = tree_of()
    prompts = [run(1, common) + run(other, 10) for other in (2, 3)]
    leaves = [tree.acquire("", prompt) for prompt in prompts]
    shared = common if common >= LEAST else 0
    assert ledger.held == 2 * (common + 10) - shared
    assert [prompt_of(leaf) for leaf in leaves] == prompts
    assert len({*leaves[0].chain()} & {*leaves[1].chain()}) == (1 if shared else 0)
    tree.check_integrity()


@pytest.mark.parametrize("is_longer_first", [True, False])
@pytest.mark.parametrize("length", [LEAST - 1, LEAST, 90])
def test_a_prompt_may_be_the_beginning_of_another(is_longer_first: bool, length: int) -> None:
    """A conversation's next turn, or its last one again: an end in the middle of a piece."""
    tree, ledger = tree_of()
    prompts = [run(1, 100)[:length], run(1, 100)]
    leaves = [tree.acquire("", prompt) for prompt in prompts[:: -1 if is_longer_first else 1]]
    assert [prompt_of(leaf) for leaf in leaves] == prompts[:: -1 if is_longer_first else 1]
    assert ledger.held == (100 if length >= LEAST else 100 + length)
    tree.check_integrity()


def test_a_short_rest_in_the_middle_of_a_chain_is_found_again() -> None:
    """A cut shortly before the border to the next turn made equal prompts miss each other."""
    tree, ledger = tree_of()
    turn, next_turn = run(1, 100), run(1, 100) + run(2, 100)
    prompts = [turn, next_turn, run(1, 90) + run(3, 10)]
    leaves = [tree.acquire("", prompt) for prompt in prompts]
    assert ledger.held == 210
    assert tree.missing("", next_turn) == 0
    assert tree.missing("", next_turn + run(4, 5)) == 5
    assert tree.acquire("", next_turn) is leaves[1]


def test_salts_share_nothing() -> None:
    """A tenant who guesses another's prompt must not learn from the time it takes."""
    tree, ledger = tree_of()
    prompt = run(1, 200)
    mine, theirs, nobodys = (tree.acquire(salt, prompt) for salt in ("me", "they", ""))
    assert ledger.held == 600
    assert not {*mine.chain()} & {*theirs.chain()} & {*nobodys.chain()}
    compute(mine)
    assert computed_of(theirs) == computed_of(nobodys) == 0
    tree.release(mine)
    assert tree.missing("me", prompt) == 200
    assert cached_tokens(tree, ledger, prompt) == 0
    tree.check_integrity()


def test_a_split_goes_unnoticed() -> None:
    """Chains of all sessions on a piece still spell their prompts, with what was computed."""
    tree, ledger = tree_of()
    prompts = [run(1, 400), run(1, 400), run(1, 400) + run(2, 70)]
    leaves = [tree.acquire("", prompt) for prompt in prompts]
    compute(leaves[0], 250)
    for at, (length, computed) in enumerate(((300, 250), (80, 80), (190, 190), (400, 250))):
        prompts.append(run(1, 400)[:length] + run(10 + at, 3))
        leaves.append(tree.acquire("", prompts[-1]))
        assert computed_of(leaves[-1]) == computed
        assert [prompt_of(leaf) for leaf in leaves] == prompts
        assert [computed_of(leaf) for leaf in leaves[:3]] == [250] * 3
        check_stores(tree)
        tree.check_integrity()
    assert ledger.held == 400 + 70 + 4 * 3
    for leaf in leaves:
        tree.release(leaf)
    assert (ledger.held, ledger.cached) == (0, 190)  # the next piece was begun, not done


def test_missing_is_what_a_session_adds_to_the_slots_in_use() -> None:
    """Admission checks with it: too little overbooks, too much keeps sessions waiting."""
    tree, ledger = tree_of()
    cache(tree, run(1, 100))
    used = tree.acquire("", run(2, 400))
    for prompt, missing in (
        (run(1, 100), 100),  # cached, but not in use
        (run(2, 400), 0),
        (run(2, 100) + run(3, 50), 50),
        (run(2, LEAST - 1) + run(3, 50), LEAST - 1 + 50),
        (run(2, 400) + run(3, 50), 50),
        (run(2, 100 + LEAST - 1), LEAST - 1),  # in the middle of the second piece by now
        (run(2, 200), 0),
    ):
        assert tree.missing("", prompt) == missing
        before = ledger.held
        leaf = tree.acquire("", prompt)
        assert ledger.held - before == missing
        tree.release(leaf)
        assert ledger.held == before
    tree.release(used)
    tree.check_integrity()


def test_the_least_recently_used_prompt_goes_first() -> None:
    """Used again counts as new; the budget holds to the slot."""
    tree, ledger = tree_of(budget=300)
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


def test_what_prompts_have_in_common_goes_last() -> None:
    """A parent given up before its children would leave them out of anyone's reach."""
    tree, ledger = tree_of(budget=110)
    leaves = [tree.acquire("", run(1, 100) + run(number, 20)) for number in (2, 3)]
    for leaf in leaves:
        compute(leaf)
    for leaf in leaves:
        tree.release(leaf)
    assert ledger.cached == 100
    assert [piece.tokens for piece in tree.pieces()] == [(*run(1, 100),)]
    tree.check_integrity()


def test_without_a_budget_nothing_stays() -> None:
    """The default: a prompt's slots are free with the last session that uses them."""
    tree, ledger = tree_of(budget=0)
    leaves = [tree.acquire("", run(1, 100) + run(number, 20)) for number in (2, 3)]
    for leaf, held in zip(leaves, (120, 0), strict=True):
        compute(leaf)
        tree.release(leaf)
        assert (ledger.held, ledger.cached) == (held, 0)
    assert not [*tree.pieces()]


def test_cached_prompts_give_way_to_shares_and_prompts() -> None:
    """What nobody uses may never stand in the way of a session that fits without it."""
    tree, ledger = tree_of(capacity=300)
    for number in (1, 2, 3):
        cache(tree, run(number, 100))
    ledger.admit(1, 120, 120, 0)
    tree.make_room()
    assert ledger.cached == 100
    tree.make_room(80)
    assert ledger.cached == 100
    leaf = tree.acquire("", run(4, 81))
    assert (ledger.held, ledger.cached, ledger.unshared) == (81, 0, 99)
    tree.release(leaf)
    tree.make_room(10**6)  # more than there is
    assert ledger.cached == 0
    ledger.check_integrity()
    tree.check_integrity()


def test_a_cached_prompt_that_is_asked_for_does_not_give_way_to_itself() -> None:
    """Room for its rest must come from others: the part that is there is in use already."""
    tree, ledger = tree_of(capacity=300)
    cache(tree, run(2, 100))
    cache(tree, run(1, 100))
    leaf = tree.acquire("", run(1, 80) + run(3, 200))
    assert computed_of(leaf) == 80
    assert (ledger.held, ledger.cached) == (280, 20)
    check_stores(tree)
    tree.check_integrity()


def test_a_piece_that_is_not_computed_is_not_kept() -> None:
    """A session that ends while its prompt is read: the next one may not take it for stored."""
    tree, ledger = tree_of()
    first = tree.acquire("", run(1, 100))
    second = tree.acquire("", run(1, 80) + run(2, 20))
    compute(first, 90)
    tree.release(first)
    assert (ledger.held, ledger.cached) == (100, 0)
    assert computed_of(second) == 80
    compute(second, 10)
    tree.release(second)
    assert (ledger.held, ledger.cached) == (0, 80)
    assert cached_tokens(tree, ledger, run(1, 100)) == 80
    tree.check_integrity()


class Exhaustible:
    """Makes stores until it is told not to."""

    def __init__(self) -> None:
        self.is_exhausted = False

    def __call__(self, num_tokens: int) -> Cells:
        if self.is_exhausted:
            raise MemoryError
        return Cells(num_tokens)


def test_a_failing_allocation_leaves_everything_as_it_was() -> None:
    """Memory that runs out at admission: nothing may stay in use for a session that is not."""
    allocate = Exhaustible()
    tree, ledger = tree_of(allocate=allocate)
    used = tree.acquire("", run(1, 100))
    compute(used)
    cache(tree, run(2, 100))
    allocate.is_exhausted = True
    for prompt in (run(1, 100) + run(3, 9), run(1, 80) + run(3, 9), run(2, 70) + run(3, 9), [3]):
        with pytest.raises(MemoryError):
            tree.acquire("", prompt)
        assert (ledger.held, ledger.cached) == (100, 100)
        assert prompt_of(used) == run(1, 100)
        check_stores(tree)
        tree.check_integrity()
    assert tree.acquire("", run(2, 100)).users == 1  # nothing new is needed
    tree.release(used)
    tree.check_integrity()


def test_a_failing_split_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out earlier, when the shared part gets a store of its own."""
    tree, ledger = tree_of()
    used = tree.acquire("", run(1, 100))
    compute(used)

    def exhausted(cells: Cells, at: int) -> tuple[Cells, Cells]:
        raise MemoryError

    monkeypatch.setattr(Cells, "split", exhausted)
    with pytest.raises(MemoryError):
        tree.acquire("", run(1, 80))
    assert (ledger.held, ledger.cached, computed_of(used)) == (100, 0, 100)
    assert (used.users, prompt_of(used)) == (1, run(1, 100))
    tree.check_integrity()


def test_clearing_leaves_what_is_in_use() -> None:
    """A shared part in use may have idle rests behind it: those go alone."""
    tree, ledger = tree_of()
    cache(tree, run(1, 100))
    used = tree.acquire("", run(1, 80) + run(2, 10))
    tree.make_room(tree._ledger.capacity)
    assert (ledger.held, ledger.cached) == (90, 0)
    assert prompt_of(used) == run(1, 80) + run(2, 10)
    check_stores(tree)
    tree.check_integrity()


@pytest.mark.parametrize("field", ["held", "cached"])
def test_the_check_can_fail(field: str) -> None:
    """A positive control: a ledger that was told something else is found out."""
    tree, ledger = tree_of()
    tree.acquire("", run(1, 10))
    setattr(ledger, field, getattr(ledger, field) + 1)
    with pytest.raises(AssertionError):
        tree.check_integrity()


@dataclass(eq=False, slots=True)
class Session:
    """What a session knows, and how much of its prompt it has seen computed."""

    salt: str
    prompt: tuple[int, ...]
    leaf: Leaf
    computed: int


PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14).map(tuple)
SALTS = st.sampled_from(["", "other"])


class TreeMachine(RuleBasedStateMachine):
    """Random sessions over prompts of two words, so that most of them have a part in common."""

    LEAST = 3

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefixes, "MIN_SHARED_TOKENS", self.LEAST)
        self.allocate = Exhaustible()
        self.ledger = SlotLedger(100)
        self.budget = 0
        self.tree: Tree = PrefixTree(self.ledger, self.allocate, self.budget)
        self.sessions: list[Session] = []
        self.shares: list[int] = []
        self.next_share = 1

    @initialize(budget=st.sampled_from([40, 15, 100, 0]))
    def begin(self, budget: int) -> None:
        self.budget = budget
        self.tree = PrefixTree(self.ledger, self.allocate, budget)

    @rule(salt=SALTS, prompt=PROMPTS)
    def acquire(self, salt: str, prompt: tuple[int, ...]) -> None:
        self.attempt(salt, prompt)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), cut=st.integers(0, 6), rest=st.just(()) | PROMPTS, salt=SALTS)
    def acquire_alike(
        self, data: st.DataObject, cut: int, rest: tuple[int, ...], salt: str
    ) -> None:
        """The same again, a part of it, or what begins with it."""
        known = self.one_of_them(data).prompt
        self.attempt(salt, known[: max(1, len(known) - cut)] + rest)

    @rule(salt=SALTS, prompt=PROMPTS)
    def acquire_without_memory(self, salt: str, prompt: tuple[int, ...]) -> None:
        """Fails unless all is there; the invariants say that nobody uses what it has touched."""
        held = self.ledger.held
        self.allocate.is_exhausted = True
        try:
            self.attempt(salt, prompt)
        except MemoryError:
            assert self.ledger.held == held
        finally:
            self.allocate.is_exhausted = False

    def one_of_them(self, data: st.DataObject) -> Session:
        return self.sessions[data.draw(st.integers(0, len(self.sessions) - 1))]

    def attempt(self, salt: str, prompt: tuple[int, ...]) -> bool:
        """As the engine does it: only if there is room."""
        held, missing = self.ledger.held, self.tree.missing(salt, prompt)
        if missing > self.ledger.unshared:
            return False
        leaf = self.tree.acquire(salt, prompt)
        assert self.ledger.held - held == missing
        self.sessions.append(Session(salt, prompt, leaf, computed_of(leaf)))
        return True

    @rule(salt=SALTS, prompt=PROMPTS)
    def come_and_go(self, salt: str, prompt: tuple[int, ...]) -> None:
        """What makes prompts stay."""
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

    @precondition(lambda self: len(self.shares) < 3)
    @rule(count=st.integers(1, 30))
    def share(self, count: int) -> None:
        """Candidates' slots, which cached prompts make room for."""
        if self.ledger.can_admit(count):
            self.ledger.admit(self.next_share, count, count, 0)
            self.tree.make_room()
            self.shares.append(self.next_share)
            self.next_share += 1

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def unshare(self, data: st.DataObject) -> None:
        share = data.draw(st.sampled_from(self.shares))
        self.shares.remove(share)
        self.ledger.close(share)

    @rule(count=st.integers(0, 30))
    def make_room(self, count: int) -> None:
        self.tree.make_room(count)
        assert self.ledger.cached <= max(0, self.ledger.unshared - count)

    @invariant()
    def books_balance(self) -> None:
        self.tree.check_integrity()
        self.ledger.check_integrity()
        assert self.ledger.cached <= self.budget

    @invariant()
    def chains_spell_their_prompts(self) -> None:
        users: dict[Leaf, int] = {}
        for session in self.sessions:
            assert (*prompt_of(session.leaf),) == session.prompt
            for piece in session.leaf.chain():
                assert piece.salt == session.salt
                users[piece] = users.get(piece, 0) + 1
        for piece in self.tree.pieces():
            assert piece.users == users.pop(piece, 0)
            assert piece.tokens
        assert not users

    @invariant()
    def nothing_computed_is_lost(self) -> None:
        check_stores(self.tree)
        for session in self.sessions:
            computed, session.computed = session.computed, computed_of(session.leaf)
            assert session.computed >= computed
            front = [piece.is_computed for piece in session.leaf.chain()]
            assert front == sorted(front, reverse=True)

    @invariant()
    def what_prompts_have_in_common_is_shared(self) -> None:
        """All of it if they are equal, else all but less than the least length."""
        for session in self.sessions:
            for other in self.sessions:
                if session.salt == other.salt and session.prompt != other.prompt:
                    common = common_length(session.prompt, other.prompt)
                    both = {*session.leaf.chain()} & {*other.leaf.chain()}
                    shared = sum(len(piece.tokens) for piece in both)
                    assert common - self.LEAST < shared <= common or common < self.LEAST
                elif session.salt == other.salt:
                    assert session.leaf is other.leaf

    @invariant()
    def only_computed_pieces_stay(self) -> None:
        assert all(piece.users or piece.is_computed for piece in self.tree.pieces())

    def teardown(self) -> None:
        for session in self.sessions:
            self.tree.release(session.leaf)
        assert self.ledger.held == 0
        self.tree.check_integrity()
        self.tree.make_room(self.ledger.capacity)
        assert self.ledger.owned == self.ledger.cached == 0
        self.patch.undo()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
