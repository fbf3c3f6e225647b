"""Draws the next token of each candidate, keyed by (seed, candidate, step) and nothing else.

A candidate's draw depends neither on its row nor on other rows, so a prune changes no survivor.

From logits to a draw, in the order of vLLM's sampler: `Adjustment` adds biases and subtracts
penalties; tokens that would end a candidate too early or do not conform to a structured output
(grammar.py) are excluded; the logits are divided by the temperature; min_p, top_k and top_p leave a
set of tokens to draw from. Reported log-probabilities are those of the untouched logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from generator_service.engine.grammar import unpacked
from specrej.contracts import Sampling
from specrej_models.sizes import rows_at_once

# top_p usually needs far fewer tokens than this; a full sort is the fallback.
_NUCLEUS_GUESS = 256


def sample(
    logits: Tensor,
    sampling: Sampling,
    candidate_ids: list[int],
    step: int,
    forbidden: Collection[int] = (),
    adjustment: Adjustment | None = None,
    texts: Sequence[Sequence[int]] = (),
    allowed: NDArray[np.uint32] | None = None,
) -> tuple[Tensor, Tensor]:
    """Next tokens [rows] and their log-probabilities [rows] under the untouched distribution.

    logits: float32 [rows, vocabulary]; step: 0 for a candidate's first token; `forbidden` tokens
    are not drawn; texts: the `step` tokens of each candidate, only for an `adjustment`; allowed:
    `Matchers.allowed`, which leaves at least one token of each row.
    """
    uncut = sampling.top_p == 1 and not (sampling.min_p or 0 < sampling.top_k < logits.shape[1])
    is_plain = adjustment is None and (uncut or sampling.temperature == 0)
    if logits.device.type == "cpu" and is_plain:
        # Imported here: other devices do not need numba.
        from generator_service.engine import cpu_sampling

        uniform = None
        if sampling.temperature:
            uniform = uniforms(sampling.seed, candidate_ids, step, logits.device)
        return cpu_sampling.draw(logits, sampling.temperature, uniform, forbidden, allowed)
    block = rows_at_once(logits.shape[1], logits.device.type)
    parts = []
    for at, part in enumerate(torch.split(logits, block)):
        rows = slice(at * block, (at + 1) * block)
        adjusted = adjustment.apply(part, texts[rows]) if adjustment else part
        if allowed is not None:
            others = torch.from_numpy(~unpacked(allowed[rows], part.shape[1])).to(part.device)
            adjusted = adjusted.masked_fill(others, -torch.inf)
        parts.append(_sample_block(part, adjusted, sampling, candidate_ids[rows], step, forbidden))
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


# Less than any log-probability that matters: JSON has no infinity.
LEAST_LOGPROB = -9999.0


def most_probable(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, count: int
) -> list[tuple[list[int], list[float]]]:
    """The `count` most probable tokens of each row, best first, and their log-probabilities, from
    untouched logits [rows, vocabulary] and what `sample` returned for them."""
    values, ids = logits.topk(min(count, logits.shape[1]))
    total = logits.gather(1, tokens[:, None]) - logprobs[:, None]
    top = (values - total).clamp_(LEAST_LOGPROB, 0.0)
    return list(zip(ids.tolist(), top.tolist(), strict=True))


def is_adjusted(sampling: Sampling) -> bool:
    """Whether draws need an `Adjustment`."""
    return is_penalized(sampling) or bool(sampling.logit_bias)


def is_penalized(sampling: Sampling) -> bool:
    """Whether a token's logit depends on the tokens before it."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return any(penalties) or sampling.repetition_penalty != 1


class Adjustment:
    """What biases and penalties change in logits.

    The work of a step grows with the tokens of the candidates, not with the vocabulary. Nothing is
    kept from step to step, so cuts, forks and failover change no result.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self._sampling = sampling
        repeated = prompt_ids if sampling.repetition_penalty != 1 else ()
        self._prompt = torch.from_numpy(np.unique(np.array(repeated, np.int64)))
        self._biased = torch.tensor([item.token_id for item in sampling.logit_bias])
        self._biases = torch.tensor([item.bias for item in sampling.logit_bias])

    def apply(self, logits: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        """New logits [rows, vocabulary]; texts: equally many tokens of each row."""
        adjusted, device = logits.clone(), logits.device
        if len(self._biased):
            biases = self._biases.to(adjusted).expand(len(texts), -1)
            adjusted.index_add_(1, self._biased.to(device), biases)
        if is_penalized(self._sampling):
            rows, length = len(texts), len(texts[0])
            tokens = itertools.chain.from_iterable(texts)
            made = torch.from_numpy(np.fromiter(tokens, np.int64, rows * length))
            self._penalize(adjusted, made.view(rows, length).to(device))
        return adjusted

    def _penalize(self, logits: Tensor, made: Tensor) -> None:
        """made: int64 [rows, tokens]. A token that is in a row twice is written twice, equally."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            prompt = self._prompt.to(logits.device)
            of_prompt, of_made = logits.index_select(1, prompt), logits.gather(1, made)
            logits.index_copy_(1, prompt, _divided(of_prompt, sampling.repetition_penalty))
            logits.scatter_(1, made, _divided(of_made, sampling.repetition_penalty))
        if sampling.frequency_penalty:
            once = torch.full_like(made, -sampling.frequency_penalty, dtype=logits.dtype)
            logits.scatter_add_(1, made, once)
        if sampling.presence_penalty:
            logits.scatter_(1, made, logits.gather(1, made) - sampling.presence_penalty)


def _divided(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _sample_block(
    logits: Tensor,
    adjusted: Tensor,
    sampling: Sampling,
    candidate_ids: list[int],
    step: int,
    forbidden: Collection[int],
) -> tuple[Tensor, Tensor]:
    if forbidden:
        index = torch.tensor(sorted(forbidden), device=logits.device)
        adjusted = adjusted.index_fill(1, index, -torch.inf)
    if sampling.temperature == 0:
        tokens = adjusted.argmax(dim=-1, keepdim=True)
    else:
        uniform = uniforms(sampling.seed, candidate_ids, step, logits.device)
        tokens = _draw(_weights(adjusted, sampling.temperature), sampling, uniform[:, None])
    chosen = logits.gather(1, tokens) - logits.amax(dim=-1, keepdim=True)
    logprobs = chosen - _total(_weights(logits, 1.0)).log()
    return tokens[:, 0], logprobs[:, 0].float()


def uniforms(seed: int, candidate_ids: list[int], step: int, device: torch.device) -> Tensor:
    """One float64 in [0, 1) per candidate: 53 bits of SplitMix64 (Steele et al. 2014)."""
    state = np.full(len(candidate_ids), seed, np.uint64)
    for key in (candidate_ids, [step], [0]):
        state = _mix(state + np.array(key, np.uint64) * _GAMMA + _GAMMA)
    values = torch.from_numpy((state >> np.uint64(11)) * 2.0**-53)
    return values.to(device, non_blocking=True)  # without waiting for the device's other work


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))


def _draw(weights: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw [rows, 1] from the tempered distribution cut by min_p, top_k, top_p.

    The largest weight of a row is 1, so that min_p is a bound of the weights.
    """
    vocabulary = weights.shape[1]
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    if sampling.min_p:
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    if top_k == vocabulary and sampling.top_p == 1:
        return _invert(weights, uniform)
    share = sampling.top_p if sampling.top_p < 1 else torch.inf
    if top_k < vocabulary:
        values, tokens = weights.topk(top_k)
        return _drawn(values, tokens, share * _total(values), uniform)
    enough = share * _total(weights)
    values, tokens = weights.topk(min(_NUCLEUS_GUESS, vocabulary))
    drawn = _drawn(values, tokens, enough, uniform)
    # Only these rows are drawn again: a sort orders equal weights differently from topk.
    short = (_total(values) < enough)[:, 0]
    if bool(short.any()):
        values, tokens = weights[short].sort(dim=-1, descending=True)
        drawn[short] = _drawn(values, tokens, enough[short], uniform[short])
    return drawn


def _drawn(descending: Tensor, tokens: Tensor, enough: Tensor, uniform: Tensor) -> Tensor:
    """Draw [rows, 1] from the smallest prefixes of weights, whose tokens are `tokens`, that reach
    `enough` [rows, 1]; the first weight is in each of them."""
    excluded = descending.cumsum(dim=-1) - descending >= enough
    excluded[:, 0] = False
    return tokens.gather(1, _invert(descending.masked_fill(excluded, 0.0), uniform))


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Weights exp(logits / temperature), scaled so that a row's largest is 1: none overflows."""
    weights = logits - logits.amax(dim=-1, keepdim=True)
    if temperature != 1:
        weights /= temperature
    return weights.exp_()


def _total(weights: Tensor) -> Tensor:
    """Float64 [rows, 1]. A float32 sum of a single row is divided among threads, which changes its
    last bit."""
    return weights.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index [rows, 1] at which the running sum of `weights` exceeds `uniform` [rows, 1]
    of their total; its weight is above 0. Of weights that are not finite the last index."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[:, -1:]
    # Rounding may move a target to the end: then it is the last index of a weight above 0.
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, below, right=True).clamp_(max=running.shape[1] - 1)
