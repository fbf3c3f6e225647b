"""Defaults of different services that must fit together."""

from __future__ import annotations

import pytest

from generator_service.settings import GeneratorSettings
from orchestrator.settings import OrchestratorSettings
from reward_service.settings import RewardSettings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("GENERATOR", "ORCHESTRATOR", "REWARD"):
        monkeypatch.delenv(f"SPECREJ_{service}_LEASE_S", raising=False)
        monkeypatch.delenv(f"SPECREJ_{service}_DEADLINE_S", raising=False)


def test_a_scoring_session_outlives_the_longest_request() -> None:
    """It is idle while the generator works: a lease of a minute ended long Best-of-N requests."""
    assert RewardSettings().lease_s > OrchestratorSettings().deadline_s


def test_a_reward_takes_as_many_candidates_as_a_generator_makes() -> None:
    """Otherwise the default limits refuse each other's largest request."""
    assert RewardSettings().max_batch >= GeneratorSettings().max_candidates


def test_backends_have_longer_deadlines_than_requests() -> None:
    """Otherwise the one that a backend sets by itself ends what its orchestrator still wants."""
    longest = OrchestratorSettings().deadline_s
    assert min(GeneratorSettings().deadline_s, RewardSettings().deadline_s) > longest
