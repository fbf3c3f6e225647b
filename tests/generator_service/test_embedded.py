"""The engine on the embedded model: real weights, a real vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from generator_service.engine import Engine, OpenCommand, PrefixBatch
from generator_service.model import CausalLM
from generator_service.text import Text
from inference.attention import Segment
from specrej.contracts import Prompt, Sampling
from tests.generator_service import tiny

DIRECTORY = Path(".models/SmolLM2-135M-Instruct")
PROMPT = Prompt.from_user("Name three uses of a brick.")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM.load(DIRECTORY, "cpu")


@pytest.fixture
def engine(model: CausalLM) -> Iterator[Engine]:
    engine = Engine(model, 20_000)
    engine.start()
    yield engine
    engine.stop()
    assert engine.ledger.owned == 0


def opened(engine: Engine, prompt_ids: list[int], sampling: Sampling) -> int:
    session_id, future = engine.open(OpenCommand(prompt_ids, 16, sampling, 8))
    future.result(60)
    return session_id


def extended(engine: Engine, session_id: int, until: int) -> PrefixBatch:
    return engine.extend(session_id, until).result(300)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_survivors_have_the_tokens_of_a_run_without_cuts(
    model: CausalLM, engine: Engine, temperature: float
) -> None:
    """N=16, three rounds, greedy and seeded: the invariant users rely on, on real weights."""
    prompt_ids = Text.load(DIRECTORY, model.eos_ids).encode(PROMPT)
    sampling = Sampling(max_tokens=32, temperature=temperature, seed=42)
    whole = opened(engine, prompt_ids, sampling)
    expected = {p.id: p.token_ids for p in extended(engine, whole, 32).prefixes}
    engine.close(whole).result(60)
    cut = opened(engine, prompt_ids, sampling)
    found: dict[int, tuple[int, ...]] = {}
    for until, keep in ((8, set(range(1, 16, 2))), (16, {3, 7, 11, 15}), (32, {3, 11})):
        found |= {p.id: p.token_ids for p in extended(engine, cut, until).prefixes}
        engine.prune(cut, keep).result(60)
    engine.close(cut).result(60)
    assert {number: len(found[number]) for number in (3, 11)} == {
        number: len(expected[number]) for number in (3, 11)
    }
    for number, token_ids in found.items():
        assert token_ids == expected[number][: len(token_ids)]


def test_logits_equal_plain_transformers(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-3, and the summed log-probabilities too, after two rounds and a cut."""
    seen: list[torch.Tensor] = []
    forward = model.forward

    def spy(
        ids: list[int], positions: list[int], segments: list[Segment], last: list[int]
    ) -> torch.Tensor:
        seen.append(forward(ids, positions, segments, last))
        return seen[-1]

    monkeypatch.setattr(model, "forward", spy)
    engine = Engine(model, 20_000)
    engine.start()
    prompt_ids = Text.load(DIRECTORY, model.eos_ids).encode(PROMPT)
    session_id = opened(engine, prompt_ids, Sampling(max_tokens=12, seed=5, ignore_eos=True))
    extended(engine, session_id, 6)
    engine.prune(session_id, {0, 9}).result(60)
    batch = extended(engine, session_id, 12)
    engine.stop()
    plain = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    for row, prefix in enumerate(batch.prefixes):
        logits = tiny.full_logits(plain, [*prompt_ids, *prefix.token_ids])
        # The last step read all tokens but the newest.
        torch.testing.assert_close(seen[-1][row], logits[-2], atol=1e-3, rtol=0)
        steps = torch.log_softmax(logits[len(prompt_ids) - 1 : -1], dim=-1)
        chosen = steps.gather(1, torch.tensor(prefix.token_ids)[:, None]).sum().item()
        assert prefix.logprob == pytest.approx(chosen, abs=1e-3)
