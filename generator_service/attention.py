"""Attention over a shared prompt and dense suffixes, as transformers' attention function.

One forward pass carries the rows of several sessions; the linear layers see them all together,
this function sees each session's rows as a segment. Knows tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from generator_service.kv import PromptKV, SuffixKV

NAME = "specrej"


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Some consecutive tokens of a prompt, from position `start`; all earlier ones are stored."""

    prompt: PromptKV
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class DecodeSegment:
    """The newest token of each live candidate of a session."""

    prompt: PromptKV
    suffix: SuffixKV

    @property
    def num_rows(self) -> int:
        return self.suffix.live


Segment = PrefillSegment | DecodeSegment


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a model's attention does to its scores; `window` counts the query's own position."""

    scale: float
    softcap: float | None
    window: int | None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    segments: list[Segment],
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of R rows, R = sum of the segments' rows, batch 1.

    query [1, heads, R, d]; key, value [1, kv_heads, R, d]; returns [1, R, heads, d].
    Stores keys and values in the segments before attending to them.

    Raises:
        NotImplementedError: the model uses attention sinks.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not supported")
    scaled = Scaling(scaling, softcap, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows = [segment.num_rows for segment in segments]
    outputs = []
    for segment, q, k, v in zip(
        segments,
        torch.split(query[0], rows, dim=1),
        torch.split(key[0], rows, dim=1),
        torch.split(value[0], rows, dim=1),
        strict=True,
    ):
        if isinstance(segment, PrefillSegment):
            segment.prompt.write(layer, segment.start, k, v)
            outputs.append(_prefill(segment, layer, q, scaled))
        else:
            segment.suffix.write(layer, k.transpose(0, 1), v.transpose(0, 1))
            outputs.append(_decode(segment, layer, q.transpose(0, 1), scaled))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.unsqueeze(0), None


def _prefill(segment: PrefillSegment, layer: int, query: Tensor, scaled: Scaling) -> Tensor:
    """Causal attention of a chunk to the prompt so far.

    query [heads, chunk, d]; returns [chunk, heads, d].
    """
    heads, chunk, dim = query.shape
    end = segment.start + chunk
    keys = segment.prompt.keys[layer][:, :end]
    values = segment.prompt.values[layer][:, :end]
    kv_heads = keys.shape[0]
    grouped = query.reshape(kv_heads, -1, dim)  # [kv_heads, group * chunk, d]
    scores = _capped(torch.bmm(grouped, keys.transpose(1, 2)), scaled)
    scores = scores.view(kv_heads, -1, chunk, end)
    scores.masked_fill_(_hidden(segment.start, chunk, scaled.window, query.device), -torch.inf)
    weights = _softmax(scores).view(kv_heads, -1, end)
    return torch.bmm(weights, values).view(heads, chunk, dim).transpose(0, 1)


def _hidden(start: int, chunk: int, window: int | None, device: torch.device) -> Tensor:
    """[chunk, start + chunk], True where a key lies after its query or before the window."""
    queries = torch.arange(start, start + chunk, device=device)[:, None]
    keys = torch.arange(start + chunk, device=device)[None, :]
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)


def _decode(segment: DecodeSegment, layer: int, query: Tensor, scaled: Scaling) -> Tensor:
    """Attention of one new token per live row, query [live, heads, d], to prompt and own suffix.

    Scores of both parts stand side by side under one softmax, so that the split is exact. All rows
    are at one position, so a sliding window only shortens both parts.
    """
    prompt, suffix = segment.prompt, segment.suffix
    live, heads, dim = query.shape
    length = suffix.length + 1
    first = 0 if scaled.window is None else max(0, prompt.num_tokens + length - scaled.window)
    own_first = max(0, first - prompt.num_tokens)
    shared_keys = prompt.keys[layer][:, first:]  # [kv_heads, shared, d]
    shared_values = prompt.values[layer][:, first:]
    # Only the tokens that are set: beyond them lies uninitialised memory.
    own_keys = suffix.keys(layer)[:live, :, own_first:length].flatten(
        0, 1
    )  # [live*kv_heads, own, d]
    own_values = suffix.values(layer)[:live, :, own_first:length].flatten(0, 1)
    kv_heads, shared = shared_keys.shape[:2]
    group = heads // kv_heads

    # The shared part is one dense product per head for all rows together.
    by_head = query.view(live, kv_heads, group, dim).transpose(0, 1)
    by_head = by_head.reshape(kv_heads, live * group, dim)
    shared_scores = torch.bmm(by_head, shared_keys.transpose(1, 2))
    own_scores = torch.bmm(query.reshape(live * kv_heads, group, dim), own_keys.transpose(1, 2))
    scores = torch.cat(
        (
            shared_scores.view(kv_heads, live, group, shared).transpose(0, 1),
            own_scores.view(live, kv_heads, group, length - own_first),
        ),
        dim=-1,
    )
    weights = _softmax(_capped(scores, scaled))  # [live, kv_heads, group, shared + own]
    shared_weights = weights[..., :shared].transpose(0, 1).reshape(kv_heads, live * group, shared)
    own_weights = weights[..., shared:].flatten(0, 1)  # [live * kv_heads, group, own]
    output = torch.bmm(own_weights, own_values).view(live, kv_heads, group, dim)
    shared_output = torch.bmm(shared_weights, shared_values)  # [kv_heads, live * group, d]
    output += shared_output.view(kv_heads, live, group, dim).transpose(0, 1)
    return output.view(live, heads, dim)


def _capped(scores: Tensor, scaled: Scaling) -> Tensor:
    scores *= scaled.scale
    return (
        scores if scaled.softcap is None else torch.tanh(scores / scaled.softcap) * scaled.softcap
    )


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
