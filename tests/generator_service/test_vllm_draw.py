"""Draws inside vLLM are those of the own engine. Where vLLM is (make conformance)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generator_service.engine.sampling import sample
from specrej.contracts import Sampling

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from generator_service.stock import vllm_draw
from generator_service.stock.vllm_draw import KeyedDraws

SAMPLINGS = [
    Sampling(seed=3, temperature=0.7, top_k=20),
    Sampling(seed=2**63 - 1, top_p=0.8),
    Sampling(seed=4, min_tokens=5),
]


def added(index: int) -> Any:
    """A row of a request at its first token; token 2 would end it."""
    common = vllm_draw.common_arguments(f"{index}", 3, SAMPLINGS[index], [2])
    arguments = vllm_draw.arguments(common, index, 0)
    params = SamplingParams(temperature=0.0, max_tokens=9, extra_args=arguments)
    return (index, params, [1, 2, 3], [])


def drawn(processor: KeyedDraws, logits: torch.Tensor) -> list[int]:
    """A greedy sampler's tokens."""
    tokens: list[int] = processor.apply(logits.clone()).argmax(dim=-1).tolist()
    return tokens


def expected(logits: torch.Tensor, index: int) -> int:
    forbidden = [2] if SAMPLINGS[index].min_tokens else []
    return int(sample(logits[None].clone(), SAMPLINGS[index], [index], 0, forbidden)[0])


def test_rows_move_with_their_requests() -> None:
    """tests/conformance compares whole answers, of several sessions at different steps."""
    processor = KeyedDraws(None, torch.device("cpu"), False)
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).expand(3, 300)
    rows = [added(index) for index in range(3)]
    processor.update_state(BatchUpdate(3, removed=[], added=rows, moved=[]))
    by_candidate = [expected(logits[0], index) for index in range(3)]
    assert len(set(by_candidate)) == 3
    assert drawn(processor, logits) == by_candidate
    move = (2, 0, MoveDirectionality.UNIDIRECTIONAL)
    processor.update_state(BatchUpdate(2, removed=[0], added=[], moved=[move]))
    assert drawn(processor, logits[:2]) == [by_candidate[2], by_candidate[1]]
    swap = (0, 1, MoveDirectionality.SWAP)
    processor.update_state(BatchUpdate(2, removed=[], added=[], moved=[swap]))
    assert drawn(processor, logits[:2]) == [by_candidate[1], by_candidate[2]]


def test_keyed_draws_are_not_argmax_invariant() -> None:
    """vLLM skips argmax-invariant processors in greedy steps."""
    assert not KeyedDraws(None, torch.device("cpu"), False).is_argmax_invariant()
