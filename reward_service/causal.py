"""A decoder-only network that keeps keys and values of what it has read.

Of a text that it has read before, only the new tokens are computed. What is read off a text is a
small vector at each of its marks, which are token positions; these are kept as well. Knows token
ids, no text, no wire and no threads; imports without grpc.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.attention import PrefillSegment, Segment
from inference.kv import PromptKV
from inference.model import SegmentedModel
from inference.slots import SlotLedger
from reward_service.prefixes import Match, common, match

# Rows of one sequence that are attended to at once: bounds the memory for their scores.
_CHUNK_TOKENS = 512

# Stores have room for a few more tokens than they are made for, so that not every round moves them.
_ROOM_TOKENS = 64

# From hidden states [marks, hidden] to what is read there, [marks, width]; also given the token
# after each mark [marks], 0 behind the last one, or if the scorer does not look ahead.
Read = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Value:
    """What is read at a mark, [width], if this token follows; None until it is computed."""

    following: int
    read: Tensor | None = None


Values = dict[int, Value]  # by position

# A text's own values, and behind them the prompt's.
Reading = ChainMap[int, Value]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text's tokens and its marks, ascending, at least one.

    What stands behind the first `keep` tokens belongs to no longer text, and is not kept; what
    stands behind the last mark is not computed.
    """

    key: int
    token_ids: Sequence[int]
    keep: int
    marks: Sequence[int]

    @property
    def end(self) -> int:
        """How many tokens there are to compute."""
        return self.marks[-1] + 1


@dataclass(slots=True)
class _Own:
    """What is known of one text: its tokens after the first `shared` ones of the prompt."""

    shared: int = 0
    token_ids: Sequence[int] = ()
    store: PromptKV | None = None
    values: Values = field(default_factory=dict)

    @property
    def room(self) -> int:
        """In tokens."""
        return self.store.num_tokens if self.store else 0


@dataclass(eq=False, slots=True)
class KeptPrefixes:
    """What is kept of one prompt's texts; `number` tells sessions apart.

    `is_busy`: some of its texts are on their way, so that it must not be forgotten now.
    """

    number: int
    prompt_ids: Sequence[int]
    keeps_texts: bool = True
    is_busy: bool = False
    prompt: PromptKV | None = None
    prompt_values: Values = field(default_factory=dict)
    own: dict[int, _Own] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Room that is taken, in tokens."""
        prompt = self.prompt.num_tokens if self.prompt else 0
        return prompt + sum(each.room for each in self.own.values())


@dataclass(frozen=True, slots=True)
class _Work:
    """Tokens to compute, from position `start` on; they go to the last of `pieces`.

    `values` are to be read at those of its marks that are among these tokens.
    """

    pieces: tuple[PromptKV, ...]
    token_ids: Sequence[int]
    start: int
    offset: int
    values: Values

    @property
    def marks(self) -> list[int]:
        end = self.start + len(self.token_ids)
        return [mark for mark in self.values if self.start <= mark < end]

    def chunks(self) -> Iterator[_Work]:
        """In parts that are attended to at once."""
        for at in range(0, len(self.token_ids), _CHUNK_TOKENS):
            part = self.token_ids[at : at + _CHUNK_TOKENS]
            yield _Work(self.pieces, part, self.start + at, self.offset + at, self.values)


class CausalTask:
    """Some texts of a session on their way."""

    def __init__(
        self,
        works: Iterator[_Work],
        session: KeptPrefixes,
        sequences: Sequence[Tokens],
        read: Sequence[Reading],
    ) -> None:
        """`works` are made when they are needed, and add what is read of each text to `read`."""
        self._works = works
        self._session = session
        self._sequences = sequences
        self._read = read
        self._next = next(works, None)
        self.num_computed = 0

    @property
    def next_tokens(self) -> int:
        return len(self._next.token_ids) if self._next else 0

    def take(self) -> _Work:
        work, self._next = self._next, next(self._works, None)
        assert work
        self.num_computed += len(work.token_ids)
        return work

    def values(self) -> list[Tensor]:
        """What was read at each text's marks, [marks, width]."""
        self._session.is_busy = False
        return [
            torch.stack([_computed(values[mark]) for mark in sequence.marks])
            for values, sequence in zip(self._read, self._sequences, strict=True)
        ]


class CausalScorer(SegmentedModel):
    """Reads texts; keeps up to `capacity` tokens of all sessions, the latest used."""

    def __init__(
        self, model: PreTrainedModel, read: Read, capacity: int, *, looks_ahead: bool = False
    ) -> None:
        """Takes over `model`; `looks_ahead`: what is read depends on the token that follows.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        super().__init__(model)
        self._read = read
        self._looks_ahead = looks_ahead
        self.ledger = SlotLedger(max(1, capacity))
        self._sessions: OrderedDict[KeptPrefixes, None] = OrderedDict()  # last used last
        self._numbers = itertools.count()

    def open(self, prompt_ids: Sequence[int], *, keeps_texts: bool = True) -> KeptPrefixes:
        """A session for texts that begin with these tokens, most of them.

        Without `keeps_texts` only the prompt is kept: no text will come again.
        """
        return KeptPrefixes(next(self._numbers), prompt_ids, keeps_texts)

    def close(self, session: KeptPrefixes) -> None:
        """Free what a session keeps; it may go on, and computes everything again."""
        session.prompt = None
        session.prompt_values = {}
        session.own = {}
        session.is_busy = False
        if session in self._sessions:
            del self._sessions[session]
            self.ledger.close(session.number)

    def task(self, session: KeptPrefixes, sequences: Sequence[Tokens]) -> CausalTask:
        """These texts on their way; what other texts of the session had kept is free.

        If any of its passes fails, the session must be closed: it counts on all of them.
        """
        self._touch(session)
        session.is_busy = True
        wanted = {sequence.key for sequence in sequences}
        for key in [key for key in session.own if key not in wanted]:
            self._give_back(session, session.own.pop(key).room)
        read: list[Reading] = []
        return CausalTask(self._works(session, sequences, read), session, sequences, read)

    @torch.inference_mode()
    def compute(self, works: Sequence[_Work]) -> None:
        """One forward pass over works of any sessions."""
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        wanted: list[Value] = []
        for work in works:
            marks = work.marks
            rows += [len(token_ids) + mark - work.start for mark in marks]
            wanted += [work.values[mark] for mark in marks]
            count = len(work.token_ids)
            token_ids += work.token_ids
            positions += range(work.start, work.start + count)
            segments.append(PrefillSegment(work.pieces, work.start, work.offset, count))
        network: Any = self._model.base_model
        states = self._run(network, token_ids, positions, segments).last_hidden_state[0]
        if wanted:
            following = torch.tensor([value.following for value in wanted], device=states.device)
            for value, read in zip(wanted, self._read(states[rows], following), strict=True):
                value.read = read

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are not about what is kept."""
        self.ledger.check_integrity()
        for session in self._sessions:
            assert self.ledger.owned_by(session.number) == session.num_tokens
        assert self.ledger.owned == sum(session.num_tokens for session in self._sessions)

    def _works(
        self, session: KeptPrefixes, sequences: Sequence[Tokens], read: list[Reading]
    ) -> Iterator[_Work]:
        """What is left to compute, each made when the one before it was taken."""
        if session.prompt is None:
            yield from self._read_prompt(session, sequences)
        for sequence in sequences:
            own: Values = {}
            read.append(ChainMap(own, session.prompt_values))
            if work := self._continue(session, sequence, own):
                yield from work.chunks()

    def _read_prompt(self, session: KeptPrefixes, sequences: Sequence[Tokens]) -> Iterator[_Work]:
        """The prompt, if any text begins with it: those cut to the model's limit do not."""
        prompt_ids = session.prompt_ids
        known = [common(sequence.token_ids, prompt_ids) for sequence in sequences]
        if not max(known, default=0) or not self._take(session, len(prompt_ids)):
            return
        session.prompt = PromptKV(self.shape, len(prompt_ids))
        pairs = zip(sequences, known, strict=True)
        marks = sorted({mark for each, count in pairs for mark in each.marks if mark < count})
        values = session.prompt_values = self._to_read(prompt_ids, marks)
        yield from _Work((session.prompt,), prompt_ids, 0, 0, values).chunks()

    def _continue(self, session: KeptPrefixes, sequence: Tokens, values: Values) -> _Work | None:
        """What of a text is not known yet; afterwards, as much of it as is to be kept is.

        `values` is filled with what is known of the text's own, and will be with the rest.
        """
        known = session.own.get(sequence.key) or _Own()
        found = self._known(session, sequence, known, values)
        token_ids = sequence.token_ids
        if found.total == sequence.end:
            return None
        keeps = session.keeps_texts and min(sequence.keep, sequence.end) > found.shared
        room = sequence.end - found.shared
        store, is_kept = self._store(session, known, room, found.own, keeps=keeps)
        if is_kept:
            kept_ids = token_ids[found.shared : min(sequence.keep, sequence.end)]
            session.own[sequence.key] = _Own(found.shared, kept_ids, store, values)
        else:
            session.own.pop(sequence.key, None)
        values |= self._to_read(token_ids, [m for m in sequence.marks if m >= found.total])
        shared = (session.prompt.head(found.shared),) if session.prompt and found.shared else ()
        rest = token_ids[found.total : sequence.end]
        return _Work((*shared, store), rest, found.total, found.own, values)

    def _known(self, session: KeptPrefixes, sequence: Tokens, known: _Own, values: Values) -> Match:
        """How much of a text need not be computed: up to the first mark that is not known."""
        prompt_ids = session.prompt_ids if session.prompt else ()
        token_ids = sequence.token_ids[: sequence.end]
        found = match(token_ids, prompt_ids, known.shared, known.token_ids)
        asked = self._to_read(sequence.token_ids, sequence.marks)
        for mark, value in asked.items():
            if mark >= found.total:
                break
            source = session.prompt_values if mark < found.shared else known.values
            if mark not in source or source[mark].following != value.following:
                return found.before(mark)
            if mark >= found.shared:
                values[mark] = source[mark]
        return found

    def _to_read(self, token_ids: Sequence[int], marks: Sequence[int]) -> Values:
        """Values at these marks, to be computed."""
        last = len(token_ids) - 1
        return {
            mark: Value(token_ids[mark + 1] if self._looks_ahead and mark < last else 0)
            for mark in marks
        }

    def _store(
        self, session: KeptPrefixes, known: _Own, room: int, filled: int, *, keeps: bool
    ) -> tuple[PromptKV, bool]:
        """Room for so many tokens, the first of them filled; and whether it is kept."""
        if keeps and known.store and known.room >= room:
            return known.store, True
        store = known.store or PromptKV(self.shape, 0)
        rounded = -(-room // _ROOM_TOKENS) * _ROOM_TOKENS
        if keeps and self._take(session, rounded - known.room):
            return store.grown(rounded, filled), True
        if known.room:
            self._give_back(session, known.room)
        return store.grown(room, filled), False

    def _take(self, session: KeptPrefixes, count: int) -> bool:
        """Own so many slots more; idle sessions used longest ago are forgotten for it."""
        self._touch(session)
        while self.ledger.unshared < count:
            oldest = next((each for each in self._sessions if not each.is_busy), None)
            if oldest is None:
                return False
            self.close(oldest)
        self.ledger.widen(session.number, self.ledger.owned_by(session.number) + count, 0)
        self.ledger.take(session.number, count)
        return True

    def _give_back(self, session: KeptPrefixes, count: int) -> None:
        self.ledger.give_back(session.number, count)
        self.ledger.narrow(session.number, 0, 0, 0)

    def _touch(self, session: KeptPrefixes) -> None:
        """Note that a session is used now."""
        if session not in self._sessions:
            self.ledger.admit(session.number, 0, 0, 0)
            self._sessions[session] = None
        self._sessions.move_to_end(session)


def _computed(value: Value) -> Tensor:
    assert value.read is not None, "not computed yet"
    return value.read
