"""Decode attention in Triton: the rows of one session, their shared prompt and their own suffixes.

What `attention.attend` does with torch operations, in three kernels: blocks of rows meet blocks of
the prompt's tokens, so that the prompt is read once per block; every row meets its own tokens; both
parts, split over tokens to fill the device, are merged exactly by their log-sum-exp. Sizes and
addresses are read from a table in device memory: a launch recorded once stays right while the
session grows and is pruned, and for any other session. Knows tensors only. The numbers are checked
in Triton's interpreter; nothing here has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.attention import DecodeSegment, Scaling, Segment

# Typed, as triton is not. One compilation serves all layers, row counts and windows.
_jit: Callable[[Callable[..., Any]], Any] = triton.jit
_kernel: Callable[[Callable[..., Any]], Any] = triton.jit(
    do_not_specialize=["rows", "first_word", "window", "shared_splits", "own_splits"]
)

# A table's first row: what all layers share. From FIRST_PIECE on, each piece's number of tokens.
_LIVE = tl.constexpr(0)
_LENGTH = tl.constexpr(1)
_ROOM = tl.constexpr(2)
_PROMPT = tl.constexpr(3)
_PIECES = tl.constexpr(4)
_FIRST_PIECE = tl.constexpr(5)
# Its other rows, one per layer: addresses of the suffix's keys and values, then of each piece's.
_STORES = tl.constexpr(2)

_MOST_SPLITS = 16
# Leads, as all block sizes here are: to be measured on a GPU.
_PROGRAMS_PER_PROCESSOR = 4
_BLOCK_BYTES = 16_384  # of keys, and of values, in a block of tokens


class Table:
    """Sizes and addresses of one session's stores, int64 in device memory, for one step.

    It has room for `pieces` pieces of a prompt and does not keep the stores alive.
    """

    def __init__(self, layers: int, pieces: int, device: torch.device) -> None:
        self.pieces = pieces
        columns = _FIRST_PIECE.value + 1 + 2 * pieces  # enough for rows of either kind
        self.words = torch.zeros(1 + layers, columns, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, segment: DecodeSegment) -> Table:
        """A new one, filled."""
        layers = len(segment.suffix.key_addresses())
        table = cls(layers, len(segment.pieces), segment.suffix.keys(0).device)
        table.fill(segment)
        return table

    def fill(self, segment: DecodeSegment) -> None:
        """Point to a session's stores as they are now; `segment` has at most `pieces` pieces."""
        pieces, suffix = segment.pieces, segment.suffix
        tokens = [piece.num_tokens for piece in pieces]
        header = [suffix.live, suffix.length, suffix.tokens_room, sum(tokens), len(pieces), *tokens]
        addresses = zip(
            suffix.key_addresses(),
            suffix.value_addresses(),
            *chain.from_iterable((_addresses(p.keys), _addresses(p.values)) for p in pieces),
            strict=True,
        )
        rows = [header, *map(list, addresses)]
        width = max(len(header), len(rows[-1]))
        words = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        self.words[:, :width].copy_(words)


def _addresses(store: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in store]


class TritonDecoder:
    """Attention of one forward pass's decode rows: an `attention.Decoder`."""

    takes_prompts = False

    def __init__(self, batch: Sequence[tuple[slice, Table]]) -> None:
        """`batch`: each session's rows, those of its padding among them, and its table."""
        self._batch = batch

    def attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], output: Tensor, scaled: Scaling
    ) -> None:
        """Store the live rows' keys and values, write their attention to `output` [R, heads, d].

        qkv: [heads, R, d], [kv_heads, R, d], [kv_heads, R, d]. Rows beyond a table's live ones
        store nothing; their output is 0.
        """
        for rows, table in self._batch:
            query, key, value = (tensor[:, rows].transpose(0, 1) for tensor in qkv)
            decode(query, key, value, output[rows], table, layer, scaled)


def decoder(segments: Sequence[Segment]) -> TritonDecoder | None:
    """For the decode rows of one forward pass, if there are any."""
    batch, start = [], 0
    for segment in segments:
        end = start + segment.num_rows
        if isinstance(segment, DecodeSegment):
            batch.append((slice(start, end), Table.of(segment)))
        start = end
    return TritonDecoder(batch) if batch else None


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    table: Table,
    layer: int,
    scaled: Scaling,
) -> None:
    """Attention of R rows, of which the table's live ones are a session's, to `output`.

    query and output [R, heads, d], output contiguous; key, value [R, kv_heads, d] are stored.
    """
    assert output.is_contiguous()
    # As models hand them over they are contiguous already.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    (rows, heads, dim), kv_heads = query.shape, key.shape[1]
    plan = _Plan.of(query, kv_heads)
    splits = plan.shared_splits + plan.own_splits
    # Per split what its tokens alone would give, and the logarithm of their weights' sum.
    partial = query.new_empty(splits, rows, heads, dim, dtype=torch.float32)
    weights = query.new_empty(splits, rows, heads, dtype=torch.float32)
    words = table.words
    first_word = (1 + layer) * words.shape[1]
    window = scaled.window or 0
    sizes = {
        "scale": scaled.scale,
        "softcap": scaled.softcap or 0.0,
        "group": heads // kv_heads,
        "dim": dim,
        "block_dim": plan.block_dim,
        "block_tokens": plan.block_tokens,
    }
    _attend_shared[(plan.blocks, kv_heads, plan.shared_splits)](
        *(query, key, words, first_word, partial, weights, rows, window),
        **sizes,
        block_queries=plan.block_queries,
        num_stages=2,
        num_warps=4 if plan.block_dim <= 128 else 8,
    )
    _attend_own[(rows, kv_heads, plan.own_splits)](
        *(query, key, value, words, first_word),
        *(partial[plan.shared_splits :], weights[plan.shared_splits :], window),
        **sizes,
        block_group=max(16, triton.next_power_of_2(heads // kv_heads)),
        num_stages=3,
    )
    _merge[(rows, heads)](
        *(partial, weights, output, words, window, plan.shared_splits, plan.own_splits),
        dim=dim,
        block_dim=plan.block_dim,
        block_tokens=plan.block_tokens,
        block_splits=triton.next_power_of_2(splits),
        num_warps=1,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the work is cut; depends only on what a recorded launch has fixed.

    `blocks` of `block_queries` queries per KV head; a split is a part of the tokens.
    """

    block_dim: int
    block_queries: int
    block_tokens: int
    blocks: int
    shared_splits: int
    own_splits: int

    @classmethod
    def of(cls, query: Tensor, kv_heads: int) -> _Plan:
        rows, heads, dim = query.shape
        # Larger blocks of float32, which has no tensor cores, do not fit the registers.
        most_queries, most_tokens = (64, 64) if query.dtype.itemsize == 2 else (16, 32)
        block_dim = max(16, triton.next_power_of_2(dim))
        tokens = _BLOCK_BYTES // (block_dim * query.dtype.itemsize)
        blocks = -(-rows * heads // (kv_heads * most_queries))
        wanted = _wanted_programs(query.device)
        return cls(
            block_dim,
            most_queries,
            max(16, min(most_tokens, tokens)),
            blocks,
            shared_splits=max(1, min(_MOST_SPLITS, wanted // (kv_heads * blocks))),
            own_splits=max(1, min(_MOST_SPLITS, wanted // (kv_heads * rows))),
        )


def _wanted_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # the interpreter's, one after the other
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * processors


@_kernel
def _attend_shared(
    query: tl.tensor,
    like: tl.tensor,
    table: tl.tensor,
    first_word: tl.tensor,
    partial: tl.tensor,
    weights: tl.tensor,
    rows: tl.tensor,
    window: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    block_queries: tl.constexpr,
) -> None:
    """A block of queries of one KV head against one split of the prompt's tokens.

    Grid: blocks, KV heads, splits. `like`: a pointer of the stores' type.
    """
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    live = tl.load(table + _LIVE).to(tl.int32)
    first, prompt = _seen_of_prompt(table, window)
    begin, end = _split(first, prompt, split, tl.num_programs(2), block_tokens)
    if (begin >= end) | (block * block_queries >= live * group):
        return
    index = block * block_queries + tl.arange(0, block_queries)
    row, head = index // group, kv_head * group + index % group
    line = row.to(tl.int64) * (tl.num_programs(1) * group) + head
    queries = _load_lines(query, line, row < live, dim, block_dim)
    highest = tl.full([block_queries], float("-inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    output = tl.zeros([block_queries, block_dim], tl.float32)
    start = 0  # of the piece, in the prompt
    for piece in range(tl.load(table + _PIECES).to(tl.int32)):
        tokens = tl.load(table + _FIRST_PIECE + piece).to(tl.int32)
        store = table + first_word + _STORES + 2 * piece
        base = kv_head.to(tl.int64) * tokens * dim
        keys, values = _pointer(store, like) + base, _pointer(store + 1, like) + base
        low, high = tl.maximum(begin - start, 0), tl.minimum(end - start, tokens)
        highest, total, output = _attend(
            queries,
            keys,
            values,
            low,
            high,
            highest,
            total,
            output,
            scale,
            softcap,
            dim,
            block_tokens,
        )
        start += tokens
    line += split.to(tl.int64) * rows * (tl.num_programs(1) * group)
    _store_lines(partial, weights, line, row < live, highest, total, output, dim)


@_kernel
def _attend_own(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    first_word: tl.tensor,
    partial: tl.tensor,
    weights: tl.tensor,
    window: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    block_group: tl.constexpr,
) -> None:
    """A row's queries of one KV head against one split of its own tokens.

    Grid: rows, KV heads, splits. The first split also stores the new token, and attends to it
    without reading it back.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(table + _LIVE).to(tl.int32):
        return
    length = tl.load(table + _LENGTH).to(tl.int32)
    first = _first_own(table, window)
    begin, end = _split(first, length, split, tl.num_programs(2), block_tokens)
    if (begin >= end) & (split > 0):
        return
    line = row.to(tl.int64) * tl.num_programs(1) + kv_head
    base = line * tl.load(table + _ROOM) * dim
    store = table + first_word
    keys, values = _pointer(store, key) + base, _pointer(store + 1, key) + base
    dims, members = tl.arange(0, block_dim), tl.arange(0, block_group)
    new_key = tl.load(key + line * dim + dims, mask=dims < dim, other=0.0)
    new_value = tl.load(value + line * dim + dims, mask=dims < dim, other=0.0)
    place = length.to(tl.int64) * dim + dims
    tl.store(keys + place, new_key, mask=(dims < dim) & (split == 0))
    tl.store(values + place, new_value, mask=(dims < dim) & (split == 0))
    lines = line * group + members
    queries = _load_lines(query, lines, members < group, dim, block_dim)
    scores = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    highest = tl.where(split == 0, _cap(scores, softcap), float("-inf"))
    total = tl.where(split == 0, tl.full([block_group], 1.0, tl.float32), 0.0)
    output = total[:, None] * new_value.to(tl.float32)[None, :]
    highest, total, output = _attend(
        queries, keys, values, begin, end, highest, total, output, scale, softcap, dim, block_tokens
    )
    lines += split.to(tl.int64) * tl.num_programs(0) * tl.num_programs(1) * group
    _store_lines(partial, weights, lines, members < group, highest, total, output, dim)


@_kernel
def _merge(
    partial: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    table: tl.tensor,
    window: tl.tensor,
    shared_splits: tl.tensor,
    own_splits: tl.tensor,
    dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    block_splits: tl.constexpr,
) -> None:
    """One head of one row, from all splits that have tokens; 0 if the row is not live.

    Grid: rows, heads.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(table + _LENGTH).to(tl.int32)
    first, prompt = _seen_of_prompt(table, window)
    shared = _used(prompt - first, shared_splits, block_tokens)
    own = tl.maximum(1, _used(length - _first_own(table, window), own_splits, block_tokens))
    split, dims = tl.arange(0, block_splits), tl.arange(0, block_dim)
    is_used = (split < shared) | ((split >= shared_splits) & (split < shared_splits + own))
    is_used = is_used & (row < tl.load(table + _LIVE).to(tl.int32))
    line = (split.to(tl.int64) * rows + row) * heads + head
    logarithms = tl.load(weights + line, mask=is_used, other=float("-inf"))
    highest = tl.maximum(tl.max(logarithms, 0), -1e30)  # -inf if the row is not live
    factors = tl.exp(logarithms - highest)
    parts = _load_lines(partial, line, is_used, dim, block_dim)
    mixed = tl.sum(parts * factors[:, None], 0) / tl.maximum(tl.sum(factors, 0), 1e-30)
    place = (row.to(tl.int64) * heads + head) * dim + dims
    tl.store(output + place, mixed.to(output.dtype.element_ty), mask=dims < dim)


@_jit
def _attend(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
) -> tl.tensor:
    """Online softmax (Milakov and Gimelshein 2018) over tokens begin .. end - 1 of one KV head.

    queries [m, block_dim]; keys and values point to [tokens, dim]. `output` [m, block_dim] is the
    sum of values weighted by exp(score - highest), `total` [m] that of the weights.
    """
    dims = tl.arange(0, queries.shape[1])
    for block in range(begin, end, block_tokens):
        tokens = block + tl.arange(0, block_tokens)
        places = tokens[:, None] * dim + dims[None, :]
        mine = (tokens < end)[:, None] & (dims < dim)[None, :]
        block_keys = tl.load(keys + places, mask=mine, other=0.0)
        scores = tl.dot(queries, tl.trans(block_keys), input_precision="ieee") * scale
        scores = tl.where((tokens < end)[None, :], _cap(scores, softcap), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        highest, total = higher, total * shrink + tl.sum(weights, 1)
        block_values = tl.load(values + places, mask=mine, other=0.0)
        weights = weights.to(block_values.dtype)
        output = tl.dot(weights, block_values, output * shrink[:, None], input_precision="ieee")
    return highest, total, output


@_jit
def _cap(scores: tl.tensor, softcap: tl.constexpr) -> tl.tensor:
    """softcap * tanh(scores / softcap), 0 for none; Triton's own language has no tanh."""
    if softcap > 0:
        scores = softcap * (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1))
    return scores


@_jit
def _load_lines(
    base: tl.tensor, line: tl.tensor, mine: tl.tensor, dim: tl.constexpr, block_dim: tl.constexpr
) -> tl.tensor:
    """Lines `line` [m] of a matrix [lines, dim]: [m, block_dim], 0 where not `mine`."""
    dims = tl.arange(0, block_dim)
    here = mine[:, None] & (dims < dim)[None, :]
    return tl.load(base + line[:, None] * dim + dims[None, :], mask=here, other=0.0)


@_jit
def _store_lines(
    partial: tl.tensor,
    weights: tl.tensor,
    line: tl.tensor,
    mine: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    dim: tl.constexpr,
) -> None:
    """Put a split's result into lines `line` [m], those that are `mine`."""
    dims = tl.arange(0, output.shape[1])
    here = mine[:, None] & (dims < dim)[None, :]
    tl.store(partial + line[:, None] * dim + dims[None, :], output / total[:, None], mask=here)
    tl.store(weights + line, highest + tl.log(total), mask=mine)


@_jit
def _seen_of_prompt(table: tl.tensor, window: tl.tensor) -> tl.tensor:
    """First prompt token that the new tokens see, and the end of the prompt, which may be first."""
    prompt = tl.load(table + _PROMPT).to(tl.int32)
    return tl.minimum(_first_seen(table, window), prompt), prompt


@_jit
def _first_own(table: tl.tensor, window: tl.tensor) -> tl.tensor:
    """First of a row's own tokens that its new one sees."""
    prompt = tl.load(table + _PROMPT).to(tl.int32)
    return tl.maximum(_first_seen(table, window) - prompt, 0)


@_jit
def _first_seen(table: tl.tensor, window: tl.tensor) -> tl.tensor:
    """A position; a window counts the new token's own, 0 is none."""
    position = (tl.load(table + _PROMPT) + tl.load(table + _LENGTH)).to(tl.int32)
    return tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)


@_jit
def _split(
    first: tl.tensor,
    end: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    block_tokens: tl.constexpr,
) -> tl.tensor:
    """Where a split of tokens first .. end - 1 begins and ends."""
    share = _share(end - first, splits, block_tokens)
    begin = first + split * share
    return begin, tl.minimum(begin + share, end)


@_jit
def _share(tokens: tl.tensor, splits: tl.tensor, block_tokens: tl.constexpr) -> tl.tensor:
    """Tokens of a split: whole blocks; the last splits may be left with none."""
    return tl.cdiv(tl.cdiv(tokens, splits), block_tokens) * block_tokens


@_jit
def _used(tokens: tl.tensor, splits: tl.tensor, block_tokens: tl.constexpr) -> tl.tensor:
    """Splits that have tokens."""
    return tl.cdiv(tokens, tl.maximum(_share(tokens, splits, block_tokens), 1))


@_jit
def _pointer(word: tl.tensor, like: tl.tensor) -> tl.tensor:
    """What a table's word points to, of the type of `like`; stores begin at 16-byte boundaries."""
    return tl.multiple_of(tl.load(word).to(like.dtype), 16)
