"""Draws the next token of each candidate, keyed by (seed, candidate, step) and nothing else.

A candidate's draw depends neither on its row nor on other rows, so a prune changes no survivor.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrej.contracts import Sampling
from specrej.inference.sizes import DRAW_BLOCK, rows_at_once

# top_p usually needs far fewer tokens than this; a full sort is the fallback.
_NUCLEUS_GUESS = 256


def sample(
    logits: Tensor,
    sampling: Sampling,
    candidate_ids: list[int],
    step: int,
    forbidden: Collection[int] = (),
) -> tuple[Tensor, Tensor]:
    """Next tokens [rows] and their log-probabilities [rows] under the untouched distribution.

    logits: float32 [rows, vocabulary]; step: 0 for a candidate's first token; `forbidden` tokens
    are not drawn.
    """
    uncut = sampling.top_p == 1 and not 0 < sampling.top_k < logits.shape[1]
    if logits.device.type == "cpu" and (uncut or sampling.temperature == 0):
        # Imported here: other devices do not need numba.
        from generator_service import cpu_sampling

        uniform = None
        if sampling.temperature:
            uniform = uniforms(sampling.seed, candidate_ids, step, logits.device)
        return cpu_sampling.draw(logits, sampling.temperature, uniform, forbidden)
    block = rows_at_once(logits.shape[1], logits.device.type)
    parts = [
        _sample_block(part, sampling, candidate_ids[at * block : (at + 1) * block], step, forbidden)
        for at, part in enumerate(torch.split(logits, block))
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_block(
    logits: Tensor,
    sampling: Sampling,
    candidate_ids: list[int],
    step: int,
    forbidden: Collection[int],
) -> tuple[Tensor, Tensor]:
    highest = logits.amax(dim=-1, keepdim=True)
    weights = (logits - highest).exp_()
    total = _block_sums(weights).sum(dim=-1)
    allowed = logits
    if forbidden:
        index = torch.tensor(sorted(forbidden), device=logits.device)
        allowed = logits.index_fill(1, index, -torch.inf)
    if sampling.temperature == 0:
        tokens = allowed.argmax(dim=-1)
    else:
        uniform = uniforms(sampling.seed, candidate_ids, step, logits.device)
        if forbidden or sampling.temperature != 1:
            weights = _tempered(allowed, sampling.temperature)
        tokens = _draw(allowed, weights, sampling, uniform)
    chosen = logits.gather(1, tokens[:, None]) - highest
    return tokens, (chosen[:, 0] - total.log()).float()


def uniforms(seed: int, candidate_ids: list[int], step: int, device: torch.device) -> Tensor:
    """One float64 in [0, 1) per candidate: 53 bits of SplitMix64 (Steele et al. 2014)."""
    state = np.full(len(candidate_ids), seed, np.uint64)
    for key in (candidate_ids, [step], [0]):
        state = _mix(state + np.array(key, np.uint64) * _GAMMA + _GAMMA)
    return torch.from_numpy((state >> np.uint64(11)) * 2.0**-53).to(device)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))


def _draw(logits: Tensor, weights: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from the tempered distribution `weights` cut by top_k, then top_p."""
    vocabulary = logits.shape[1]
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    if top_k == vocabulary and sampling.top_p == 1:
        return _invert(weights, uniform)
    if top_k < vocabulary:
        values, tokens = logits.topk(top_k)
        weights = _tempered(values, sampling.temperature)
        enough = sampling.top_p * weights.sum(dim=-1, keepdim=True)
    else:
        enough = sampling.top_p * weights.sum(dim=-1, keepdim=True)
        weights, tokens = _heaviest(weights, enough)
    if sampling.top_p < 1:
        weights = _nucleus(weights, enough)
    return tokens.gather(1, _invert(weights, uniform)[:, None])[:, 0]


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Weights exp(logits / temperature), scaled so that a row's largest is 1: none overflows."""
    weights = logits - logits.amax(dim=-1, keepdim=True)
    if temperature != 1:
        weights /= temperature
    return weights.exp_()


def _heaviest(weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and their tokens, descending: as many as hold `enough` [rows, 1] in every row."""
    values, tokens = weights.topk(min(_NUCLEUS_GUESS, weights.shape[1]))
    if bool((values.sum(dim=-1, keepdim=True) < enough).any()):
        values, tokens = weights.sort(dim=-1, descending=True)
    return values, tokens


def _nucleus(descending: Tensor, enough: Tensor) -> Tensor:
    """Zero all but the smallest prefix that reaches `enough` [rows, 1]; the first always stays."""
    before = descending.cumsum(dim=-1) - descending
    return descending.masked_fill(before >= enough, 0.0)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """[rows]: index at which the running sum of `weights` [rows, m] exceeds `uniform` of the total.

    First the block, then the token in it, so that the running sum of a vocabulary is not stored.
    """
    sums = _block_sums(weights)
    running = sums.cumsum(dim=-1)
    target = uniform[:, None] * running[:, -1:]
    block = _pass(sums, running, target)
    before = running.gather(1, block) - sums.gather(1, block)
    inside = block * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=weights.device)
    within = weights.gather(1, inside.clamp(max=weights.shape[1] - 1)).double()
    within.masked_fill_(inside >= weights.shape[1], 0.0)
    at = _pass(within, within.cumsum(dim=-1), target - before)
    return (block * DRAW_BLOCK + at)[:, 0]


def _block_sums(weights: Tensor) -> Tensor:
    """Float64 [rows, blocks]."""
    return torch.cat([part.sum(dim=-1) for part in _blocks(weights)], dim=-1).double()


def _blocks(weights: Tensor) -> list[Tensor]:
    """Views [rows, blocks, DRAW_BLOCK] of the whole blocks and [rows, 1, rest] of the rest."""
    whole = weights.shape[1] // DRAW_BLOCK * DRAW_BLOCK
    blocks = torch.unflatten(weights[:, :whole], 1, (whole // DRAW_BLOCK, DRAW_BLOCK))
    return [part for part in (blocks, weights[:, None, whole:]) if part.numel()]


def _pass(weights: Tensor, running: Tensor, target: Tensor) -> Tensor:
    """First index at which the running sum exceeds the target, [rows, 1]; its weight is > 0."""
    index = torch.searchsorted(running, target, right=True)
    # Rounding may move a target past the end: then the last index of positive weight.
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(index, last)
