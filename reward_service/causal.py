"""A decoder-only reward model that keeps keys and values of what it has read.

Of a text that it has scored before, only the new tokens are computed. Knows token ids, no text, no
wire and no threads; imports without grpc.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.attention import PrefillSegment, Segment
from inference.kv import PromptKV
from inference.model import SegmentedModel
from reward_service.prefixes import match

# Rows of one sequence that are attended to at once: bounds the memory for their scores.
_CHUNK_TOKENS = 512

# Stores have room for a few more tokens than they are made for, so that not every round moves them.
_ROOM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text's tokens; what stands behind the first `keep` belongs to no longer text."""

    key: int
    token_ids: Sequence[int]
    keep: int


@dataclass(slots=True)
class _Own:
    """What is known of one text: its tokens after the first `shared` ones of the prompt."""

    shared: int
    token_ids: Sequence[int]
    store: PromptKV


@dataclass(eq=False, slots=True)
class KeptPrefixes:
    """What is kept of one prompt's texts."""

    prompt_ids: Sequence[int]
    prompt: PromptKV | None = None
    own: dict[int, _Own] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Room that is taken, in tokens."""
        prompt = self.prompt.num_tokens if self.prompt else 0
        return prompt + sum(each.store.num_tokens for each in self.own.values())

    def forget(self) -> None:
        """Free all of it; what is asked for again is computed again."""
        self.prompt = None
        self.own.clear()


@dataclass(frozen=True, slots=True)
class _Work:
    """Tokens to compute, from position `start` on; they go to the last of `pieces`."""

    pieces: tuple[PromptKV, ...]
    token_ids: Sequence[int]
    start: int
    offset: int
    scored: bool  # whether the last one's score is asked for

    def chunks(self) -> Iterator[_Work]:
        """In parts that are attended to at once."""
        for at in range(0, len(self.token_ids), _CHUNK_TOKENS):
            part = self.token_ids[at : at + _CHUNK_TOKENS]
            is_last = at + len(part) == len(self.token_ids)
            scored = self.scored and is_last
            yield _Work(self.pieces, part, self.start + at, self.offset + at, scored)


class CausalScorer(SegmentedModel):
    """A sequence classifier; keeps up to `capacity` tokens of all sessions, the latest used."""

    def __init__(self, model: PreTrainedModel, token_budget: int, capacity: int) -> None:
        """Takes over `model`; `token_budget`: most tokens per forward pass.

        Raises:
            ValueError: its layers do not all keep plain keys and values.
        """
        super().__init__(model)
        self._token_budget = token_budget
        self._capacity = capacity
        self._sessions: OrderedDict[KeptPrefixes, None] = OrderedDict()  # last used last

    @property
    def num_kept_tokens(self) -> int:
        """Room that all sessions take, in tokens."""
        return sum(session.num_tokens for session in self._sessions)

    def close(self, session: KeptPrefixes) -> None:
        """Free what a session keeps; it may go on, and computes everything again."""
        session.forget()
        self._sessions.pop(session, None)

    def score(self, session: KeptPrefixes, sequences: Sequence[Tokens]) -> tuple[list[Tensor], int]:
        """The hidden state [hidden] at each sequence's last token, and the tokens computed for it.

        Texts of earlier calls that are not among the sequences' keys are forgotten.
        """
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        wanted = {sequence.key for sequence in sequences}
        for key in [key for key in session.own if key not in wanted]:
            del session.own[key]
        states: list[Tensor] = []
        num_computed = 0
        try:
            for batch in self._batches(session, sequences):
                states += self._states(batch)
                num_computed += sum(len(work.token_ids) for work in batch)
                self._fit(session)
        except BaseException:
            self.close(session)  # it counts on tokens that were not computed
            raise
        return states, num_computed

    def _batches(self, session: KeptPrefixes, sequences: Sequence[Tokens]) -> Iterator[list[_Work]]:
        """What is left to compute, in forward passes' worth, each when the last one has run."""
        batch: list[_Work] = []
        num_tokens = 0
        for work in self._work(session, sequences):
            for chunk in work.chunks():
                if batch and num_tokens + len(chunk.token_ids) > self._token_budget:
                    yield batch
                    batch, num_tokens = [], 0
                batch.append(chunk)
                num_tokens += len(chunk.token_ids)
        yield batch

    def _work(self, session: KeptPrefixes, sequences: Sequence[Tokens]) -> Iterator[_Work]:
        prompt = session.prompt_ids[:1]
        is_used = prompt and any(each.token_ids[:1] == prompt for each in sequences)
        if session.prompt is None and is_used:  # texts that are cut to the model's limit have none
            session.prompt = PromptKV(self.shape, len(session.prompt_ids))
            yield _Work((session.prompt,), session.prompt_ids, 0, 0, scored=False)
        for sequence in sequences:
            yield self._continue(session, sequence)

    def _continue(self, session: KeptPrefixes, sequence: Tokens) -> _Work:
        """What of a sequence is not known yet; afterwards, as much of it as is to be kept is."""
        known = session.own.get(sequence.key)
        shared, own_ids = (known.shared, known.token_ids) if known else (0, ())
        prompt_ids = session.prompt_ids if session.prompt else ()
        found = match(sequence.token_ids, prompt_ids, shared, own_ids)
        room = len(sequence.token_ids) - found.shared
        store = known.store if known else PromptKV(self.shape, 0)
        if store.num_tokens < room:
            store = store.grown(-(-room // _ROOM_TOKENS) * _ROOM_TOKENS, filled=found.own)
        kept = sequence.token_ids[found.shared : sequence.keep]
        session.own[sequence.key] = _Own(found.shared, kept, store)
        shared_pieces = (
            (session.prompt.head(found.shared),) if session.prompt and found.shared else ()
        )
        rest = sequence.token_ids[found.total :]
        return _Work((*shared_pieces, store), rest, found.total, found.own, scored=True)

    @torch.inference_mode()
    def _states(self, batch: Sequence[_Work]) -> list[Tensor]:
        """Hidden states [hidden] of what is scored, in order."""
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        last: list[int] = []
        for work in batch:
            count = len(work.token_ids)
            token_ids += work.token_ids
            positions += range(work.start, work.start + count)
            segments.append(PrefillSegment(work.pieces, work.start, work.offset, count))
            if work.scored:
                last.append(len(token_ids) - 1)
        network: Any = self._model.base_model
        output = self._run(network, token_ids, positions, segments)
        return list(output.last_hidden_state[0, last])

    def _fit(self, session: KeptPrefixes) -> None:
        """Forget the sessions used longest ago until the rest fits; at last, this one's texts."""
        while self.num_kept_tokens > self._capacity:
            oldest = next(iter(self._sessions))
            if oldest is session:
                session.own.clear()
                return
            self.close(oldest)
