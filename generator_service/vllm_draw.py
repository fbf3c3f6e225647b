"""Keyed draws inside vLLM: runs in its worker, after the forward pass, before its own sampler.

vLLM seeds a request's generator once and steps it per token, so a candidate's tokens would depend
on how they are divided into requests. Here each token is drawn as the own engine draws it, keyed by
(seed, candidate, step), and made the only possible one for vLLM's sampler. Logits processors are an
interface of vLLM's first model runner; the second one has another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from generator_service.grammar import CompiledGrammar, Matchers, TokenizerSpec, Vocabulary
from generator_service.sampling import Adjustment, is_adjusted, sample
from specrej.contracts import Sampling, TokenBias

# The key of a request's extra arguments.
KEY = "specrej"

# The numbers of a Sampling.
_FIELDS = [item.name for item in fields(Sampling) if isinstance(item.default, (int, float))]


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in the batch; `made` is vLLM's own list of its tokens so far, and grows."""

    sampling: Sampling
    candidate: int
    first_step: int
    ends: tuple[int, ...]  # not drawn before min_tokens
    made: Sequence[int]
    # The candidate's tokens of earlier requests, only for an adjustment or a grammar.
    before: Sequence[int] = ()
    adjustment: Adjustment | None = None
    matchers: Matchers | None = None

    @property
    def step(self) -> int:
        return self.first_step + len(self.made)

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.ends if self.step < self.sampling.min_tokens else ()

    @property
    def text(self) -> list[int]:
        return [*self.before, *self.made]


# What the rows that are drawn together have in common.
_Draw = tuple[Sampling, int, tuple[int, ...], Adjustment | None, Matchers | None]


def arguments(
    sampling: Sampling,
    candidate: int,
    step: int,
    ends: Sequence[int],
    session: str,
    prompt_tokens: int,
    bad_words: Sequence[Sequence[int]] = (),
    grammar: str = "",
) -> dict[str, Any]:
    """A request's extra arguments: its candidate, the step of its first token, and how to draw.

    `ends` are tokens that are not drawn before min_tokens, and that end a `grammar`. The requests
    of a `session` have their first `prompt_tokens` in common (vllm_prompts.py).
    """
    draw = {
        **{name: getattr(sampling, name) for name in _FIELDS},
        "candidate": candidate,
        "step": step,
        "ends": list(ends),
        "session": session,
        "prompt_tokens": prompt_tokens,
        "logit_bias": [(item.token_id, item.bias) for item in sampling.logit_bias],
        "bad_words": [list(word) for word in bad_words],
        "grammar": grammar,
    }
    return {KEY: draw}


class KeyedDraws(LogitsProcessor):  # type: ignore[misc]
    """Gives the drawn token an infinite logit, which vLLM's greedy sampler then takes."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        # Of a session, which its rows share: while some are in the batch.
        self._adjustments: WeakValueDictionary[str, Adjustment] = WeakValueDictionary()
        self._matchers: WeakValueDictionary[str, Matchers] = WeakValueDictionary()
        self._compiled = vllm_config and _compiler(vllm_config.model_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: Tensor) -> Tensor:
        """logits: float32 [requests, vocabulary], changed in place."""
        groups: dict[_Draw, list[int]] = {}
        for index in range(len(logits)):
            if row := self._rows.get(index):
                draw = (row.sampling, row.step, row.forbidden, row.adjustment, row.matchers)
                groups.setdefault(draw, []).append(index)
        for (sampling, step, forbidden, adjustment, matchers), indices in groups.items():
            part = logits if len(indices) == len(logits) else logits[indices]
            ids = [self._rows[index].candidate for index in indices]
            needs_texts = adjustment or matchers
            texts = [self._rows[index].text for index in indices] if needs_texts else ()
            allowed = None
            if matchers:
                allowed, forbidden = matchers.allowed(ids, texts, forbidden), ()
            tokens, _ = sample(part, sampling, ids, step, forbidden, adjustment, texts, allowed)
            logits[torch.tensor(indices, device=logits.device), tokens] = torch.inf
        return logits

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, made: list[int]
    ) -> _Row | None:
        """`prompt` contains the candidate's tokens of earlier requests."""
        draw = (params.extra_args or {}).get(KEY)
        if draw is None:
            return None
        biases = tuple(TokenBias(*pair) for pair in draw["logit_bias"])
        sampling = Sampling(**{name: draw[name] for name in _FIELDS}, logit_bias=biases)
        is_adjusted_ = is_adjusted(sampling) or draw["bad_words"]
        row = _Row(sampling, draw["candidate"], draw["step"], tuple(draw["ends"]), made)
        if not (is_adjusted_ or draw["grammar"]):
            return row
        assert prompt is not None
        prompt, before = prompt[: draw["prompt_tokens"]], prompt[draw["prompt_tokens"] :]
        return replace(
            row,
            before=before,
            adjustment=self._adjustment(draw, sampling, prompt) if is_adjusted_ else None,
            matchers=self._matchers_of(draw) if draw["grammar"] else None,
        )

    def _adjustment(self, draw: Any, sampling: Sampling, prompt: list[int]) -> Adjustment:
        adjustment = self._adjustments.get(draw["session"])
        if adjustment is None:
            adjustment = Adjustment(sampling, prompt, draw["bad_words"])
            self._adjustments[draw["session"]] = adjustment
        return adjustment

    def _matchers_of(self, draw: Any) -> Matchers:
        matchers = self._matchers.get(draw["session"])
        if matchers is None:
            grammar = self._compiled(draw["grammar"], tuple(draw["ends"]))
            matchers = self._matchers[draw["session"]] = grammar.matchers()
        return matchers


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
