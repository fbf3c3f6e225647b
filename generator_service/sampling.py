"""Draws the next token of each candidate, keyed by (seed, candidate, step) and nothing else.

A candidate's draw does not depend on its row or on who else is in the batch, so survivors of a
prune go on exactly as they would have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrej.contracts import Sampling

# Most of the probability usually lies in far fewer tokens; a full sort is the fallback.
_NUCLEUS_GUESS = 256


def sample(
    logits: Tensor, sampling: Sampling, candidate_ids: list[int], step: int
) -> tuple[Tensor, Tensor]:
    """Next tokens [rows] and their log-probabilities [rows] under the untouched distribution.

    logits: float32 [rows, vocabulary]; step: 0 for a candidate's first token.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        uniform = uniforms(sampling.seed, candidate_ids, step, logits.device)
        tokens = _draw(logits, sampling, uniform)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, chosen - torch.logsumexp(logits, dim=-1)


def uniforms(seed: int, candidate_ids: list[int], step: int, device: torch.device) -> Tensor:
    """One float64 in [0, 1) per candidate: 53 bits of SplitMix64 (Steele et al. 2014)."""
    ids = torch.tensor(candidate_ids, dtype=torch.int64, device=device)
    state = torch.full_like(ids, seed)
    for key in (ids, torch.full_like(ids, step), torch.zeros_like(ids)):
        state = _mix(state + key * _GAMMA + _GAMMA)
    return _shift(state, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX1
    state = (state ^ _shift(state, 27)) * _MIX2
    return state ^ _shift(state, 31)


def _draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from the tempered distribution cut by top_k, then top_p."""
    vocabulary = logits.shape[1]
    # Shifted before it is divided: a small temperature must not overflow.
    tempered = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    if top_k < vocabulary:
        values, tokens = tempered.topk(top_k)
        picked = _invert(_nucleus(values.softmax(dim=-1), sampling.top_p), uniform)
    elif sampling.top_p < 1:
        probabilities, tokens = _top_of(tempered.softmax(dim=-1), sampling.top_p)
        picked = _invert(_nucleus(probabilities, sampling.top_p), uniform)
    else:
        return _invert(tempered.softmax(dim=-1), uniform)
    return tokens.gather(1, picked[:, None])[:, 0]


def _top_of(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, descending: enough of them to hold `top_p` in every row."""
    vocabulary = probabilities.shape[1]
    values, tokens = probabilities.topk(min(_NUCLEUS_GUESS, vocabulary))
    if bool((values.sum(dim=-1) < top_p).any()):
        values, tokens = probabilities.sort(dim=-1, descending=True)
    return values, tokens


def _nucleus(descending: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest prefix whose sum reaches `top_p`; the first always stays."""
    before = descending.cumsum(dim=-1) - descending
    return descending.masked_fill(before >= top_p, 0.0) if top_p < 1 else descending


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index where the running sum of `weights` [rows, m] passes `uniform` of the total: [rows]."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * running[:, -1:]
    index = torch.searchsorted(running, target, right=True)[:, 0]
    # Rounding may push the target onto the total: take the last index of positive weight then.
    last = (running < running[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
