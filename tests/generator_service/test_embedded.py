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
from tests.generator_service.stepping import Recorder, admitted, grown

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM.load(DIRECTORY, "cpu")


@pytest.fixture(scope="module")
def prompt_ids(model: CausalLM) -> list[int]:
    prompt = Prompt.from_user("Name three uses of a brick.")
    return Text.load(DIRECTORY, model.eos_ids).encode(prompt)


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
