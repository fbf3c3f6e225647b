"""Keyed draws inside vLLM: runs in its worker, after the forward pass, before its own sampler.

vLLM seeds a request's generator once and steps it per token, so a candidate's tokens would depend
on how they are divided into requests. Here each token is drawn as the own engine draws it, keyed by
(seed, candidate, step), and made the only possible one for vLLM's sampler. Logits processors are an
interface of vLLM's first model runner; the second one has another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from generator_service.engine.grammar import CompiledGrammar, Matchers, TokenizerSpec, Vocabulary
from generator_service.engine.sampling import Adjustment, is_adjusted, sample
from specrej.contracts import Sampling, TokenBias

# The keys of a request's extra arguments. A session's requests have its first PROMPT_TOKENS in
# common (vllm_prompts.py).
SESSION, PROMPT_TOKENS = "session", "prompt_tokens"
_DRAW, _CANDIDATE, _STEP = "draw", "candidate", "step"

# The numbers of a Sampling.
_FIELDS = [item.name for item in fields(Sampling) if isinstance(item.default, (int, float))]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Session:
    """What the rows of a session have in common: one object, so that they are grouped by it."""

    sampling: Sampling
    ends: tuple[int, ...]  # not drawn before min_tokens
    adjustment: Adjustment | None = None
    matchers: Matchers | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in the batch; `made` is vLLM's own list of its tokens so far, and grows."""

    session: _Session
    candidate: int
    first_step: int
    made: Sequence[int]
    # The candidate's tokens of earlier requests, only for an adjustment or a grammar.
    before: Sequence[int] = ()


def common_arguments(
    session: str,
    prompt_tokens: int,
    sampling: Sampling,
    ends: Sequence[int],
    bad_words: Sequence[Sequence[int]] = (),
    grammar: str = "",
) -> dict[str, Any]:
    """What a session's requests have in common.

    `ends` are tokens that are not drawn before min_tokens, and that end a `grammar`.
    """
    draw = {
        **{name: getattr(sampling, name) for name in _FIELDS},
        "ends": list(ends),
        "logit_bias": [(item.token_id, item.bias) for item in sampling.logit_bias],
        "bad_words": [list(word) for word in bad_words],
        "grammar": grammar,
    }
    # A text: vLLM checks and sends every request's arguments item by item.
    return {SESSION: session, PROMPT_TOKENS: prompt_tokens, _DRAW: json.dumps(draw)}


def arguments(common: Mapping[str, Any], candidate: int, step: int) -> dict[str, Any]:
    """A request's extra arguments: its candidate, and the step of its first token."""
    return {**common, _CANDIDATE: candidate, _STEP: step}


class KeyedDraws(LogitsProcessor):  # type: ignore[misc]
    """Gives the drawn token an infinite logit, which vLLM's greedy sampler then takes."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        # While some of its rows are in the batch.
        self._sessions: WeakValueDictionary[str, _Session] = WeakValueDictionary()
        self._compiled = vllm_config and _compiler(vllm_config.model_config)
        self._certain = torch.tensor(torch.inf, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: Tensor) -> Tensor:
        """logits: float32 [requests, vocabulary], changed in place.

        Never waits for a GPU, unless top_p, a grammar or an adjustment needs it.
        """
        groups: dict[tuple[_Session, int], list[int]] = {}
        for index in range(len(logits)):
            if row := self._rows.get(index):
                step = row.first_step + len(row.made)
                groups.setdefault((row.session, step), []).append(index)
        for (session, step), indices in groups.items():
            rows = torch.tensor(indices).to(logits.device, non_blocking=True)
            part = logits if len(indices) == len(logits) else logits[rows]
            ids = [self._rows[index].candidate for index in indices]
            sampling, adjustment, matchers = session.sampling, session.adjustment, session.matchers
            texts = [_text(self._rows[i]) for i in indices] if adjustment or matchers else ()
            forbidden, allowed = session.ends if step < sampling.min_tokens else (), None
            if matchers:
                allowed, forbidden = matchers.allowed(ids, texts, forbidden), ()
            tokens, _ = sample(part, sampling, ids, step, forbidden, adjustment, texts, allowed)
            logits[rows, tokens] = self._certain
        return logits

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, made: list[int]
    ) -> _Row | None:
        """`prompt` contains the candidate's tokens of earlier requests."""
        given = params.extra_args or {}
        if _DRAW not in given:
            return None
        assert prompt is not None
        length = given[PROMPT_TOKENS]
        session = self._sessions.get(given[SESSION])
        if session is None:
            session = self._session(json.loads(given[_DRAW]), prompt[:length])
            self._sessions[given[SESSION]] = session
        return _Row(session, given[_CANDIDATE], given[_STEP], made, prompt[length:])

    def _session(self, draw: Any, prompt: list[int]) -> _Session:
        biases = tuple(TokenBias(*pair) for pair in draw["logit_bias"])
        sampling = Sampling(**{name: draw[name] for name in _FIELDS}, logit_bias=biases)
        ends, bad_words, grammar = tuple(draw["ends"]), draw["bad_words"], draw["grammar"]
        is_adjusted_ = is_adjusted(sampling) or bad_words
        return _Session(
            sampling,
            ends,
            Adjustment(sampling, prompt, bad_words) if is_adjusted_ else None,
            self._compiled(grammar, ends).matchers() if grammar else None,
        )


def _text(row: _Row) -> list[int]:
    return [*row.before, *row.made]


def _compiler(config: Any) -> Callable[[str, tuple[int, ...]], CompiledGrammar]:
    """Compiles grammars, which have passed in the generator, with the end tokens of a model."""
    tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
    spec = TokenizerSpec.of(tokenizer, config.get_vocab_size())
    loaded: Any = None
    with suppress(ValueError):  # then the generator refuses structured outputs
        loaded = spec.load()
    vocabulary = lru_cache(maxsize=1)(partial(Vocabulary, loaded))
    # Sessions pause between rounds, and then have no row.
    return lru_cache(maxsize=64)(lambda source, ends: CompiledGrammar.of(source, vocabulary(ends)))
