"""Which sessions share which leading prompt tokens: a tree of pieces, no tensors, no scheduling.

A piece is a run of consecutive prompt tokens and the store of their keys and values. A prompt is
the chain of pieces from a root to its own piece; prompts that begin alike share the front of their
chains. Sharing never crosses salts. Pieces that no session uses any more stay, least recently used
first to go, until the budget or somebody else's slots take their place. The ledger is told of every
change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from inference.slots import SlotLedger


class Store(Protocol):
    """Room for the keys and values of a piece's tokens."""

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` tokens and the rest, each in a store of its own; gives up this one."""


S = TypeVar("S", bound=Store)

_Key = tuple[str, tuple[int, ...]]

# A part that prompts share costs a few operations per layer in each of their steps. With fewer
# tokens than this they are worth more than what is saved; equal prompts share at any length.
MIN_SHARED_TOKENS = 64


@dataclass(eq=False, slots=True)
class Piece(Generic[S]):
    """Tokens `start .. end - 1` of all prompts that run through it; `computed` of them are stored.

    `users` is the number of sessions whose prompt runs through it.
    """

    salt: str
    parent: Piece[S] | None
    siblings: dict[_Key, Piece[S]]  # it is one of them
    tokens: tuple[int, ...]
    start: int
    store: S
    computed: int = 0
    users: int = 0
    children: dict[_Key, Piece[S]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_computed(self) -> bool:
        return self.computed == len(self.tokens)

    @property
    def key(self) -> _Key:
        """What no sibling begins with."""
        return _key(self.salt, self.tokens)

    def upwards(self) -> Iterator[Piece[S]]:
        """This piece, its parent, and so on."""
        piece: Piece[S] | None = self
        while piece:
            yield piece
            piece = piece.parent

    def chain(self) -> list[Piece[S]]:
        """The pieces of the prompt that ends here, in order."""
        return [*self.upwards()][::-1]


class PrefixTree(Generic[S]):
    """All pieces, of all salts."""

    def __init__(self, ledger: SlotLedger, allocate: Callable[[int], S], budget_slots: int) -> None:
        """`allocate(n)` makes a store of n tokens; at most `budget_slots` stay without users."""
        self._ledger = ledger
        self._allocate = allocate
        self._budget = budget_slots
        self._roots: dict[_Key, Piece[S]] = {}
        # Pieces without users, least recently used first; a piece always comes before its parent.
        self._idle: OrderedDict[Piece[S], None] = OrderedDict()

    def missing(self, salt: str, prompt_ids: Sequence[int]) -> int:
        """Slots that a session with this prompt would add to those in use."""
        ids = tuple(prompt_ids)
        level, start, used = self._roots, 0, 0
        while piece := _find(level, salt, ids[start:]):
            common = _shared(piece.tokens, ids[start:])
            used += common if piece.users else 0
            start += common
            if common < len(piece.tokens):
                break
            level = piece.children
        return len(ids) - used

    def acquire(self, salt: str, prompt_ids: Sequence[int]) -> Piece[S]:
        """The last piece of a prompt's chain, which is in use until `release`."""
        ids = tuple(prompt_ids)
        leaf: Piece[S] | None = None
        level, start = self._roots, 0
        while piece := _find(level, salt, ids[start:]):
            common = _shared(piece.tokens, ids[start:])
            leaf = piece if common == len(piece.tokens) else self._split(piece, common)
            level, start = leaf.children, leaf.end
        for piece in leaf.upwards() if leaf else ():
            self._use(piece)
        if leaf and start == len(ids):
            return leaf
        try:
            return self._grow(salt, leaf, ids[start:])
        except BaseException:
            if leaf:
                self.release(leaf)
            raise

    def release(self, leaf: Piece[S]) -> None:
        """A session ends: what nobody else uses stays as long as there is room for it."""
        for piece in leaf.upwards():
            piece.users -= 1
            if not piece.users:
                self._ledger.retire(len(piece.tokens))
                self._idle[piece] = None
                if not piece.is_computed:
                    self._remove(piece)
        self.make_room()

    def make_room(self, count: int = 0) -> None:
        """Give up idle pieces until they are within the budget and out of the way.

        Out of the way of all shares, and of `count` more slots.
        """
        while self._ledger.cached > min(self._budget, max(0, self._ledger.unshared - count)):
            self._remove(next(iter(self._idle)))

    def pieces(self) -> Iterator[Piece[S]]:
        """Every piece, parents first."""
        waiting = [*self._roots.values()]
        while waiting:
            piece = waiting.pop()
            waiting += piece.children.values()
            yield piece

    def check_integrity(self) -> None:
        """Raises AssertionError if pieces and ledger disagree."""
        pieces = [*self.pieces()]
        held = sum(len(piece.tokens) for piece in pieces if piece.users)
        cached = sum(len(piece.tokens) for piece in pieces if not piece.users)
        assert (held, cached) == (self._ledger.held, self._ledger.cached)
        assert {*self._idle} == {piece for piece in pieces if not piece.users}
        for piece in pieces:
            assert piece.siblings[piece.key] is piece
            assert piece.users >= sum(child.users for child in piece.children.values())
            assert piece.start == (piece.parent.end if piece.parent else 0)

    def _grow(self, salt: str, parent: Piece[S] | None, tokens: tuple[int, ...]) -> Piece[S]:
        """A new piece, in use by one session."""
        self.make_room(len(tokens))
        level, start = (parent.children, parent.end) if parent else (self._roots, 0)
        piece = Piece(salt, parent, level, tokens, start, self._allocate(len(tokens)), users=1)
        level[piece.key] = piece
        self._ledger.hold(len(tokens))
        return piece

    def _use(self, piece: Piece[S]) -> None:
        if not piece.users:
            del self._idle[piece]
            self._ledger.reuse(len(piece.tokens))
        piece.users += 1

    def _split(self, piece: Piece[S], at: int) -> Piece[S]:
        """Cut a piece in two; returns the front. The piece itself becomes the rest.

        Sessions know the last piece of their chain only, so none of them notices.
        """
        front_store, rest_store = piece.store.split(at)
        front = Piece(
            piece.salt,
            piece.parent,
            piece.siblings,
            piece.tokens[:at],
            piece.start,
            front_store,
            computed=min(piece.computed, at),
            users=piece.users,
        )
        front.siblings[front.key] = front
        piece.parent, piece.siblings, piece.store = front, front.children, rest_store
        piece.tokens, piece.start = piece.tokens[at:], piece.start + at
        piece.computed = max(0, piece.computed - at)
        piece.siblings[piece.key] = piece
        if not front.users:
            self._idle[front] = None
        return front

    def _remove(self, piece: Piece[S]) -> None:
        del self._idle[piece]
        del piece.siblings[piece.key]
        self._ledger.forget(len(piece.tokens))


def _key(salt: str, tokens: tuple[int, ...]) -> _Key:
    """Prompts share a piece only if they are equal or begin with as many equal tokens as this."""
    return salt, tokens[:MIN_SHARED_TOKENS]


def _find(level: dict[_Key, Piece[S]], salt: str, ids: tuple[int, ...]) -> Piece[S] | None:
    """The piece of a level that a prompt, of which `ids` are left, begins with."""
    piece = level.get(_key(salt, ids))
    if piece:
        return piece
    # A split may have left a piece shorter than a key, with others behind it.
    for length in range(min(MIN_SHARED_TOKENS, len(ids)) - 1, 0, -1):
        piece = level.get((salt, ids[:length]))
        if piece and piece.children:
            return piece
    return None


def _shared(tokens: tuple[int, ...], ids: tuple[int, ...]) -> int:
    """How many tokens the two have in common at their beginning."""
    pairs = enumerate(zip(tokens, ids, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(ids)))
