"""Draws have the right distribution and depend on (seed, candidate, step) alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from generator_service.engine.sampling import (
    Adjustment,
    _sample_block,
    most_probable,
    sample,
    uniforms,
)
from specrej.contracts import Sampling, TokenBias

CPU = torch.device("cpu")
IDS = list(range(20_000))


def drawn(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    tokens, _ = sample(logits.expand(len(IDS), -1), sampling, IDS, step=4)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_most_probable_tokens_are_those_of_the_model(temperature: float) -> None:
    """Guards against those of the tempered, cut or adjusted distribution, and infinite ones."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(5))
    logits[2, 1:] = -torch.inf
    sampling = Sampling(temperature=temperature, top_k=3)
    tokens, logprobs = sample(logits, sampling, IDS[:6], 4)
    expected = logits.log_softmax(dim=-1).clamp(min=-9999.0)
    for row, (ids, values) in enumerate(most_probable(logits, tokens, logprobs, 5)):
        best = expected[row].topk(5)
        torch.testing.assert_close(torch.tensor(values), best.values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(expected[row, ids], best.values)
        assert tokens[row] in ids
    ((ids, _),) = most_probable(logits[:1], tokens[:1], logprobs[:1], 60)
    assert sorted(ids) == list(range(50))


def test_the_smallest_nucleus_is_the_likeliest_token() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]]))
    for least in (1e-9, 1e-46, 5e-324):  # the last two are 0 in float32
        for kept in (0, 2, 5):
            assert set(drawn(logits, Sampling(top_p=least, top_k=kept)).tolist()) == {1}
    assert set(drawn(logits, Sampling(top_k=1)).tolist()) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_nucleus_draw_does_not_depend_on_other_rows(temperature: float) -> None:
    """Guards equal weights, which are the rule in bfloat16, against the order of the full sort that
    another row needs; and sums against the threads that divide a single row."""
    random = torch.Generator().manual_seed(0)
    rounded = (torch.randn(1, 32_000, generator=random) * 2).bfloat16().float()
    flat = torch.zeros_like(rounded)
    for seed in range(60):
        sampling = Sampling(top_p=0.9, temperature=temperature, seed=seed)
        alone, _ = sample(rounded, sampling, [0], 3)
        beside, _ = sample(torch.cat([rounded, flat]), sampling, [0, 1], 3)
        assert alone[0] == beside[0]
    row = torch.randn(1, 49_152, generator=torch.Generator().manual_seed(34)) * 0.3
    sampling = Sampling(top_p=0.9, temperature=temperature, seed=34)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone, _ = sample(row, sampling, [0], 3)
        twice, _ = sample(row.expand(2, -1), sampling, [0, 1], 3)
    finally:
        torch.set_num_threads(threads)
    assert alone[0] == twice[0]


def _split_mix(seed: int, candidate_id: int, step: int) -> float:
    """As `uniforms`, in numbers that cannot overflow."""
    state = seed
    for key in (candidate_id, step, 0):
        state = (state + (key + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 1_000_000))
def test_uniforms_are_those_of_split_mix(seed: int, step: int, candidate_id: int) -> None:
    """Guards cached answers, and backends of several versions: equal seeds have equal draws."""
    measured = uniforms(seed, [candidate_id, 0], step, CPU).tolist()
    assert measured == [_split_mix(seed, number, step) for number in (candidate_id, 0)]


@pytest.mark.parametrize("vocabulary", [3, 32, 255, 256, 257, 5000])
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 0.2}]
)
def test_excluded_tokens_are_not_drawn(vocabulary: int, changes: dict[str, float]) -> None:
    """As if there were no others: draws of torch, which GPUs use, from rows with minus infinity in
    their places. Log-probabilities are of all tokens, also where compiled code draws.

    Sums in another order may change one draw in some 10^6; with these seeds none changes.
    """
    for temperature, forbidden, has_mask in itertools.product(
        (0.0, 0.01, 0.7, 1.0, 2.0), ((), (0, 2)), (False, True)
    ):
        random = torch.Generator().manual_seed(vocabulary)
        logits = 4 * torch.randn(40, vocabulary, generator=random)
        logits[:, vocabulary // 2 :: 7] = -torch.inf
        logits[:, 1] = 0.0  # one at least may be drawn
        mask = torch.rand(40, vocabulary, generator=random) < (0.2 if has_mask else 1.0)
        mask[:, 1] = True
        before, ids = logits.clone(), list(range(40))
        sampling = Sampling(temperature=temperature, seed=9, **changes)  # type: ignore[arg-type]
        allowed = packed(mask, vocabulary + 70) if has_mask else None
        tokens, logprobs = sample(logits, sampling, ids, 5, forbidden, allowed=allowed)
        mask[:, forbidden] = False
        others = logits.masked_fill(~mask, -torch.inf)
        expected, _ = _sample_block(others, others, sampling, ids, 5, ())
        assert tokens.tolist() == expected.tolist()
        assert mask.gather(1, tokens[:, None]).all()
        untouched = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, untouched, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, before, rtol=0, atol=0)


def packed(mask: torch.Tensor, vocabulary: int) -> NDArray[np.uint32]:
    """Bits in words; a tokenizer may have more tokens than the model has logits."""
    bits = torch.nn.functional.pad(mask, (0, -(-vocabulary // 32) * 32 - mask.shape[1]))
    return np.packbits(bits.numpy(), axis=1, bitorder="little").view(np.uint32)


# Biases, penalties and min_p

VOCABULARY = 12
TOKENS = st.integers(0, VOCABULARY - 1)
PENALTIES = st.sampled_from([-2.0, -0.3, 0.0, 0.0, 0.7, 2.0])
SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.0, 1.3, 4.0]),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    logit_bias=st.lists(
        st.builds(TokenBias, TOKENS, st.sampled_from([-100.0, -1.5, 0.3, 4.0])),
        max_size=3,
        unique_by=lambda item: item.token_id,
    ).map(tuple),
)


def naive(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], text: Sequence[int]
) -> list[float]:
    """One row's adjusted logits, token by token, from the definitions of each field."""
    adjusted = list(logits)
    for item in sampling.logit_bias:
        adjusted[item.token_id] += item.bias
    for token_id in range(len(adjusted)):
        if token_id in (*prompt, *text):
            is_positive = adjusted[token_id] > 0
            penalty = sampling.repetition_penalty
            adjusted[token_id] *= 1 / penalty if is_positive else penalty
        adjusted[token_id] -= sampling.frequency_penalty * list(text).count(token_id)
        adjusted[token_id] -= sampling.presence_penalty * (token_id in text)
    return adjusted


@given(
    st.data(),
    SAMPLINGS,
    st.lists(TOKENS, min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(1, 4),
)
def test_adjusted_logits_equal_a_naive_computation(
    data: st.DataObject, sampling: Sampling, prompt: list[int], length: int, num_rows: int
) -> None:
    """Guards against tokens that are counted twice where prompt and text share them, and against a
    penalty in place of a bias."""
    tokens = st.lists(st.integers(0, 4), min_size=length, max_size=length)
    texts = [data.draw(tokens) for _ in range(num_rows)]
    logits = torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(length))
    before = logits.clone()
    adjusted = Adjustment(sampling, prompt).apply(logits, texts)
    rows = zip(logits.tolist(), texts, strict=True)
    expected = [naive(row, sampling, prompt, text) for row, text in rows]
    torch.testing.assert_close(adjusted, torch.tensor(expected), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 0.5}, [0.1**2, 0.4**2, 0.05**2, 0.25**2, 0.2**2]),
        ({"temperature": 1.0}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"temperature": 2.0}, [0.1**0.5, 0.4**0.5, 0.05**0.5, 0.25**0.5, 0.2**0.5]),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0.2]),  # 0.4 + 0.25 < 0.7 <= 0.4 + 0.25 + 0.2
        ({"min_p": 0.5}, [0, 0.4, 0, 0.25, 0.2]),
        ({"min_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"min_p": 1.0}, [0, 0.4, 0, 0, 0]),
        ({"min_p": 0.2, "temperature": 0.5}, [0, 0.4**2, 0, 0.25**2, 0.2**2]),
        ({"min_p": 0.5, "top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"min_p": 0.6, "top_k": 4}, [0, 0.4, 0, 0.25, 0]),
        # 0.7 of the mass that min_p leaves, 0.85: 0.4 + 0.25 >= 0.595.
        ({"min_p": 0.5, "top_p": 0.7}, [0, 0.4, 0, 0.25, 0]),
    ],
)
def test_frequencies_are_those_of_the_likeliest_tokens(
    changes: dict[str, float], expected: list[float]
) -> None:
    """20,000 draws: a wrong temperature or an off-by-one shifts some token by far more than 2 %.

    Guards against a min_p of the probability itself, before the temperature or after top_p.
    """
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.25, 0.2]])) + 3
    tokens = drawn(logits, Sampling(**changes))  # type: ignore[arg-type]
    measured = torch.bincount(tokens, minlength=5) / len(tokens)
    weights = torch.tensor(expected)
    torch.testing.assert_close(measured, weights / weights.sum(), atol=0.02, rtol=0)
    assert torch.equal(measured > 0, weights > 0)


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"temperature": 0.0}, {"min_p": 0.01}])
def test_adjusted_draws_are_those_of_adjusted_logits(changes: dict[str, float]) -> None:
    """Also in several blocks of rows. Log-probabilities are those of the untouched logits."""
    rows, vocabulary = 100, 50_000  # 83 rows make a block
    ids, generator = list(range(rows)), torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(rows, vocabulary, generator=generator)
    texts = torch.randint(0, 500, (rows, 7), generator=generator).tolist()
    penalties = Sampling(seed=3, repetition_penalty=1.5, presence_penalty=2.0)
    biased = replace(penalties, logit_bias=(TokenBias(100, 12.0),))  # most draws
    sampling = replace(biased, **changes)  # type: ignore[arg-type]
    adjustment = Adjustment(sampling, [1, 2, 3])
    tokens, logprobs = sample(logits, sampling, ids, 7, {9}, adjustment, texts)
    nothing = Adjustment(Sampling(), [])  # by the same code: a kernel rounds otherwise
    plain, _ = sample(adjustment.apply(logits, texts), sampling, ids, 7, {9}, nothing, texts)
    assert tokens.tolist() == plain.tolist()
    untouched = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, untouched)
