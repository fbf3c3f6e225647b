"""Draws inside vLLM are those of the own engine. Where vLLM is (make conformance)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generator_service.sampling import sample
from specrej.contracts import Sampling

pytest.importorskip("vllm", reason="vLLM is not in this environment: make vllm")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from generator_service import vllm_draw
from generator_service.vllm_draw import KeyedDraws

SAMPLINGS = [
    Sampling(seed=3),
    Sampling(seed=3, temperature=0.7, top_k=20),
    Sampling(seed=2**63 - 1, top_p=0.8),
    Sampling(seed=4, min_tokens=5),
    Sampling(temperature=0.0),
]


def added(index: int, sampling: Sampling, candidate: int, step: int, made: list[int]) -> Any:
    arguments = vllm_draw.arguments(sampling, candidate, step, [2])
    params = SamplingParams(temperature=0.0, max_tokens=9, extra_args=arguments)
    return (index, params, [1, 2, 3], made)


def drawn(processor: KeyedDraws, logits: torch.Tensor) -> list[int]:
    """What a greedy sampler makes of it."""
    tokens: list[int] = processor.apply(logits.clone()).argmax(dim=-1).tolist()
    return tokens


def expected(logits: torch.Tensor, sampling: Sampling, candidate: int, step: int) -> int:
    forbidden = [2] if step < sampling.min_tokens else []
    return int(sample(logits[None].clone(), sampling, [candidate], step, forbidden)[0])


def test_every_row_has_its_own_draw() -> None:
    """Requests of several sessions, at different steps, some of them nobody's of ours."""
    processor = KeyedDraws(None, torch.device("cpu"), False)
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 2] += 6  # what min_tokens forbids would be drawn often
    made: list[list[int]] = [[7] * (index // 2) for index in range(10)]
    rows = [
        added(index, SAMPLINGS[index % 5], 10 + index, 2, made[index])
        for index in range(10)
        if index != 4
    ]
    foreign: Any = (4, SamplingParams(temperature=0.0), [1], [])
    processor.update_state(BatchUpdate(10, removed=[], added=[*rows, foreign], moved=[]))
    steps = [2 + index // 2 for index in range(10)]

    def right() -> list[int]:
        tokens = [
            expected(logits[index], SAMPLINGS[index % 5], 10 + index, steps[index])
            for index in range(10)
        ]
        tokens[4] = int(logits[4].argmax())
        return tokens

    assert drawn(processor, logits) == right()
    for row in made:  # vLLM's own lists grow: the next step
        row.append(1)
    steps = [step + 1 for step in steps]
    processor.update_state(None)
    assert drawn(processor, logits) == right()


def test_rows_move_with_their_requests() -> None:
    processor = KeyedDraws(None, torch.device("cpu"), False)
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).expand(3, 300)
    rows = [added(index, SAMPLINGS[0], index, 0, []) for index in range(3)]
    processor.update_state(BatchUpdate(3, removed=[], added=rows, moved=[]))
    by_candidate = [expected(logits[0], SAMPLINGS[0], index, 0) for index in range(3)]
    assert len(set(by_candidate)) == 3
    move = (2, 0, MoveDirectionality.UNIDIRECTIONAL)
    processor.update_state(BatchUpdate(2, removed=[0], added=[], moved=[move]))
    assert drawn(processor, logits[:2]) == [by_candidate[2], by_candidate[1]]
    swap = (0, 1, MoveDirectionality.SWAP)
    processor.update_state(BatchUpdate(2, removed=[], added=[], moved=[swap]))
    assert drawn(processor, logits[:2]) == [by_candidate[1], by_candidate[2]]


def test_it_says_that_it_changes_the_likeliest_token() -> None:
    """vLLM leaves processors out of greedy steps that say otherwise."""
    assert not KeyedDraws(None, torch.device("cpu"), False).is_argmax_invariant()
