"""Compiled attention equals the torch operations that specify it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specrej_models.attention import DecodeSegment, PrefillSegment, Segment, attend_rows
from specrej_models.cpu.attention import CPUAttention
from specrej_models.cpu.tiles import PANEL
from specrej_models.kv import KVShape, PromptKV, SuffixKV
from tests.programs import run

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Sessions as (tokens of each prompt piece, rows, own tokens), and the attention's shape."""

    sessions: tuple[tuple[tuple[int, ...], int, int], ...]
    kv_heads: int = 2
    group: int = 3
    dim: int = 16

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def shape(self) -> KVShape:
        return KVShape(1, self.kv_heads, self.dim, torch.float32, torch.device("cpu"))


SEVERAL = Case((((5,), 2, 0), ((3, 2), 6, 5), ((1,), 1, 11)))


def segments_of(case: Case) -> list[Segment]:
    """Stores with random contents, the same for every call."""
    torch.manual_seed(1)
    segments: list[Segment] = []
    for pieces, rows, length in case.sessions:
        stores = tuple(PromptKV(case.shape, tokens) for tokens in pieces)
        suffix = SuffixKV(case.shape, rows)
        suffix.reserve(length + 2)
        for tensor in [t for store in stores for t in (*store.keys, *store.values)]:
            tensor.normal_()
        for _ in range(length):
            suffix.write(0, *torch.randn(2, rows, case.kv_heads, case.dim))
            suffix.advance()
        segments.append(DecodeSegment(stores, suffix))
    return segments


def rows_of(case: Case, segments: list[Segment]) -> QKV:
    """Query, key and value as a layer hands them over: views into one product."""
    heads = case.kv_heads * (case.group + 2)
    rows = sum(segment.num_rows for segment in segments)
    product = torch.randn(rows, heads * case.dim, generator=torch.Generator().manual_seed(2))
    by_head = product.view(rows, heads, case.dim).transpose(0, 1)
    sizes = [case.kv_heads * case.group, case.kv_heads, case.kv_heads]
    query, key, value = torch.split(by_head, sizes)
    return query, key, value


@dataclass(frozen=True)
class Chunk:
    """Rows of a prompt: tokens of the pieces before theirs, what of theirs is stored, how many."""

    earlier: tuple[int, ...]
    offset: int
    rows: int
    heads_of: int = 0  # the earlier pieces are views of stores that are so much longer


def prompts_of(case: Case, chunks: tuple[Chunk, ...]) -> list[Segment]:
    """Stores with random contents, the same for every call; what is not stored yet is not a number.

    What no row may see would show.
    """
    torch.manual_seed(3)
    segments: list[Segment] = []
    for chunk in chunks:
        longer = [PromptKV(case.shape, tokens + chunk.heads_of) for tokens in chunk.earlier]
        own = PromptKV(case.shape, chunk.offset + chunk.rows + 2)
        for store in (*longer, own):
            for tensor in (*store.keys, *store.values):
                tensor.normal_()
        for tensor in (*own.keys, *own.values):
            tensor[:, chunk.offset :] = torch.nan
        earlier = [store.head(tokens) for store, tokens in zip(longer, chunk.earlier, strict=True)]
        start = sum(chunk.earlier) + chunk.offset
        segments.append(PrefillSegment((*earlier, own), start, chunk.offset, chunk.rows))
    return segments


def attend(case: Case, segments: list[Segment], qkv: QKV, spread: float = 1.0) -> Tensor:
    """By the compiled kernel."""
    compiled = CPUAttention(case.shape, case.kv_heads * case.group, segments)
    return attend_rows(0, qkv, segments, spread * case.scale, compiled)


def stored(segment: Segment) -> list[Tensor]:
    """What a pass over the segment may have written."""
    tensors = [kv for piece in segment.pieces for kv in (piece.keys[0], piece.values[0])]
    if isinstance(segment, DecodeSegment):
        tensors.append(segment.suffix.keys(0)[:, :, : segment.suffix.length + 1])
    return tensors


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(4, 6), slice(3, 11)])
def test_a_rows_attention_does_not_depend_on_its_batch(group: int, rows: slice) -> None:
    """Survivors of a cut go on exactly as they would have, to the last bit, in whatever lane."""
    case = Case((((40, 7), 11, 9),), group=group, dim=64)
    (whole,) = segments_of(case)
    assert isinstance(whole, DecodeSegment)
    part = SuffixKV(case.shape, rows.stop - rows.start)
    part.reserve(11)
    part.keys(0)[:] = whole.suffix.keys(0)[rows]
    part.values(0)[:] = whole.suffix.values(0)[rows]
    part.length = whole.suffix.length
    some = DecodeSegment(whole.pieces, part)
    query, key, value = rows_of(case, [whole])
    expected = attend(case, [whole], (query, key, value))[rows]
    actual = attend(case, [some], (query[:, rows], key[:, rows], value[:, rows]))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


CHUNKS = st.builds(
    Chunk,
    st.lists(st.integers(1, 40), max_size=3).map(tuple),
    st.integers(0, 20),
    st.sampled_from([1, 5, 20, 70, 131]) | st.integers(1, 70),
    st.sampled_from([0, 5]),
)
SESSIONS = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.integers(1, 11),
    st.integers(0, 9),
)


@given(
    st.lists(SESSIONS, max_size=4).map(tuple),
    st.lists(CHUNKS, min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 17, PANEL]),
    st.sampled_from([16, 48, 64, 80, 128]),
    st.sampled_from([1.0, 1.0, 100.0]),
    st.sampled_from([1 << 25, 1000, 1]),
)
def test_equals_the_torch_operations_for_any_pass(
    sessions: tuple[tuple[tuple[int, ...], int, int], ...],
    chunks: tuple[Chunk, ...],
    kv_heads: int,
    group: int,
    dim: int,
    spread: float,
    scores_at_once: int,
) -> None:
    """Guards tables, panels, tiles and masks over arbitrary sizes: prompts beside answers.

    And the kernel's own exponential: scores far apart neither overflow nor become NaN. And torch's
    attention in blocks of rows: their positions, masks and places.
    """
    case = Case(sessions, kv_heads, group, dim)
    slow, fast = ([*prompts_of(case, chunks), *segments_of(case)] for _ in range(2))
    qkv = rows_of(case, slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrej_models.attention.SCORES_AT_ONCE", scores_at_once)
        expected = attend_rows(0, qkv, slow, spread * case.scale, None)
    actual = attend(case, fast, qkv, spread)
    tolerance = 1e-5 * spread
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(slow, fast, strict=True):
        torch.testing.assert_close(stored(other), stored(one), rtol=0, atol=0, equal_nan=True)


def test_rows_whose_keys_are_stored_do_not_write() -> None:
    """Guards against an equal prompt's KV, shared with others, being written again."""
    case, chunk = Case(()), Chunk((), 0, 6)
    (computed,) = prompts_of(case, (chunk,))
    assert isinstance(computed, PrefillSegment)
    query, key, value = rows_of(case, [computed])
    expected = attend(case, [computed], (query, key, value))
    again = replace(computed, stored=True)
    before = [tensor.clone() for tensor in stored(again)]
    others = query, torch.randn_like(key), torch.randn_like(value)  # must be neither read nor kept
    torch.testing.assert_close(attend(case, [again], others), expected, rtol=0, atol=0)
    for tensor, old in zip(stored(again), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_a_segment_sees_what_another_one_of_the_pass_stores() -> None:
    """Guards against a share that begins before those that store what it sees, as on threads of a
    busy machine: here the text, which sees all of its prompt, has the first shares."""
    case = SEVERAL
    rows = [6, 4]

    def pair() -> list[Segment]:
        prompt, text = (PromptKV(case.shape, count) for count in rows)
        for tensor in (*prompt.keys, *prompt.values, *text.keys, *text.values):
            tensor.fill_(torch.nan)
        first = PrefillSegment((prompt,), 0, 0, rows[0])
        return [first, PrefillSegment((prompt, text), rows[0], 0, rows[1])]

    query, key, value = rows_of(case, pair())
    expected = attend_rows(0, (query, key, value), pair(), case.scale, None)
    turned = [*range(rows[0], sum(rows)), *range(rows[0])]
    actual = attend(case, pair()[::-1], (query[:, turned], key[:, turned], value[:, turned]))
    torch.testing.assert_close(actual, expected[turned], rtol=1e-5, atol=1e-5)


@pytest.mark.long
async def test_scratch_memory_is_not_freed_while_it_is_used() -> None:
    """Guards against wrong tokens and a corrupted heap: numba frees an array after its last use,
    although its address is still in use."""
    command = (sys.executable, "-m", "tests.specrej_models.shared_arena")
    assert await run(*command, MALLOC_ARENA_MAX="1") == "0\n"
