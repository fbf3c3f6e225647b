"""Several of each service, as real processes: larger requests, and restarts that nobody notices."""

from __future__ import annotations

import pytest

from benchmarks.rolling import TOYS, Load, rolling
from specrej import Client
from specrej.client import Options
from specrej.contracts import CacheControl, Generation, Schedule
from specrej.errors import InvalidRequest
from specrej.stack import Stack

pytestmark = pytest.mark.e2e

# Eight candidates of 32 tokens fill one generator to its first decision token, with a short prompt.
_SLOTS = 320
_PROMPT = "Name three colours."
_OPTIONS = Options(
    n=16,
    max_tokens=48,
    seed=5,
    schedule=Schedule("tokens", (32,)),
    return_candidates=16,
    cache=CacheControl.BYPASS,
)


async def _asked(generators: int, slots: int) -> Generation:
    environment = {
        "SPECREJ_GENERATOR_KV_SLOTS": str(slots),
        "SPECREJ_GENERATOR_THREADS": "1",
        # Nobody is taken for silent, however busy the machine is.
        "SPECREJ_ORCHESTRATOR_BACKEND_LOST_S": "60",
    }
    async with (
        Stack(environment=environment, generators=generators) as stack,
        Client(stack.orchestrator_address, timeout_s=120) as client,
    ):
        return await client.generate(_PROMPT, **_OPTIONS)


async def test_two_generators_answer_what_one_cannot() -> None:
    """Twice what one admits: the same candidates and rewards as of one generator twice as large."""
    with pytest.raises(InvalidRequest):
        await _asked(1, _SLOTS)
    split = await _asked(2, _SLOTS)
    whole = await _asked(1, 2 * _SLOTS)
    assert split.n == whole.n == 16
    assert [each.id for each in split.candidates] == [each.id for each in whole.candidates]
    assert [each.text for each in split.candidates] == [each.text for each in whole.candidates]
    scores = [each.score for each in whole.candidates]
    assert [each.score for each in split.candidates] == pytest.approx(scores, abs=1e-4)
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
