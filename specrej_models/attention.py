"""Attention over a shared prompt and dense suffixes, as transformers' attention function.

One forward pass carries the rows of several sessions; the linear layers see them all together,
this function sees each session's rows as a segment. Works on tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specrej_models.kv import PromptKV, SuffixKV
from specrej_models.sizes import SCORES_AT_ONCE

NAME = "specrej"


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Some consecutive tokens of a prompt, from position `start`; all earlier ones are stored, or
    are of segments before it in the same pass.

    They belong to the last of `pieces`, from its token `offset` on. `stored`: their keys and values
    are there already, and only the output of the last layer is used.
    """

    pieces: tuple[PromptKV, ...]
    start: int
    offset: int
    num_rows: int
    stored: bool = False


@dataclass(frozen=True, slots=True)
class DecodeSegment:
    """The newest token of each live candidate of a session; `pieces` are its prompt."""

    pieces: tuple[PromptKV, ...]
    suffix: SuffixKV

    @property
    def num_rows(self) -> int:
        return self.suffix.live

    @property
    def position(self) -> int:
        """Where the rows' tokens stand."""
        return sum(piece.num_tokens for piece in self.pieces) + self.suffix.length

    def seen(self, window: int | None) -> tuple[list[tuple[PromptKV, int]], int]:
        """The pieces that the rows see, each from a token on, and their first own token seen.

        All rows stand at one position, so a sliding window only hides the first tokens.
        """
        first = 0 if window is None else max(0, self.position + 1 - window)
        pieces = []
        for piece in self.pieces:
            if first < piece.num_tokens:
                pieces.append((piece, first))
            first = max(0, first - piece.num_tokens)
        return pieces, first


Segment = PrefillSegment | DecodeSegment


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a model's attention does to its scores; `window` counts the query's own position."""

    scale: float
    softcap: float | None
    window: int | None


class Decoder(Protocol):
    """Compiled attention of all rows of one forward pass at once."""

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], output: Tensor, scaled: Scaling
    ) -> None: ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: Sequence[Segment],
    decoder: Decoder | None = None,
    seen: dict[int, Scaling] | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of R rows, R = sum of the segments' rows, batch 1.

    query [1, heads, R, d]; key, value [1, kv_heads, R, d]; returns [1, R, heads, d]. What the model
    applies to the scores is added to `seen`, by layer.

    Raises:
        NotImplementedError: the model uses attention sinks, masks of its own, compressed keys and
            values, or a layer's attention twice.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not supported")
    if attention_mask is not None:
        raise NotImplementedError("masks of the model's own are not supported")
    scaled = Scaling(scaling, softcap, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if seen is not None:
        if layer in seen:
            raise NotImplementedError("layers do not have one attention each")
        seen[layer] = scaled
    if key.shape[-1] != value.shape[-1]:
        raise NotImplementedError("keys and values of different sizes are not supported")
    output = attend_rows(layer, (query[0], key[0], value[0]), segments, scaled, decoder)
    return output.unsqueeze(0), None


def attend_rows(
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    segments: Sequence[Segment],
    scaled: Scaling,
    decoder: Decoder | None,
) -> Tensor:
    """Attention of R rows; qkv [heads, R, d], [kv_heads, R, d], [kv_heads, R, d] to [R, heads, d].

    Stores keys and values in the segments before attending to them, in `decoder` if there is one,
    else in torch operations.
    """
    query, key, value = qkv
    output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    if decoder:
        decoder.attend(layer, qkv, output, scaled)
        return output
    start = 0
    for segment in segments:
        rows = slice(start, start + segment.num_rows)
        start = rows.stop
        if isinstance(segment, PrefillSegment):
            if not segment.stored:
                piece = segment.pieces[-1]
                piece.write(layer, segment.offset, key[:, rows], value[:, rows])
        else:
            new = (key[:, rows].transpose(0, 1), value[:, rows].transpose(0, 1))
            segment.suffix.write(layer, *new)
        _attend(segment, layer, query[:, rows], output[rows], scaled)
    return output


def _attend(segment: Segment, layer: int, query: Tensor, output: Tensor, scaled: Scaling) -> None:
    """Attention of a segment's rows, query [heads, rows, d], to output [rows, heads, d].

    In blocks of rows, so that the scores of a long text fit the memory.
    """
    if isinstance(segment, PrefillSegment):
        num_seen = segment.start + segment.num_rows
    else:
        num_seen = segment.position + 1
    at_once = max(1, SCORES_AT_ONCE // (query.shape[0] * num_seen))
    for first in range(0, segment.num_rows, at_once):
        rows = slice(first, first + at_once)
        if isinstance(segment, PrefillSegment):
            output[rows] = _prefill(segment, layer, first, query[:, rows], scaled)
        else:
            output[rows] = _decode(segment, layer, first, query[:, rows].transpose(0, 1), scaled)


def _prefill(
    segment: PrefillSegment, layer: int, first: int, query: Tensor, scaled: Scaling
) -> Tensor:
    """Causal attention of a chunk's rows from `first` on to the prompt so far.

    query [heads, rows, d]; returns [rows, heads, d].
    """
    heads, num_rows, dim = query.shape
    start = segment.start + first
    end, last = start + num_rows, segment.offset + first + num_rows
    *earlier, own = segment.pieces
    keys = [*(piece.keys[layer] for piece in earlier), own.keys[layer][:, :last]]
    values = [*(piece.values[layer] for piece in earlier), own.values[layer][:, :last]]
    kv_heads = keys[0].shape[0]
    grouped = query.reshape(kv_heads, -1, dim)  # [kv_heads, group * rows, d]
    # Pieces side by side under one softmax; their keys and values are not copied together.
    scores = _joined([torch.bmm(grouped, part.transpose(1, 2)) for part in keys], scaled)
    scores = scores.view(kv_heads, -1, num_rows, end)
    if scaled.window is None:
        # All that stands before the rows is seen.
        scores[..., start:].masked_fill_(_later(num_rows, query.device), -torch.inf)
    else:
        hidden = _hidden(start, num_rows, scaled.window, query.device)
        scores.masked_fill_(hidden, -torch.inf)
    weights = _softmax(scores).view(kv_heads, -1, end)
    shares = torch.split(weights, [part.shape[1] for part in keys], dim=-1)
    output = torch.bmm(shares[0], values[0])
    for share, part in zip(shares[1:], values[1:], strict=True):
        output.baddbmm_(share, part)
    return output.view(heads, num_rows, dim).transpose(0, 1)


@lru_cache(maxsize=64)
def _later(chunk: int, device: torch.device) -> Tensor:
    """[chunk, chunk], True where a key lies after its query; the same in every layer."""
    return torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)


def _hidden(start: int, chunk: int, window: int, device: torch.device) -> Tensor:
    """[chunk, start + chunk], True where a key lies after its query or before the window."""
    queries = torch.arange(start, start + chunk, device=device)[:, None]
    keys = torch.arange(start + chunk, device=device)[None, :]
    return (keys > queries) | (keys <= queries - window)


def _decode(
    segment: DecodeSegment, layer: int, first_row: int, query: Tensor, scaled: Scaling
) -> Tensor:
    """Attention of the new tokens of rows, from `first_row` on, to prompt and own suffix.

    query [rows, heads, d]; returns the same.

    Scores of both parts stand side by side under one softmax, so that the split is exact. All rows
    are at one position, so a sliding window only shortens both parts.
    """
    suffix = segment.suffix
    num_rows, heads, dim = query.shape
    rows = slice(first_row, first_row + num_rows)
    length = suffix.length + 1
    pieces, first = segment.seen(scaled.window)
    parts = [(piece.keys[layer][:, at:], piece.values[layer][:, at:]) for piece, at in pieces]
    # Only the tokens that are set: beyond them lies uninitialised memory.
    own_keys = suffix.keys(layer)[rows, :, first:length].flatten(0, 1)  # [rows*kv_heads, own, d]
    own_values = suffix.values(layer)[rows, :, first:length].flatten(0, 1)
    kv_heads = own_keys.shape[0] // num_rows
    group = heads // kv_heads

    # The shared parts are one dense product per head for all rows together.
    by_head = query.reshape(num_rows, kv_heads, group, dim).transpose(0, 1)
    by_head = by_head.reshape(kv_heads, num_rows * group, dim)
    by_row = query.reshape(num_rows * kv_heads, group, dim)
    shape = (kv_heads, num_rows, group, -1)
    of_parts = [torch.bmm(by_head, keys.transpose(1, 2)).view(shape) for keys, _ in parts]
    of_own = torch.bmm(by_row, own_keys.transpose(1, 2)).view(num_rows, kv_heads, group, -1)
    sizes = [scores.shape[-1] for scores in (*of_parts, of_own)]
    weights = _softmax(_joined([*(s.transpose(0, 1) for s in of_parts), of_own], scaled))
    *shared_weights, own_weights = torch.split(weights, sizes, dim=-1)
    output = torch.bmm(own_weights.flatten(0, 1), own_values).view(num_rows, kv_heads, group, dim)
    for (_, values), part in zip(parts, shared_weights, strict=True):
        by_head = part.transpose(0, 1).reshape(kv_heads, num_rows * group, -1)
        output += torch.bmm(by_head, values).view(shape).transpose(0, 1)
    return output.view(num_rows, heads, dim)


def _joined(parts: list[Tensor], scaled: Scaling) -> Tensor:
    """Scores side by side, scaled and capped; `parts` is empty afterwards, to free its memory."""
    scores = torch.cat(parts, dim=-1)
    parts.clear()
    scores *= scaled.scale
    if scaled.softcap is not None:
        scores.div_(scaled.softcap).tanh_().mul_(scaled.softcap)
    return scores


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
