"""Compiled attention against the torch operations that say what it must compute."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference.attention import (
    DecodeSegment,
    PrefillSegment,
    Scaling,
    Segment,
    attend_rows,
)
from inference.cpu_attention import decoder
from inference.kv import KVShape, PromptKV, SuffixKV

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Sessions as (tokens of each prompt piece, rows, own tokens), and the attention's shape."""

    sessions: tuple[tuple[tuple[int, ...], int, int], ...]
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    window: int | None = None
    softcap: float | None = None

    @property
    def shape(self) -> KVShape:
        return KVShape(1, self.kv_heads, self.dim, torch.float32, torch.device("cpu"))


CASES = {
    "one": Case((((5,), 1, 0),)),
    "rows beyond a chunk": Case((((7,), 9, 3),)),
    "pieces": Case((((4, 1, 6), 3, 2),)),
    "several sessions": Case((((5,), 2, 0), ((3, 2), 6, 5), ((1,), 1, 11))),
    "no group": Case((((5,), 4, 3),), group=1),
    "a window inside the prompt": Case((((4, 6), 3, 2),), window=5),
    "a window inside the answer": Case((((4, 6), 3, 9),), window=4),
    "a soft cap": Case((((5,), 4, 3),), softcap=2.0),
    "dense products": Case((((90,), 64, 3),)),
    "dense products of pieces": Case(
        (((70, 30), 48, 2), ((3,), 2, 1)),
    ),
    "dense products in a window": Case((((70, 80), 64, 2),), window=90),
}


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


def assert_equal(case: Case) -> None:
    scaled = Scaling(case.dim**-0.5, case.softcap, case.window)
    slow, fast = segments_of(case), segments_of(case)
    qkv = rows_of(case, slow)
    expected = attend_rows(0, qkv, slow, scaled, None)
    compiled = decoder(case.shape, case.kv_heads * case.group, fast)
    found = attend_rows(0, qkv, fast, scaled, compiled)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(slow, fast, strict=True):
        assert isinstance(one, DecodeSegment)
        assert isinstance(other, DecodeSegment)
        end = one.suffix.length + 1
        for kept, stored in ((one.suffix.keys(0), other.suffix.keys(0)),):
            torch.testing.assert_close(stored[:, :, :end], kept[:, :, :end], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_torch_operations(name: str) -> None:
    """Guards against a compiled kernel that reads a wrong row, piece, head or token."""
    assert_equal(CASES[name])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
            st.integers(1, 11),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([2, 4, 16, 20]),
    st.none() | st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_torch_operations_for_any_sessions(
    sessions: tuple[tuple[tuple[int, ...], int, int], ...],
    kv_heads: int,
    group: int,
    dim: int,
    window: int | None,
) -> None:
    """Guards the kernel's tables over sizes nobody thought of."""
    assert_equal(Case(sessions, kv_heads, group, dim, window))


def test_prompt_rows_in_the_same_step_are_left_to_torch() -> None:
    """Guards against decode rows that are taken from where a chunk of a prompt stands."""
    case = CASES["several sessions"]
    decode = segments_of(case)
    chunk = PromptKV(case.shape, 4)
    mixed: list[Segment] = [decode[0], PrefillSegment((chunk,), 0, 0, 4), *decode[1:]]
    query, key, value = rows_of(case, mixed)
    scaled = Scaling(1.0, None, None)
    heads = case.kv_heads * case.group
    found = attend_rows(0, (query, key, value), mixed, scaled, decoder(case.shape, heads, mixed))
    alone = [*range(2), *range(6, query.shape[1])]
    again = segments_of(case)
    rows = (query[:, alone], key[:, alone], value[:, alone])
    expected = attend_rows(0, rows, again, scaled, None)
    torch.testing.assert_close(found[alone], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0])
def test_weights_survive_large_scores(spread: float) -> None:
    """Guards the kernel's own exponential: scores far apart neither overflow nor become NaN."""
    case = Case((((6,), 5, 4),))
    slow, fast = segments_of(case), segments_of(case)
    query, key, value = rows_of(case, slow)
    scaled = Scaling(spread, None, None)
    expected = attend_rows(0, (query, key, value), slow, scaled, None)
    compiled = decoder(case.shape, case.kv_heads * case.group, fast)
    found = attend_rows(0, (query, key, value), fast, scaled, compiled)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
