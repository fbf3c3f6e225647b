"""Attention over a shared prompt and dense suffixes, as transformers' attention function.

One forward pass carries the rows of several sessions; the linear layers see them all together,
this function sees each session's rows as a segment. Works on tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def position(self) -> int:
        """Where the last row's token stands."""
        return self.start + self.num_rows - 1


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


Segment = PrefillSegment | DecodeSegment


class Decoder(Protocol):
    """Compiled attention of all rows of one forward pass at once."""

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], output: Tensor, scale: float
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
    seen: dict[int, float] | None = None,
    softcap: float | None = None,
    s_aux: None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of R rows, R = sum of the segments' rows, batch 1.

    query [1, heads, R, d]; key, value [1, kv_heads, R, d]; returns [1, R, heads, d]. The scale of
    the scores is added to `seen`, by layer. Sliding windows hide nothing: the context is bounded by
    them (`model.bound_positions`).

    Raises:
        NotImplementedError: the model uses attention sinks, soft caps, masks of its own, compressed
            keys and values, or a layer's attention twice.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not supported")
    if softcap is not None:
        raise NotImplementedError("soft caps are not supported")
    if attention_mask is not None:
        raise NotImplementedError("masks of the model's own are not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if seen is not None:
        if layer in seen:
            raise NotImplementedError("layers do not have one attention each")
        seen[layer] = scaling
    if key.shape[-1] != value.shape[-1]:
        raise NotImplementedError("keys and values of different sizes are not supported")
    output = attend_rows(layer, (query[0], key[0], value[0]), segments, scaling, decoder)
    return output.unsqueeze(0), None


def attend_rows(
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    segments: Sequence[Segment],
    scale: float,
    decoder: Decoder | None,
) -> Tensor:
    """Attention of R rows; qkv [heads, R, d], [kv_heads, R, d], [kv_heads, R, d] to [R, heads, d].

    Stores keys and values in the segments before attending to them, in `decoder` if there is one,
    else in torch operations.
    """
    query, key, value = qkv
    output = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    if decoder:
        decoder.attend(layer, qkv, output, scale)
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
        _attend(segment, layer, query[:, rows], output[rows], scale)
    return output


def _attend(segment: Segment, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
    """Attention of a segment's rows, query [heads, rows, d], to output [rows, heads, d].

    In blocks of rows, so that the scores of a long text fit the memory.
    """
    at_once = max(1, SCORES_AT_ONCE // (query.shape[0] * (segment.position + 1)))
    for first in range(0, segment.num_rows, at_once):
        rows = slice(first, first + at_once)
        block = query[:, rows].transpose(0, 1)
        if isinstance(segment, PrefillSegment):
            output[rows] = _prefill(segment, layer, first, block, scale)
        else:
            output[rows] = _decode(segment, layer, first, block, scale)


def _prefill(
    segment: PrefillSegment, layer: int, first: int, query: Tensor, scale: float
) -> Tensor:
    """Causal attention of a chunk's rows from `first` on, query [rows, heads, d], to the prompt so
    far."""
    start, last = segment.start + first, segment.offset + first + len(query)
    *earlier, own = segment.pieces
    parts = [(piece.keys[layer], piece.values[layer]) for piece in earlier]
    parts.append((own.keys[layer][:, :last], own.values[layer][:, :last]))
    queries = torch.arange(start, start + len(query), device=query.device)[:, None]
    keys = torch.arange(start + len(query), device=query.device)
    hidden = keys > queries
    return _mixed(query, parts, None, hidden, scale)


def _decode(segment: DecodeSegment, layer: int, first: int, query: Tensor, scale: float) -> Tensor:
    """Attention of the new tokens of rows from `first` on, query [rows, heads, d], to the prompt
    and their suffixes."""
    suffix, rows = segment.suffix, slice(first, first + len(query))
    length = suffix.length + 1
    parts = [(piece.keys[layer], piece.values[layer]) for piece in segment.pieces]
    # Only the tokens that are set: beyond them lies uninitialised memory.
    keys, values = (kv[rows, :, :length] for kv in (suffix.keys(layer), suffix.values(layer)))
    return _mixed(query, parts, (keys, values), None, scale)


def _mixed(
    query: Tensor,
    parts: Sequence[tuple[Tensor, Tensor]],
    own: tuple[Tensor, Tensor] | None,
    hidden: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of rows, [rows, heads, d] to the same, to tokens that all of them share and to
    their own.

    parts: keys and values [kv_heads, tokens, d]; own: of each row, [rows, kv_heads, tokens, d];
    hidden: bool [rows, tokens]. The scores of all parts stand side by side under one softmax, so
    that the split is exact; keys and values are not copied together.
    """
    rows, heads, dim = query.shape
    kv_heads = (own or parts[0])[0].shape[-3]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = [torch.einsum("rkgd,ktd->rkgt", grouped, keys) for keys, _ in parts]
    if own:
        scores.append(torch.einsum("rkgd,rktd->rkgt", grouped, own[0]))
    sizes = [part.shape[-1] for part in scores]
    joined = torch.cat(scores, dim=-1)
    scores.clear()  # frees their memory
    joined *= scale
    if hidden is not None:
        joined.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(joined, dim=-1, dtype=torch.float32).to(joined.dtype)
    shares = torch.split(weights, sizes, dim=-1)
    mixed = [
        torch.einsum("rkgt,ktd->rkgd", share, values)
        for share, (_, values) in zip(shares, parts, strict=False)
    ]
    if own:
        mixed.append(torch.einsum("rkgt,rktd->rkgd", shares[-1], own[1]))
    return sum(mixed[1:], mixed[0]).reshape(rows, heads, dim)
