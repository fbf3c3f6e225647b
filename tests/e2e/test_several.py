"""Several of each service as real processes: larger requests, and restarts without failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import TOYS
from benchmarks.rolling import Load, rolling
from deploy.local.stack import Stack
from specrej import Client
from specrej.client import Options
from specrej.contracts import CacheControl, Generation, TokensSchedule
from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model

pytestmark = pytest.mark.e2e

# Eight candidates of 32 tokens fill one generator to its first decision token, with a short prompt.
_SLOTS = 320
_OPTIONS = Options(
    n=16,
    max_tokens=48,
    seed=5,
    schedule=TokensSchedule((32,)),
    return_candidates=16,
    cache=CacheControl.BYPASS,
)


async def _answer(model: Path, generators: int, slots: int) -> Generation:
    reader = {"name": "reader", "kind": "likelihood", "directory": str(model)}
    environment = {
        "SPECREJ_GENERATOR_MODEL": str(model),
        "SPECREJ_REWARD_REWARDS": json.dumps([reader]),
        "SPECREJ_GENERATOR_KV_SLOTS": str(slots),
        "SPECREJ_GENERATOR_THREADS": "1",
        # No backend counts as lost, however busy the machine is.
        "SPECREJ_ORCHESTRATOR_BACKEND_LOST_S": "60",
    }
    async with (
        Stack(environment=environment, generators=generators) as stack,
        Client(stack.orchestrator_address, timeout_s=240) as client,
    ):
        return await client.generate("Name three colours.", **_OPTIONS)


async def test_two_generators_answer_a_request_too_large_for_one(tmp_path: Path) -> None:
    """The candidates and rewards equal those of one generator with twice the slots."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    save_language_model(tmp_path, make_config("llama", 0, **sizes), make_tokenizer("<pad>"), seed=7)
    split = await _answer(tmp_path, 2, _SLOTS)
    whole = await _answer(tmp_path, 1, 2 * _SLOTS)
    assert split.n == whole.n == 16
    parts, wholes = split.candidates, whole.candidates
    assert [(c.id, c.text) for c in parts] == [(c.id, c.text) for c in wholes]
    scores = [candidate.score for candidate in wholes]
    assert [candidate.score for candidate in parts] == pytest.approx(scores, abs=1e-4)
    assert split.usage.generated_tokens == whole.usage.generated_tokens


async def test_everything_is_restarted_under_load() -> None:
    phases = await rolling(Load(clients=3, n=8, max_tokens=24), TOYS)
    assert [failure for phase in phases for failure in phase.failures] == []
    assert {phase.restarted for phase in phases} == {
        "",
        *(
            f"{kind}{number}"
            for kind in ("orchestrator", "generator", "reward")
            for number in ("", "-2")
        ),
    }
    assert all(phase.answered for phase in phases)
