"""Classifiers on a decoder-only network, which keeps keys and values of the texts it has computed.

Of a text that grew since it was last computed, only the new tokens are computed. The head is read
at each text's last token. Imports without grpc.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from reward_service.conversation import Tokens, Turns, load_conversation
from reward_service.reward import Reward, Task, distinct
from reward_service.specs import ClassifierSpec, Resources
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


def num_read(token_ids: Sequence[int], pad_id: int | None) -> int:
    """How many tokens there are up to the last one that is not padding, at least 1.

    Heads are trained on this token (`GenericForSequenceClassification` of transformers). If the end
    token is the padding token, it is not counted either.
    """
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == pad_id:
        length -= 1
    return length


@dataclass(slots=True)
class _KeptText:
    """One text's tokens after the first `shared` ones, which are the prompt's; the head's output
    [labels] at the last of them, None until it is computed."""

    store: PromptKV
    shared: int = 0
    token_ids: Sequence[int] = ()
    output: Tensor | None = None


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

    They are stored in the last of `pieces`, from its token `offset` on. `text` receives the head's
    output at the last of them.
    """

    pieces: tuple[PromptKV, ...]
    token_ids: Sequence[int]
    start: int
    offset: int
    text: _KeptText | None = None

    def chunks(self) -> Iterator[_Span]:
        """Parts that are attended to at once."""
        for at in range(0, len(self.token_ids), _CHUNK_TOKENS):
            part = self.token_ids[at : at + _CHUNK_TOKENS]
            text = self.text if at + _CHUNK_TOKENS >= len(self.token_ids) else None
            yield _Span(self.pieces, part, self.start + at, self.offset + at, text)


class CausalReward(SegmentedModel, Reward):
    """Keeps up to `Resources.kept_tokens` tokens of all sessions, the most recently used.

    float32 on a CPU, where neither the batch nor earlier batches change a score by more than 1e-4;
    the checkpoint's own precision on CUDA, where it is a reference.

    A raw text prompt is one user message. A prompt must fit the model's limit, the smaller of the
    tokenizer's and the position embeddings'; if prompt and response together do not, the last
    tokens count, because the responses are what differs.
    """

    description = "A reward model's logit for the response as the assistant's turn."

    def __init__(
        self,
        spec: ClassifierSpec,
        resources: Resources,
        model: PreTrainedModel,
        head: Tensor,
        pad_id: int | None,
        digest: str = "",
    ) -> None:
        """Takes over `model`, which has no head. head: [labels, hidden]; pad_id: of padding, which
        is not read; digest: of the head's file.

        Raises:
            ValueError: the model's layers do not all keep plain keys and values.
        """
        super().__init__(model)
        if resources.device != "cpu":
            reason = "torch on CUDA is a reference, each text launches kernels of its own"
            log.warning("reward %s: %s", spec.name, reason)
        self.name = spec.name
        self.fingerprint = spec.fingerprint(resources, padding=str(pad_id), head_file=digest)
        self.token_budget = resources.token_budget
        self.conversation = load_conversation(spec, model.config)
        self.kept_tokens = 0
        self._head = head.detach().float().clone()  # else it may keep a whole file in memory
        self._label = spec.label or 0
        self._pad_id = pad_id
        self._capacity = resources.kept_tokens
        self._sessions: OrderedDict[KeptSession, None] = OrderedDict()  # last used last

    def open(self, prompt: Prompt, *, once: bool = False) -> KeptSession:
        """A session that keeps what it has computed; with `once`, of the prompt alone."""
        return KeptSession(Turns(self.conversation, prompt), keeps_texts=not once)

    def begin(self, session: KeptSession, candidates: Sequence[Candidate]) -> Task:
        """Begin a batch; equal texts are computed once."""
        texts = [self.conversation.response(candidate) for candidate in candidates]
        unique, where = distinct(texts)
        # The first candidate with each text: of equal keys, a dict keeps the last value.
        firsts = dict(zip(reversed(where), reversed(candidates), strict=True))
        sequences = {}
        for place, (ids, is_cut) in enumerate(session.turns.tokenize(unique)):
            read = ids[: num_read(ids, self._pad_id)]
            sequences[firsts[place].id] = Tokens(read, is_cut)
        return self._task(session, sequences, where)

    @torch.inference_mode()
    def compute(self, spans: Sequence[_Span]) -> None:
        """One forward pass over spans of any sessions."""
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for span in spans:
            count = len(span.token_ids)
            token_ids += span.token_ids
            positions += range(span.start, span.start + count)
            segments.append(PrefillSegment(span.pieces, span.start, span.offset, count))
            if span.text:
                rows.append(len(token_ids) - 1)
        network: Any = self._model.base_model
        states = self._run(network, token_ids, positions, segments).last_hidden_state[0]
        if rows:
            texts = [span.text for span in spans if span.text]
            outputs = F.linear(states[rows].float(), self._head)
            for text, output in zip(texts, outputs, strict=True):
                text.output = output

    def free(self, session: KeptSession) -> None:
        session.prompt = None
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
        self, session: KeptSession, sequences: Mapping[int, Tokens], where: Sequence[int]
    ) -> Task:
        """A task for these texts by their keys; what the session keeps of other texts is freed.

        where: each candidate's text, by its place. If one of its passes fails, the session must be
        freed: it counts on all of them.
        """
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        session.is_busy = True
        parents = session.parents(sequences)
        # First drop texts that are neither in the batch nor copied: copies may need their room.
        self._drop(session, session.texts.keys() - sequences.keys() - {*parents.values()})
        for key, parent in parents.items():
            self._fork(session, key, sequences[key], session.texts[parent])
        self._drop(session, session.texts.keys() - sequences.keys())
        texts: list[_KeptText] = []  # of the sequences, in their order

        def finish(num_tokens: int) -> Scores:
            session.is_busy = False
            scores = [float(cast(Tensor, text.output)[self._label]) for text in texts]
            return Scores(tuple(scores[place] for place in where), num_tokens)

        spans = self._spans(session, sequences, texts)
        return Task(((len(span.token_ids), span) for span in spans), finish)

    def _spans(
        self, session: KeptSession, sequences: Mapping[int, Tokens], texts: list[_KeptText]
    ) -> Iterator[_Span]:
        """What is left to compute; adds each sequence's text to `texts`."""
        if session.prompt is None:
            yield from self._prompt_spans(session, [*sequences.values()])
        for key, sequence in sequences.items():
            text, span = self._rest(session, key, sequence)
            texts.append(text)
            if span:
                yield from span.chunks()

    def _prompt_spans(self, session: KeptSession, sequences: Sequence[Tokens]) -> Iterator[_Span]:
        """The prompt, if any text begins with it: those cut to the model's limit do not."""
        prompt_ids = session.prompt_ids
        begins = any(common_length(one.token_ids, prompt_ids) for one in sequences)
        if begins and self._reserve(len(prompt_ids)):
            session.prompt = PromptKV(self.shape, len(prompt_ids))
            yield from _Span((session.prompt,), prompt_ids, 0, 0).chunks()

    def _rest(
        self, session: KeptSession, key: int, sequence: Tokens
    ) -> tuple[_KeptText, _Span | None]:
        """A text, and the part of it that is not computed yet, in a store that is kept if there is
        room."""
        kept = session.texts.get(key) or _KeptText(PromptKV(self.shape, 0))
        token_ids, prompt_ids = sequence.token_ids, session.prompt_ids if session.prompt else ()
        shared, start = match(token_ids, prompt_ids, kept.shared, kept.token_ids)
        end = len(token_ids)
        if start == end:
            if kept.output is not None and end == kept.shared + len(kept.token_ids):
                return kept, None
            # All is there but the output, such as that at the prompt's last token.
            start -= 1
            shared = min(shared, start)
        keeps = session.keeps_texts and not sequence.is_cut
        store = self._grown(kept.store, end - shared, start - shared) if keeps else None
        if store:
            text = session.texts[key] = _KeptText(store, shared, token_ids[shared:])
        else:
            self._drop(session, session.texts.keys() & {key})
            text = _KeptText(kept.store.grown(end - shared, start - shared))
        pieces = (session.prompt.head(shared), text.store) if session.prompt and shared else ()
        span = _Span(pieces or (text.store,), token_ids[start:], start, start - shared, text)
        return text, span

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
            store = kept.store.grown(room, own)
            session.texts[key] = _KeptText(store, kept.shared, kept.token_ids[:own])

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
