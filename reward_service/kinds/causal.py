"""Rewards on a decoder-only network, which keeps keys and values of the texts it has computed.

Of a text that grew since it was last computed, only the new tokens are computed. A head's output is
read at each of a text's marks, which are token positions, and kept as well. The kinds of rewards
differ in their head, their marks, and the score that follows from the outputs there; each has a
file of its own. Imports without grpc.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reward_service.conversation import Conversation, Tokens, Turns, load_conversation
from reward_service.reward import Reward, Task, distinct
from reward_service.specs import CausalSpec, Resources
from specrej.contracts import Candidate, Prompt, Scores
from specrej_models.attention import PrefillSegment, Segment
from specrej_models.kv import PromptKV
from specrej_models.model import SegmentedModel
from specrej_models.token_prefix import common_length, match

log = logging.getLogger(__name__)

# Rows of one sequence that are attended to at once: bounds the memory for attention scores.
_CHUNK_TOKENS = 512

# The size of a store is a multiple of this, so that not every round moves it.
_ROOM_TOKENS = 64

# From hidden states [marks, hidden] to outputs [marks, width].
Head = Callable[[Tensor], Tensor]

# The head's outputs [width] at marks, which are positions; None until computed.
Outputs = dict[int, Tensor | None]


@dataclass(slots=True)
class _KeptText:
    """One text's tokens after the first `shared` ones, which are the prompt's."""

    store: PromptKV
    shared: int = 0
    token_ids: Sequence[int] = ()
    outputs: Outputs = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class KeptSession:
    """Keys, values and outputs of a prompt and of the texts that begin with it.

    keeps_texts: False: only the prompt's are kept; is_busy: a task of this session is running, so
    the session must not be evicted.
    """

    turns: Turns
    keeps_texts: bool = True
    is_busy: bool = False
    prompt: PromptKV | None = None
    prompt_outputs: Outputs = field(default_factory=dict)
    texts: dict[int, _KeptText] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.turns.prompt_ids

    @property
    def num_tokens(self) -> int:
        """The size of its stores, in tokens."""
        prompt = self.prompt.num_tokens if self.prompt else 0
        return prompt + sum(text.store.num_tokens for text in self.texts.values())

    def parents(self, sequences: Mapping[int, Tokens]) -> dict[int, int]:
        """For each text that is not kept, the key of the kept text with the most tokens in common.

        The two are neighbors in sorted order, so not all pairs are compared.
        """
        new = [key for key in sequences if key not in self.texts]
        if not new or not self.texts:
            return {}
        # Of the prompt's tokens, those that not all kept texts begin with.
        base = min(kept.shared for kept in self.texts.values())
        ranked = sorted(
            ([*self.prompt_ids[base : kept.shared], *kept.token_ids], key)
            for key, kept in self.texts.items()
        )
        parents: dict[int, int] = {}
        for key in new:
            token_ids = sequences[key].token_ids[base:]
            at = bisect(ranked, (token_ids, -1))
            near = ranked[max(0, at - 1) : at + 1]
            parents[key] = max(near, key=lambda other: common_length(token_ids, other[0]))[1]
        return parents


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens to compute, from position `start` on.

    They are stored in the last of `pieces`, from its token `offset` on. `outputs` are computed at
    the marks that lie in the span.
    """

    pieces: tuple[PromptKV, ...]
    token_ids: Sequence[int]
    start: int
    offset: int
    outputs: Outputs

    @property
    def marks(self) -> list[int]:
        end = self.start + len(self.token_ids)
        return [mark for mark in self.outputs if self.start <= mark < end]

    def chunks(self) -> Iterator[_Span]:
        """Parts that are attended to at once."""
        for at in range(0, len(self.token_ids), _CHUNK_TOKENS):
            part = self.token_ids[at : at + _CHUNK_TOKENS]
            yield _Span(self.pieces, part, self.start + at, self.offset + at, self.outputs)


class CausalReward(SegmentedModel, Reward):
    """Keeps up to `Resources.kept_tokens` tokens of all sessions, the most recently used.

    float32 on a CPU, where neither the batch nor earlier batches change a score by more than 1e-4;
    the checkpoint's own precision on CUDA, where it is a reference.

    A raw text prompt is one user message. A prompt must fit the model's limit, the smaller of the
    tokenizer's and the position embeddings'; if prompt and response together do not, the last
    tokens count, because the responses are what differs.
    """

    def __init__(
        self,
        spec: CausalSpec,
        resources: Resources,
        description: str,
        model: PreTrainedModel,
        head: Head,
        score: Callable[[Tensor], float],
        *,
        marks: Callable[[Tokens], list[int]] | None = None,
        prepare: Callable[[str, bool], str] | None = None,
        conversation: Conversation | None = None,
        digests: dict[str, str] | None = None,
    ) -> None:
        """Takes over `model`.

        score: from the head's outputs at a text's marks, [marks, width]; marks: the positions to
        read, ascending, at least one, the last token's by default; prepare: the response as the
        model is to see it, given whether its turn is closed; digests: of files outside the spec's
        directory.

        Raises:
            ValueError: the model's layers do not all keep plain keys and values.
        """
        super().__init__(model)
        if resources.device != "cpu":
            reason = "torch on CUDA is a reference, each text launches kernels of its own"
            log.warning("reward %s: %s", spec.name, reason)
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources, **(digests or {}))
        self.description = description
        self.token_budget = resources.token_budget
        self.conversation = conversation or load_conversation(spec, model.config)
        self.probe = self.conversation.probe
        self.marks = marks or (lambda tokens: [len(tokens.token_ids) - 1])
        self.prepare = prepare or (lambda text, closed: text)
        self.kept_tokens = 0
        self._head = head
        self._score = score
        self._capacity = resources.kept_tokens
        self._sessions: OrderedDict[KeptSession, None] = OrderedDict()  # last used last

    def open(self, prompt: Prompt, *, once: bool = False) -> KeptSession:
        """A session that keeps what it has computed; with `once`, of the prompt alone.

        Raises:
            InvalidRequest: the model cannot take this prompt.
        """
        return KeptSession(Turns(self.conversation, prompt), keeps_texts=not once)

    def begin(self, session: KeptSession, candidates: Sequence[Candidate]) -> Task:
        """Begin a batch; equal texts are computed once."""
        ends = [self.conversation.turn(candidate) for candidate in candidates]
        unique, where = distinct([(self.prepare(text, closed), closed) for text, closed in ends])
        # The first candidate with each text: of equal keys, a dict keeps the last value.
        firsts = dict(zip(reversed(where), reversed(candidates), strict=True))
        tokenized = session.turns.tokenize(unique)
        sequences = {firsts[place].id: tokens for place, tokens in enumerate(tokenized)}
        return self._task(session, sequences, where)

    @torch.inference_mode()
    def compute(self, spans: Sequence[_Span]) -> None:
        """One forward pass over spans of any sessions."""
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        wanted: list[tuple[Outputs, int]] = []
        for span in spans:
            marks, count = span.marks, len(span.token_ids)
            rows += [len(token_ids) + mark - span.start for mark in marks]
            wanted += [(span.outputs, mark) for mark in marks]
            token_ids += span.token_ids
            positions += range(span.start, span.start + count)
            segments.append(PrefillSegment(span.pieces, span.start, span.offset, count))
        network: Any = self._model.base_model
        states = self._run(network, token_ids, positions, segments).last_hidden_state[0]
        if wanted:
            computed = self._head(states[rows])
            for (outputs, mark), output in zip(wanted, computed, strict=True):
                outputs[mark] = output

    def free(self, session: KeptSession) -> None:
        """Free what a session keeps; if it is used again, it computes everything again."""
        session.prompt = None
        session.prompt_outputs = {}
        session.texts = {}
        session.is_busy = False
        self._sessions.pop(session, None)
        # Not by subtraction: what was reserved for an allocation that failed is in no session.
        self.kept_tokens = sum(other.num_tokens for other in self._sessions)

    def check_integrity(self) -> None:
        """Raises AssertionError unless `kept_tokens` is the size of all stores, within capacity."""
        assert self.kept_tokens == sum(session.num_tokens for session in self._sessions)
        assert self.kept_tokens <= self._capacity

    def _task(
        self,
        session: KeptSession,
        sequences: Mapping[int, Tokens],
        where: Sequence[int],
    ) -> Task:
        """A task for these texts by their keys; what the session keeps of other texts is freed.

        where: each candidate's text, by its place. If one of its passes fails, the session must be
        freed: it counts on all of them.
        """
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        session.is_busy = True
        for tokens in sequences.values():
            tokens.marks = self.marks(tokens)
        parents = session.parents(sequences)
        # First drop texts that are neither in the batch nor copied: copies may need their room.
        self._drop(session, session.texts.keys() - sequences.keys() - {*parents.values()})
        for key, parent in parents.items():
            self._fork(session, key, sequences[key], session.texts[parent])
        self._drop(session, session.texts.keys() - sequences.keys())
        # Each text's own outputs, then the prompt's.
        known: list[ChainMap[int, Tensor | None]] = []

        def finish(num_tokens: int) -> Scores:
            session.is_busy = False
            outputs = [
                torch.stack([cast(Tensor, of_text[mark]) for mark in tokens.marks])
                for of_text, tokens in zip(known, sequences.values(), strict=True)
            ]
            scores = [self._score(of_text) for of_text in outputs]
            return Scores(tuple(scores[place] for place in where), num_tokens)

        spans = self._spans(session, sequences, known)
        return Task(((len(span.token_ids), span) for span in spans), finish)

    def _spans(
        self,
        session: KeptSession,
        sequences: Mapping[int, Tokens],
        known: list[ChainMap[int, Tensor | None]],
    ) -> Iterator[_Span]:
        """What is left to compute; adds each text's outputs, and the prompt's, to `known`."""
        if session.prompt is None:
            yield from self._prompt_spans(session, [*sequences.values()])
        for key, sequence in sequences.items():
            outputs: Outputs = {}
            known.append(ChainMap(outputs, session.prompt_outputs))
            if span := self._rest(session, key, sequence, outputs):
                yield from span.chunks()

    def _prompt_spans(self, session: KeptSession, sequences: Sequence[Tokens]) -> Iterator[_Span]:
        """The prompt, if any text begins with it: those cut to the model's limit do not."""
        prompt_ids = session.prompt_ids
        shared = [common_length(sequence.token_ids, prompt_ids) for sequence in sequences]
        if not max(shared, default=0) or not self._reserve(len(prompt_ids)):
            return
        session.prompt = PromptKV(self.shape, len(prompt_ids))
        pairs = zip(sequences, shared, strict=True)
        marks = {mark for text, count in pairs for mark in text.marks if mark < count}
        outputs = session.prompt_outputs = dict.fromkeys(sorted(marks))
        yield from _Span((session.prompt,), prompt_ids, 0, 0, outputs).chunks()

    def _rest(
        self, session: KeptSession, key: int, sequence: Tokens, outputs: Outputs
    ) -> _Span | None:
        """The part of a text that is not computed yet, in a store that is kept if there is room.

        `outputs` gets the text's own outputs, computed or to be computed by the span. Tokens after
        the last mark are not computed; keys and values of those from `keep` on are not kept.
        """
        kept = session.texts.get(key) or _KeptText(PromptKV(self.shape, 0))
        shared, start = self._match(session, sequence, kept, outputs)
        end, token_ids = sequence.marks[-1] + 1, sequence.token_ids
        if start == end:
            return None
        keeps = session.keeps_texts and min(sequence.keep, end) > shared
        store = self._grown(kept.store, end - shared, start - shared) if keeps else None
        if store:
            kept_ids = token_ids[shared : min(sequence.keep, end)]
            session.texts[key] = _KeptText(store, shared, kept_ids, outputs)
        else:
            self._drop(session, session.texts.keys() & {key})
            store = kept.store.grown(end - shared, start - shared)
        outputs |= dict.fromkeys(mark for mark in sequence.marks if mark >= start)
        pieces = (session.prompt.head(shared), store) if session.prompt and shared else (store,)
        return _Span(pieces, token_ids[start:end], start, start - shared, outputs)

    def _drop(self, session: KeptSession, keys: Collection[int]) -> None:
        for key in keys:
            self.kept_tokens -= session.texts.pop(key).store.num_tokens

    def _fork(self, session: KeptSession, key: int, sequence: Tokens, kept: _KeptText) -> None:
        """Let a new text begin with a copy of a kept one, if they have own tokens in common.

        Before any span is made: spans of other texts write into the stores that are copied.
        """
        common = match(sequence.token_ids, session.prompt_ids, kept.shared, kept.token_ids)[1]
        own, room = common - kept.shared, kept.store.num_tokens
        if own > 0 and self._reserve(room):
            store, outputs = kept.store.grown(room, own), dict(kept.outputs)
            session.texts[key] = _KeptText(store, kept.shared, kept.token_ids[:own], outputs)

    def _match(
        self, session: KeptSession, sequence: Tokens, kept: _KeptText, outputs: Outputs
    ) -> tuple[int, int]:
        """How many tokens of a text are the prompt's, and how many need no computation: those
        before the first mark without an output. Computed outputs are added to `outputs`."""
        prompt_ids = session.prompt_ids if session.prompt else ()
        token_ids = sequence.token_ids[: sequence.marks[-1] + 1]
        shared, total = match(token_ids, prompt_ids, kept.shared, kept.token_ids)
        for mark in sequence.marks:
            if mark >= total:
                break
            source = session.prompt_outputs if mark < shared else kept.outputs
            if mark not in source:
                return min(shared, mark), mark
            if mark >= shared:
                outputs[mark] = source[mark]
        return shared, total

    def _grown(self, store: PromptKV, room: int, filled: int) -> PromptKV | None:
        """The store with room for `room` tokens, `filled` of them kept; None: no room."""
        if store.num_tokens >= room:
            return store
        rounded = -(-room // _ROOM_TOKENS) * _ROOM_TOKENS
        is_reserved = self._reserve(rounded - store.num_tokens)
        return store.grown(rounded, filled) if is_reserved else None

    def _reserve(self, count: int) -> bool:
        """Reserve `count` tokens; if needed, free idle sessions, least recently used first.

        False if there is no room even then.
        """
        busy = sum(session.num_tokens for session in self._sessions if session.is_busy)
        if busy + count > self._capacity:
            return False  # nor would there be room without the others
        for session in [session for session in self._sessions if not session.is_busy]:
            if self.kept_tokens + count > self._capacity:
                self.free(session)
        self.kept_tokens += count
        return True
