"""Model families, from their files to logits; those that cannot work are refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from generator_service.engine.engine import Engine
from generator_service.engine.model import CausalLM
from tests.generator_service import families, tiny
from tests.generator_service.stepping import (
    ENDLESS,
    PROMPT,
    Recorder,
    admitted,
    grown,
    result,
    steps,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", families.SUPPORTED)
def test_logits_equal_plain_transformers(name: str, tmp_path: Path) -> None:
    """Three rounds and two cuts on a model that was loaded from its files."""
    directory = families.save(name, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = Recorder(CausalLM.load(directory, "cpu"))
    engine = Engine(model, 2000, prefill_chunk=7)
    session_id = admitted(engine, n=6)
    for until, keep in ((8, {0, 2, 5}), (16, {2, 5})):
        grown(engine, session_id, until)
        engine.prune(session_id, keep)
    for row, prefix in enumerate(grown(engine, session_id).prefixes):
        tiny.check_candidate(reference, PROMPT, prefix, model.passes[-1].logits[row], 1e-3)
    assert model.eos_ids == {families.END, families.END_OF_TURN}


def test_longrope_is_used_before_its_factors_change(tmp_path: Path) -> None:
    """Guards against factors of a short text that a long one of the same pass chooses."""
    directory = families.save("Phi-3", tmp_path)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config |= {"rope_parameters": rope | factors | {"factor": 8.0}}
    path.write_text(json.dumps(config | {"original_max_position_embeddings": 32}))
    assert CausalLM.load(directory, "cpu").sizes.context_tokens == 32


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """Guards against random numbers in their place, with a warning in the log."""
    directory = families.save("Llama 3", tmp_path)
    path = directory / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        CausalLM.load(directory, "cpu")


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_family_that_cannot_work_is_refused(name: str, tmp_path: Path) -> None:
    """Guards against wrong tokens, and errors at the first request: Bloom's and Falcon's attention
    stayed their own, and candidates saw each other."""
    directory = families.save(name, tmp_path)
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    with pytest.raises(ValueError, match=f"^model_type {kind}: .*{families.REFUSED[name][2]}"):
        CausalLM.load(directory, "cpu")


# On random weights of each architecture, without files

SYSTEM = [3 + 11 * i % 89 for i in range(70)]


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_stored_prompt_gives_the_logits_of_a_new_one(name: str) -> None:
    """Guards against an answer that depends on whether the prompt was cached, and on where its
    chunks end, which other sessions' prompts decide.

    To the last bit: first draws come from the logits of the prompt's last token.
    """
    logits = []
    for chunk in (8, 1, 5):
        model = Recorder(CausalLM(tiny.build(name)))
        engine = Engine(model, 5000, prefill_chunk=chunk, prefix_cache_slots=1000)
        for _ in range(2):
            session_id = admitted(engine)
            grown(engine, session_id, 1)
            engine.close(session_id)
            logits.append(model.passes[-1].logits)
        assert model.num_prompt_tokens == len(PROMPT)
    assert all(torch.equal(one, logits[0]) for one in logits)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-5)], ids=str
)
@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_over_shared_nodes_equal_plain_transformers(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Prompts of up to three nodes, one split while it is read; cuts and windows.

    Float64 has no rounding errors; float32 uses compiled code.
    """
    reference = tiny.build(name).to(dtype)
    model = Recorder(CausalLM(tiny.build(name).to(dtype)))
    engine = Engine(model, 5000, prefill_chunk=30)
    tails = [[5, 6, 7], [], PROMPT, [5, 6, 7]]
    prompts = [SYSTEM + tail for tail in tails] + [[*SYSTEM[:66], 90, 91]]
    sessions = [admitted(engine, prompt) for prompt in prompts[:2]]
    steps(engine, 2)
    for prompt in prompts[2:]:
        sessions.append(admitted(engine, prompt, sampling=replace(ENDLESS, seed=len(sessions))))
        engine.check_integrity()
    for until, keep in ((5, {0, 2}), (9, {2})):
        for running in [engine.extend(session_id, until) for session_id in sessions]:
            result(engine, running)
        for session_id in sessions:
            engine.prune(session_id, keep)
    assert model.num_prompt_tokens == 70 + 3 + 17 + 2
    for session_id, prompt in zip(sessions, prompts, strict=True):
        (prefix,) = grown(engine, session_id, 10).prefixes
        tiny.check_candidate(reference, prompt, prefix, model.passes[-1].logits[0], tolerance)
