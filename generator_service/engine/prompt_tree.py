"""A radix tree of prompts: which sessions share which leading prompt tokens; no tensors.

A node is a run of consecutive prompt tokens and the store of their keys and values. A prompt is the
path from a root to its last node; prompts with equal beginnings share the front of their paths.
Prompts with different salts share nothing. A node that no session uses stays until the budget is
exceeded or its slots are needed; the least recently used goes first. Every change is recorded in
the ledger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, Self, TypeVar

from specrej_models.slots import SlotLedger
from specrej_models.token_prefix import common_length


class Store(Protocol):
    """Room for the keys and values of a node's tokens."""

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` tokens and the rest, each in a store of its own; gives up this one."""


S = TypeVar("S", bound=Store)

_Key = tuple[str, tuple[int, ...]]

# A shared node costs a few operations per layer in each step of its sessions. With fewer tokens
# than this they cost more than sharing saves; equal prompts share at any length.
MIN_SHARED_TOKENS = 64


@dataclass(eq=False, slots=True)
class RadixNode(Generic[S]):
    """Tokens `start .. end - 1` of all prompts that run through it; `computed` of them are stored.

    `users` is the number of sessions with a prompt through it.
    """

    salt: str
    parent: RadixNode[S] | None
    siblings: dict[_Key, RadixNode[S]]  # it is one of them
    tokens: tuple[int, ...]
    start: int
    store: S
    computed: int = 0
    users: int = 0
    children: dict[_Key, RadixNode[S]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_computed(self) -> bool:
        return self.computed == len(self.tokens)

    @property
    def key(self) -> _Key:
        """Unique among siblings."""
        return _key(self.salt, self.tokens)

    def path(self) -> list[RadixNode[S]]:
        """The nodes of the prompt that ends here, from the root on."""
        nodes: list[RadixNode[S]] = [self]
        while parent := nodes[-1].parent:
            nodes.append(parent)
        return nodes[::-1]


class PromptTree(Generic[S]):
    """All nodes, of all salts."""

    def __init__(self, ledger: SlotLedger, allocate: Callable[[int], S], budget_slots: int) -> None:
        """`allocate(n)` makes a store of n tokens; at most `budget_slots` stay without users."""
        self._ledger = ledger
        self._allocate = allocate
        self._budget = budget_slots
        self._roots: dict[_Key, RadixNode[S]] = {}
        # Nodes without users, least recently used first; a node always comes before its parent.
        self._idle: OrderedDict[RadixNode[S], None] = OrderedDict()

    def missing(self, salt: str, prompt_ids: Sequence[int]) -> int:
        """Slots that a session with this prompt would add to those in use."""
        ids = tuple(prompt_ids)
        level, start, used = self._roots, 0, 0
        while node := _find(level, salt, ids[start:]):
            common = common_length(node.tokens, ids[start:])
            used += common if node.users else 0
            start += common
            if common < len(node.tokens):
                break
            level = node.children
        return len(ids) - used

    def acquire(self, salt: str, prompt_ids: Sequence[int]) -> RadixNode[S]:
        """The last node of a prompt's path, which is in use until `release`."""
        ids = tuple(prompt_ids)
        leaf: RadixNode[S] | None = None
        level, start = self._roots, 0
        while node := _find(level, salt, ids[start:]):
            common = common_length(node.tokens, ids[start:])
            leaf = node if common == len(node.tokens) else self._split(node, common)
            level, start = leaf.children, leaf.end
        for node in leaf.path() if leaf else ():
            if not node.users:
                del self._idle[node]
                self._ledger.reuse(len(node.tokens))
            node.users += 1
        if leaf and start == len(ids):
            return leaf
        try:
            return self._grow(salt, leaf, ids[start:])
        except BaseException:
            if leaf:
                self.release(leaf)
            raise

    def release(self, leaf: RadixNode[S]) -> None:
        """End one session's use of a prompt; computed nodes stay cached, within the budget."""
        for node in reversed(leaf.path()):
            node.users -= 1
            if not node.users:
                self._ledger.retire(len(node.tokens))
                self._idle[node] = None
                if not node.is_computed:
                    self._remove(node)
        self.make_room()

    def make_room(self, count: int = 0) -> None:
        """Remove idle nodes until the rest fit the budget and the slots outside of all shares.

        `count` more of these slots are left free.
        """
        while self._ledger.cached > min(self._budget, max(0, self._ledger.unshared - count)):
            self._remove(next(iter(self._idle)))

    def nodes(self) -> Iterator[RadixNode[S]]:
        """Every node, parents first."""
        waiting = [*self._roots.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def check_integrity(self) -> None:
        """Raises AssertionError if nodes and ledger disagree."""
        nodes = [*self.nodes()]
        held = sum(len(node.tokens) for node in nodes if node.users)
        cached = sum(len(node.tokens) for node in nodes if not node.users)
        assert (held, cached) == (self._ledger.held, self._ledger.cached)
        assert {*self._idle} == {node for node in nodes if not node.users}
        for node in nodes:
            assert node.siblings[node.key] is node
            assert node.users >= sum(child.users for child in node.children.values())
            assert node.start == (node.parent.end if node.parent else 0)

    def _grow(
        self, salt: str, parent: RadixNode[S] | None, tokens: tuple[int, ...]
    ) -> RadixNode[S]:
        """A new node, in use by one session."""
        self.make_room(len(tokens))
        level, start = (parent.children, parent.end) if parent else (self._roots, 0)
        node = RadixNode(salt, parent, level, tokens, start, self._allocate(len(tokens)), users=1)
        level[node.key] = node
        self._ledger.hold(len(tokens))
        return node

    def _split(self, node: RadixNode[S], at: int) -> RadixNode[S]:
        """Cut a node in two; returns the front. The node itself becomes the rest.

        Sessions hold the last node of their path only, so all paths stay valid.
        """
        front_store, rest_store = node.store.split(at)
        front = replace(
            node,
            tokens=node.tokens[:at],
            store=front_store,
            computed=min(node.computed, at),
            children={},
        )
        front.siblings[front.key] = front
        node.parent, node.siblings, node.store = front, front.children, rest_store
        node.tokens, node.start = node.tokens[at:], node.start + at
        node.computed = max(0, node.computed - at)
        node.siblings[node.key] = node
        if not front.users:
            self._idle[front] = None
        return front

    def _remove(self, node: RadixNode[S]) -> None:
        del self._idle[node]
        del node.siblings[node.key]
        self._ledger.evict(len(node.tokens))


def _key(salt: str, tokens: tuple[int, ...]) -> _Key:
    """Prompts share a node only if they are equal or begin with as many equal tokens as this."""
    return salt, tokens[:MIN_SHARED_TOKENS]


def _find(level: dict[_Key, RadixNode[S]], salt: str, ids: tuple[int, ...]) -> RadixNode[S] | None:
    """The node in `level` that continues a prompt whose remaining tokens are `ids`."""
    node = level.get(_key(salt, ids))
    if node:
        return node
    # A split may have left a node shorter than a key, with children.
    for length in range(min(MIN_SHARED_TOKENS, len(ids)) - 1, 0, -1):
        node = level.get((salt, ids[:length]))
        if node and node.children:
            return node
    return None
