"""The engine on the embedded model: real weights, a real vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from generator_service.engine.text import Text
from specrej.contracts import Prompt, Sampling
from tests.generator_service import tiny
from tests.generator_service.stepping import Recorder, admitted, grown, tokens_of

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM.load(DIRECTORY, "cpu")


@pytest.fixture(scope="module")
def prompt_ids(model: CausalLM) -> list[int]:
    prompt = Prompt.from_user("Name three uses of a brick.")
    return Text.load(DIRECTORY, model.eos_ids).encode(prompt)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_survivors_have_the_tokens_of_a_run_without_cuts(
    model: CausalLM, prompt_ids: list[int], temperature: float
) -> None:
    """Three rounds on real weights, greedy and seeded."""
    engine = Engine(model, 20_000)
    sampling = Sampling(max_tokens=16, temperature=temperature, seed=42)
    whole = admitted(engine, prompt_ids, 12, sampling)
    expected = tokens_of(grown(engine, whole, 16))
    engine.close(whole)
    cut = admitted(engine, prompt_ids, 12, sampling)
    made: dict[int, tuple[int, ...]] = {}
    for until, keep in ((4, set(range(1, 12, 2))), (8, {3, 7, 11}), (16, {3, 11})):
        made |= tokens_of(grown(engine, cut, until))
        engine.prune(cut, keep)
    assert [made[number] for number in (3, 11)] == [expected[number] for number in (3, 11)]
    for number, token_ids in made.items():
        assert token_ids == expected[number][: len(token_ids)]


def test_logits_equal_plain_transformers(model: CausalLM, prompt_ids: list[int]) -> None:
    """Within 1e-3, and the summed log-probabilities too, after two rounds and a cut."""
    recorder = Recorder(model)
    engine = Engine(recorder, 20_000)
    sampling = Sampling(max_tokens=12, seed=5, ignore_eos=True)
    session_id = admitted(engine, prompt_ids, 16, sampling)
    grown(engine, session_id, 6)
    engine.prune(session_id, {0, 9})
    batch = grown(engine, session_id, 12)
    plain = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    for row, prefix in enumerate(batch.prefixes):
        tiny.check_candidate(plain, prompt_ids, prefix, recorder.passes[-1].logits[row], 1e-3)
