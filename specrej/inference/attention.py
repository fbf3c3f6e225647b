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

from specrej.inference.kv import PromptKV, SuffixKV

NAME = "specrej"


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Some consecutive tokens of a prompt, from position `start`; all earlier ones are stored.

    They belong to the last of `pieces`, from its token `offset` on. `stored`: their keys and values
    are there already, and only what comes out of the last layer is wanted.
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
    attention_mask: None,
    *,
    scaling: float,
    segments: Sequence[Segment],
    decoder: Decoder | None = None,
    seen: list[Scaling] | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of R rows, R = sum of the segments' rows, batch 1.

    query [1, heads, R, d]; key, value [1, kv_heads, R, d]; returns [1, R, heads, d]. What the model
    applies to the scores is added to `seen`.

    Raises:
        NotImplementedError: the model uses attention sinks.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not supported")
    scaled = Scaling(scaling, softcap, sliding_window)
    if seen is not None:
        seen.append(scaled)
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = attend_rows(layer, (query[0], key[0], value[0]), segments, scaled, decoder)
    return output.unsqueeze(0), None


def attend_rows(
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    segments: Sequence[Segment],
    scaled: Scaling,
    decoder: Decoder | None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of R rows; qkv [heads, R, d], [kv_heads, R, d], [kv_heads, R, d] to [R, heads, d].

    Stores keys and values in the segments before attending to them, in `decoder` if there is one,
    else in torch operations.
    """
    query, key, value = qkv
    output = query.new_empty(query.shape[1], query.shape[0], query.shape[2]) if out is None else out
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
            output[rows] = _prefill(segment, layer, query[:, rows], scaled)
        else:
            new = (key[:, rows].transpose(0, 1), value[:, rows].transpose(0, 1))
            segment.suffix.write(layer, *new)
            output[rows] = _decode(segment, layer, query[:, rows].transpose(0, 1), scaled)
    return output


def _prefill(segment: PrefillSegment, layer: int, query: Tensor, scaled: Scaling) -> Tensor:
    """Causal attention of a chunk to the prompt so far.

    query [heads, chunk, d]; returns [chunk, heads, d].
    """
    heads, chunk, dim = query.shape
    end, last = segment.start + chunk, segment.offset + chunk
    *earlier, own = segment.pieces
    keys = [*(piece.keys[layer] for piece in earlier), own.keys[layer][:, :last]]
    values = [*(piece.values[layer] for piece in earlier), own.values[layer][:, :last]]
    kv_heads = keys[0].shape[0]
    grouped = query.reshape(kv_heads, -1, dim)  # [kv_heads, group * chunk, d]
    # Pieces side by side under one softmax; their keys and values are not copied together.
    parts = [torch.bmm(grouped, part.transpose(1, 2)) for part in keys]
    scores = _capped(torch.cat(parts, dim=-1), scaled).view(kv_heads, -1, chunk, end)
    if scaled.window is None:
        # All that stands before the chunk is seen.
        scores[..., segment.start :].masked_fill_(_later(chunk, query.device), -torch.inf)
    else:
        hidden = _hidden(segment.start, chunk, scaled.window, query.device)
        scores.masked_fill_(hidden, -torch.inf)
    weights = _softmax(scores).view(kv_heads, -1, end)
    shares = torch.split(weights, [part.shape[1] for part in keys], dim=-1)
    output = torch.bmm(shares[0], values[0])
    for share, part in zip(shares[1:], values[1:], strict=True):
        output.baddbmm_(share, part)
    return output.view(heads, chunk, dim).transpose(0, 1)


@lru_cache(maxsize=64)
def _later(chunk: int, device: torch.device) -> Tensor:
    """[chunk, chunk], True where a key lies after its query; the same in every layer."""
    return torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)


def _hidden(start: int, chunk: int, window: int, device: torch.device) -> Tensor:
    """[chunk, start + chunk], True where a key lies after its query or before the window."""
    queries = torch.arange(start, start + chunk, device=device)[:, None]
    keys = torch.arange(start + chunk, device=device)[None, :]
    return (keys > queries) | (keys <= queries - window)


def _decode(segment: DecodeSegment, layer: int, query: Tensor, scaled: Scaling) -> Tensor:
    """Attention of one new token per live row, query [live, heads, d], to prompt and own suffix.

    Scores of both parts stand side by side under one softmax, so that the split is exact. All rows
    are at one position, so a sliding window only shortens both parts.
    """
    suffix = segment.suffix
    live, heads, dim = query.shape
    length = suffix.length + 1
    pieces, first = segment.seen(scaled.window)
    parts = [(piece.keys[layer][:, at:], piece.values[layer][:, at:]) for piece, at in pieces]
    # Only the tokens that are set: beyond them lies uninitialised memory.
    own_keys = suffix.keys(layer)[:live, :, first:length].flatten(0, 1)  # [live*kv_heads, own, d]
    own_values = suffix.values(layer)[:live, :, first:length].flatten(0, 1)
    kv_heads = own_keys.shape[0] // live
    group = heads // kv_heads

    # The shared parts are one dense product per head for all rows together.
    by_head = query.reshape(live, kv_heads, group, dim).transpose(0, 1)
    by_head = by_head.reshape(kv_heads, live * group, dim)
    by_row = query.reshape(live * kv_heads, group, dim)
    scores = [
        torch.bmm(by_head, keys.transpose(1, 2)).view(kv_heads, live, group, -1).transpose(0, 1)
        for keys, _ in parts
    ]
    scores.append(torch.bmm(by_row, own_keys.transpose(1, 2)).view(live, kv_heads, group, -1))
    weights = _softmax(_capped(torch.cat(scores, dim=-1), scaled))
    *shared_weights, own_weights = torch.split(weights, [part.shape[-1] for part in scores], dim=-1)
    output = torch.bmm(own_weights.flatten(0, 1), own_values).view(live, kv_heads, group, dim)
    for (_, values), part in zip(parts, shared_weights, strict=True):
        by_head = part.transpose(0, 1).reshape(kv_heads, live * group, -1)
        output += torch.bmm(by_head, values).view(kv_heads, live, group, dim).transpose(0, 1)
    return output.view(live, heads, dim)


def _capped(scores: Tensor, scaled: Scaling) -> Tensor:
    scores *= scaled.scale
    return (
        scores if scaled.softcap is None else torch.tanh(scores / scaled.softcap) * scaled.softcap
    )


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
