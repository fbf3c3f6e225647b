"""One session of the own engine: its prompt, its candidates and their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from generator_service.admission import Demand, own_slots
from generator_service.engine import commands
from generator_service.engine.grammar import Matchers
from generator_service.engine.prompt_tree import RadixNode
from generator_service.engine.sampling import Adjustment, is_adjusted
from specrej.contracts import Forks
from specrej_models.attention import DecodeSegment, PrefillSegment, Segment
from specrej_models.kv import PromptKV, SuffixKV


@dataclass(eq=False, slots=True)
class Session:
    """Candidate `rows[i]` is in row i of `suffix`; finished and rejected ones are in neither."""

    id: int
    command: commands.OpenCommand
    opened: Future[commands.Opened] = field(default_factory=Future)
    growing: Future[commands.PrefixBatch] | None = None  # of the round under way
    report: Callable[[commands.PrefixBatch], None] | None = None  # of the round under way
    rate: commands.ReportRate = field(default_factory=commands.ReportRate)
    prompt: RadixNode[PromptKV] | None = None  # the last node of its path; None while it waits
    suffix: SuffixKV = field(init=False)  # set at admission
    is_reading: bool = True  # until the first tokens are drawn
    last_step: int = 0
    rows: list[commands.GrowingCandidate] = field(default_factory=list)
    unreported: list[commands.GrowingCandidate] = field(
        default_factory=list
    )  # live when the round began
    num_tokens: int = 0  # tokens of every live candidate
    until: int = 0
    adjustment: Adjustment | None = field(init=False, default=None)
    matchers: Matchers | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        command = self.command
        if command.grammar:
            self.matchers = command.grammar.matchers()
        if is_adjusted(command.sampling):
            self.adjustment = Adjustment(command.sampling, command.prompt_ids)

    @property
    def prompt_tokens(self) -> int:
        return len(self.command.prompt_ids)

    @property
    def demand(self) -> Demand:
        return self.command.demand(self.prompt_tokens, own_slots)

    def unread(self) -> RadixNode[PromptKV]:
        """The first node of the prompt that is not computed; the last one if all are."""
        assert self.prompt
        return next((node for node in self.prompt.path() if not node.is_computed), self.prompt)

    def chunk(self, room: int) -> PrefillSegment:
        """The next tokens of the prompt to compute, at most `room`; its last one again if none."""
        node = self.unread()
        stored = node.is_computed
        offset = len(node.tokens) - 1 if stored else node.computed
        left = len(node.tokens) - offset
        count = min(room, left)
        if node.end == self.prompt_tokens and count == left > 1:
            # First draws depend on the prompt's last token. It is computed alone, as it is for a
            # stored prompt: together with others its logits would differ in their last bits.
            count -= 1
        return PrefillSegment(_stores(node), node.start + offset, offset, count, stored)

    def decode_rows(self) -> DecodeSegment:
        """The newest token of each live candidate."""
        assert self.prompt
        return DecodeSegment(_stores(self.prompt), self.suffix)

    def keep(self, ids: Collection[int], forks: Forks, share: int) -> None:
        """Reject every live candidate not in `ids`, and make the forks, for which there is
        room in a share of `share` slots."""
        by_id = {candidate.id: row for row, candidate in enumerate(self.rows)}
        kept = [row for row, candidate in enumerate(self.rows) if candidate.id in ids]
        if not forks and len(kept) == len(self.rows):
            return
        if self.matchers:
            self.matchers.keep(by_id.keys() & set(ids), forks)
        forked = [self.rows[by_id[parent]].fork(number) for number, parent in forks.items()]
        self.suffix.keep([*kept, *(by_id[parent] for parent in forks.values())], share)
        self.rows = [*(self.rows[row] for row in kept), *forked]
        self.unreported = [c for c in self.unreported if c.finish or c.id in ids]
        self.unreported = sorted([*self.unreported, *forked], key=lambda candidate: candidate.id)

    def drop_finished(self) -> int:
        """Remove the finished candidates, into whose rows the last ones move; their number."""
        before = len(self.rows)
        for row in reversed(range(before)):
            if self.rows[row].finish:
                self.suffix.drop(row)
                self.rows[row] = self.rows[-1]
                self.rows.pop()
        return before - len(self.rows)

    def reserve(self, share: int) -> None:
        """Make room for one more token per row in a share of so many slots.

        Raises:
            MemoryError, RuntimeError: the memory cannot be allocated.
        """
        if self.suffix.length == self.suffix.tokens_room:
            most, longest = share // self.suffix.live, self.command.sampling.max_tokens - 1
            # At least double the room: each enlargement copies all tokens.
            wanted = min(max(self.until - 1, 2 * self.suffix.length), longest, most)
            # At the limit, the whole share: later rounds have fewer rows and more tokens in it.
            self.suffix.reserve(wanted, slots=share if wanted == most else 0)


def prompt_chunks(
    sessions: Iterable[Session], read: Sequence[tuple[Session, Segment]], most: int
) -> Iterator[tuple[Session, PrefillSegment]]:
    """Chunks of the first unread prompts, with those of `read` at most `most` tokens; a node that
    several share is read by one of them."""
    being_read: set[RadixNode[PromptKV]] = set()
    for session in sessions:
        room = most - sum(segment.num_rows for _, segment in read)
        if session.is_reading and room:
            node = session.unread()
            if node.is_computed or node not in being_read:
                being_read.add(node)
                yield session, session.chunk(room)


def _stores(node: RadixNode[PromptKV]) -> tuple[PromptKV, ...]:
    return tuple(node.store for node in node.path())
